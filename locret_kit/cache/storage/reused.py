"""Rows of one layer that lie where there is room: an eviction moves the newest rows that stay into those that it frees, and no
others. A layer of 16,384 slots that is cut after 1,024 new tokens moves at most as many rows, where ``BoundedLayer`` moves
nearly all of them up.

A slot is a row by its age. Everything outside, policies and files too, sees slots; attention alone reads rows as they lie,
with their ranks. New rows come after all others, so masks that tell the newest rows apart hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from locret_kernels.backend import function

from ...policies.policy import Policy
from ..decoding import VarlenRows
from .rows import BoundedLayer, EqualLengthHeads, Index


def counting(capacity: int) -> torch.dtype:
    """Type of the numbers of so many rows."""
    return torch.int16 if capacity < 2**15 else torch.int32


def permutation_bytes(capacity: int) -> int:
    """Bytes of the rows of a head's slots, and of the slots of its rows."""
    return 2 * counting(capacity).itemsize * capacity


def reuses_rows(policy: Policy, kv_bits: int | None) -> bool:
    """Whether rows may lie in any order: nothing is merged into them, no mask, sparse attention or recall reads runs of them,
    no group of them shares steps, and every head has as many."""
    runs = (policy.merge, policy.prefill_mask, policy.sparse, policy.recall)
    in_order = policy.ragged or policy.keeps_everything or any(part is not None for part in runs)
    return not in_order and kv_bits in (None, 8)


class ReusedLayer(BoundedLayer):
    """Rows of one layer, the same number in every head, in any order; nothing is merged into them."""

    row_of: Tensor
    """``[B, H, capacity]``: the row in which a slot lies. From ``rows`` on, slot and row are the same."""
    slot_of: Tensor
    """``[B, H, capacity]``: the slot, or rank, of each row."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        with torch.inference_mode(False):
            self.row_of, self.slot_of = (
                torch.empty(self._shape(self.capacity), dtype=counting(self.capacity), device=self.device)
                for _ in range(2)
            )
        self._lay_in_order()

    def _lay_in_order(self) -> None:
        """Every slot in the row of its own number."""
        number_C = torch.arange(self.capacity, dtype=counting(self.capacity), device=self.device)
        self.row_of[:] = number_C
        self.slot_of[:] = number_C

    # ---- what attention reads: rows as they lie -------------------------------------------------------------------

    def parts(self) -> Iterator[EqualLengthHeads]:
        B, H = self.positions.shape[:2]
        held = slice(None), slice(None), slice(0, self.rows)
        keys, values = (self._numbers(name, getattr(self, name)[held]) for name in ("keys", "values"))
        stats, positions = self.stats[:, :, :, : self.rows], self.positions[held]
        yield EqualLengthHeads(slice(0, B), slice(0, H), keys, values, stats, positions, ranks=self.slot_of[held])

    def flat(self) -> VarlenRows:
        return replace(super().flat(), ranks_N=self.slot_of.flatten())

    # ---- what everyone else reads: slots ----------------------------------------------------------------------------

    def _row_of_slot(self) -> Tensor:
        """Row ``[B, H, S]`` (int64) of each slot."""
        return self.row_of[:, :, : self.rows].long()

    def slots(self, name: str) -> Tensor:
        index_BHS, buffer = self._row_of_slot(), getattr(self, name)
        if name == "stats":
            return buffer.gather(3, index_BHS.expand(len(buffer), -1, -1, -1))
        if buffer.dim() == 4:
            index_BHS = index_BHS[..., None].expand(-1, -1, -1, buffer.shape[-1])
        return self._numbers(name, buffer.gather(2, index_BHS))

    def head(self, name: str, b: int, h: int) -> Tensor:
        raise ValueError("rows that lie in any order are not merged in place")

    def kept(self) -> Tensor:
        return self.slots("positions")

    def set_entry_scores(self, score_BHS: Tensor) -> None:
        self.scores.scatter_(2, self._row_of_slot(), score_BHS)

    def _all_rows(self) -> Index:
        b, h = (torch.arange(n, device=self.device) for n in self.positions.shape[:2])
        return b[:, None, None], h[:, None], self._row_of_slot()

    # ---- eviction and other texts -----------------------------------------------------------------------------------

    def keep(self, stay_BHS: Tensor, mean: int) -> None:
        moves = function("reuse_rows", self.backend)(stay_BHS, self.row_of, self.slot_of, mean)
        function("move_rows", self.backend)(self._moving(), *moves)
        self.rows = mean
        self.since_eviction = 0

    def reset(self) -> None:
        super().reset()
        if self.is_initialized:
            self._lay_in_order()

    def _reorder_rest(self, beam_idx: Tensor) -> None:
        super()._reorder_rest(beam_idx)
        self.row_of, self.slot_of = (x.index_select(0, beam_idx) for x in (self.row_of, self.slot_of))
