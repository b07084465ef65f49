"""Several texts in one forward, each with a bounded cache of its own: linear layers see the new tokens of all texts at once,
attention and evictions are those of each text alone.

``Packed`` is for the kit's own batches: the new tokens of every text lie end to end in one row, so nothing is padded, a
text may be at its prompt while another is decoded, and texts come and go between forwards. ``BatchCache`` is for
``model.generate``, whose texts are rows that are padded to one length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..backbones.handler import Arguments, Handler, LayerOperations, Softmax
from ..heads import RetainingHeads, loaded
from ..settings import RunSettings
from .bounded import BoundedCache
from .context import Stage
from .storage.rows import CROPPING
from .view import score_alike, shared_scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..policies.policy import Policy

Span = tuple[int, int, int]
"""Row of a forward, and the first and the last but one of a text's new tokens in it."""


class Lanes(Cache, Handler):
    """Handler of forwards with several texts. ``spans`` says where the new tokens of each stand."""

    position_BT: Tensor
    """Position of each new token in its own text; 0 at padding."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.lanes: list[BoundedCache] = []
        self.spans: list[Span] = []

    def __bool__(self) -> bool:
        """False, as ``BoundedCache``."""
        return False

    @property
    def wants_unrotated(self) -> bool:  # type: ignore[override]
        """Whether q and k come before RoPE."""
        return self.lanes[0].wants_unrotated

    def operations(self, x: Tensor) -> LayerOperations | None:
        return self.lanes[0].operations(x)

    def _texts(self) -> Iterator[tuple[BoundedCache, int, slice]]:
        """Every text that has new tokens: its cache, its row, and where they stand."""
        for lane, (row, start, end) in zip(self.lanes, self.spans, strict=True):
            if start < end:
                yield lane, row, slice(start, end)

    def _place(self, shape: Sequence[int], device: torch.device) -> None:
        """Find the position of each new token of a forward ``[B, T]``."""
        self.position_BT = torch.zeros(*shape, dtype=torch.long, device=device)
        for lane, row, new in self._texts():
            seen = lane.get_seq_length()
            self.position_BT[row, new] = torch.arange(seen, seen + new.stop - new.start, device=device)

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention output ``[B, Q, T, D]``: each text's own; zeros at padding."""
        B, Q, T, _ = q_BQTD.shape
        if len(self.lanes) == 1 and self.spans == [(0, 0, T)]:
            return self.lanes[0].attend(layer, q_BQTD, k_BHTD, v_BHTD, softmax)
        # Columns of padding stay zero: no text reads them. Heads of a token lie side by side, as the backbone reads them.
        out = q_BQTD.new_zeros(B, T, Q, v_BHTD.shape[-1]).transpose(1, 2)
        contexts, scores_BHT = [lane.context for lane in self.lanes], None
        if score_alike(contexts):
            scores_BHT = shared_scores(contexts[0], layer, q_BQTD, k_BHTD, v_BHTD, self.position_BT)
        for lane, row, new in self._texts():
            # [B, heads, T, D] -> the text's own [1, heads, t, D]
            q, k, v = (x[row : row + 1, :, new] for x in (q_BQTD, k_BHTD, v_BHTD))
            score = None if scores_BHT is None else scores_BHT[row : row + 1, :, new]
            out[row : row + 1, :, new] = lane.attend(layer, q, k, v, softmax, score)
        return out

    def finish(self, hidden_BTE: Tensor, ids_BT: Tensor | None) -> None:
        """After a forward: texts whose policy scores tokens by their probability read the final hidden states."""
        for lane, row, new in self._texts():
            if lane.in_blocks:
                lane.read(hidden_BTE[row : row + 1, new], None if ids_BT is None else ids_BT[row : row + 1, new])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand keys and values through; ``attend`` stores them."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return int(query_length), 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(lane.nbytes for lane in self.lanes)


def refuse_packing(cache: BoundedCache) -> None:
    """Raise ValueError where a text of this cache cannot stand in one forward with others."""
    if not cache.context.description.packs_texts:
        raise ValueError(
            f"model_type={cache.context.spec.model_type!r}: its layers hold states, or read each other's rows, so each text is a "
            "forward of its own: use runtime.batch"
        )


class Packed(Lanes):
    """One forward of several texts whose new tokens stand end to end in one row.

    Args:
        counts: new tokens of each text. A text that is read ``in_blocks`` must not cross a boundary of its schedule.
    """

    def __init__(self, lanes: Sequence[BoundedCache], counts: Sequence[int]) -> None:
        super().__init__()
        # Texts end to end in one row: counts (3, 1, 2) are the spans 0-3, 3-4, 4-6.
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.lanes = list(lanes)
        self.spans = [(0, end - count, end) for end, count in zip(ends, counts, strict=True)]

    @property
    def last(self) -> list[int]:
        """Place of each text's last new token."""
        return [end - 1 for _, _, end in self.spans]

    def begin(self, model: PreTrainedModel, kwargs: Arguments) -> Arguments:
        ids = kwargs.get("input_ids")
        if ids is None:  # a model with several parts has looked its words up
            ids = kwargs["inputs_embeds"][..., 0]
        if tuple(ids.shape) != (1, self.spans[-1][2]):
            raise ValueError(f"input_ids={list(ids.shape)} must be [1, {self.spans[-1][2]}], every text's new tokens")
        for lane in self.lanes:
            lane.bind(model)
            if len(self.lanes) > 1:
                refuse_packing(lane)
        self._place(ids.shape, ids.device)
        return {**kwargs, "position_ids": self.position_BT, "attention_mask": None}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class BatchCache(Lanes):
    """A cache for ``model.generate`` with a padded batch: every row is a text of its own, evicted where it would be alone.

    Arguments are those of ``BoundedCache``. The first forward makes a cache for each row, whose prompt is what the
    attention mask shows; pass the whole prompt in one forward (no ``prefill_chunk_size``). Rows that are padded on the
    right are moved to the right edge, so that the last column is the last token of every row.

    Attributes:
        lanes: the cache of each row.

    Raises:
        ValueError: a setting out of range; in the first forward, a row without tokens, or a policy that reads the end of
            the prompt twice or scores tokens by their probability: ``runtime.batch`` runs those.
    """

    def __init__(
        self,
        settings: RunSettings | int | float | None = None,
        policy: str | Policy | None = None,
        heads: RetainingHeads | str | Path | None = None,
        *,
        stages: Sequence[Stage] = (),
        **given: object,
    ) -> None:
        super().__init__()
        heads = loaded(heads)  # once for all rows
        self._cache_for = lambda count: BoundedCache(
            settings, policy, heads, prompt_length=count, stages=stages, **given
        )
        self.columns = 0

    def begin(self, model: PreTrainedModel, kwargs: Arguments) -> Arguments:
        name = "input_ids" if kwargs.get("input_ids") is not None else "inputs_embeds"
        given, mask = kwargs[name], kwargs.get("attention_mask")
        B, T = given.shape[:2]
        # The mask covers all columns so far; its last T are those of this forward.
        fresh = torch.ones(B, T, dtype=torch.bool, device=given.device)
        if mask is not None:
            # A mask of fewer columns goes with a prompt that the cache has read already.
            if tuple(mask.shape) != (B, self.columns + T):
                raise ValueError(
                    f"attention_mask={list(mask.shape)} must be {[B, self.columns + T]}: the {self.columns} columns that "
                    f"this cache has seen and {T} new ones; other texts need reset() or a new cache"
                )
            fresh = mask[:, -T:].bool()
        if not self.lanes:
            # The prompt: every row is a text of its own from here on.
            kwargs = {**kwargs, name: _to_the_right(given, fresh)}
            counts = fresh.sum(1).tolist()
            self.lanes = [self._cache_for(count) for count in counts]
            for lane in self.lanes:
                if lane.policy.needs_logits or lane.policy.reread is not None:
                    raise ValueError(
                        f"policy={lane.policy.name!r} is not for model.generate with a batch: use runtime.batch"
                    )
                lane.bind(model)
                refuse_packing(lane)
        elif len(self.lanes) != B:
            raise ValueError(f"batch={B} must be {len(self.lanes)}, for which this cache has its buffers")
        else:
            counts = fresh.sum(1).tolist()
        # Padding stands on the left now, so the new tokens of a row end at its right edge.
        self.spans = [(row, T - count, T) for row, count in enumerate(counts)]
        self._place((B, T), given.device)
        if mask is None:  # a prompt that was read already comes again without its first columns
            _refuse_other_places(kwargs.get("position_ids"), self.position_BT)
        self.columns += T
        return {**kwargs, "position_ids": self.position_BT, "attention_mask": None}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, padding included."""
        return self.columns

    def reset(self) -> None:
        """Forget all texts: the next forward makes caches for others."""
        self.lanes, self.spans, self.columns = [], [], 0

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: as ``BoundedLayer.crop``."""
        raise ValueError(CROPPING)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes ``repeats`` rows, one after the other."""
        self.batch_select_indices(torch.arange(len(self.lanes), device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Row ``i`` becomes a copy of row ``indices[i]``, or of the ``i``-th one that a bool says."""
        rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.reorder_cache(rows)  # type: ignore[arg-type]  # a LongTensor

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row ``i`` becomes a copy of row ``beam_idx[i]``."""
        # A row that several beams go on from is copied for all of them but the first.
        taken: set[int] = set()
        lanes = []
        for row in beam_idx.tolist():
            lanes.append(deepcopy(self.lanes[row]) if row in taken else self.lanes[row])
            taken.add(row)
        self.lanes = lanes


def _refuse_other_places(given: object, position_BT: Tensor) -> None:
    """Raise ValueError unless new tokens without padding go on where the texts of a cache end."""
    if isinstance(given, Tensor) and given.shape == position_BT.shape and not torch.equal(given, position_BT):
        raise ValueError(
            f"position_ids begin with {given[:, 0].tolist()}, they must begin with {position_BT[:, 0].tolist()}, where "
            "this cache goes on: it takes texts in order and once; others need reset() or a new cache"
        )


def _to_the_right(x_BT: Tensor, fresh_BT: Tensor) -> Tensor:
    """Rows ``[B, T, ...]`` with their padding, wherever it is, before their tokens."""
    # False sorts before True, and a stable sort keeps the tokens' order.
    order_BT = fresh_BT.long().argsort(dim=1, stable=True)
    index = order_BT if x_BT.dim() == 2 else order_BT[..., None].expand_as(x_BT)
    return x_BT.gather(1, index)
