"""Evicted slots of one layer in blocks of the text: keys and values in the host's memory, what finds a block on the device.

Block ``n`` holds the tokens at positions ``n * size`` to ``n * size + size - 1``, each in a row of its own, as far as they were
evicted; the others are among the layer's rows still. Every head fills its blocks by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layouts import Shapes

STORE = "store."
"""Prefix of the names under which a store is exported."""
ON_HOST = ("keys", "values")


@dataclass(frozen=True)
class Recalled:
    """Slots that have come back, ``R`` rows a head."""

    keys: Tensor
    """``[B, H, R, D]``, as the layer stores keys."""
    values: Tensor
    positions: Tensor
    """``[B, H, R]`` int64."""
    valid: Tensor
    """``[B, H, R]`` bool: False where a row holds no slot."""

    def of(self, heads: slice) -> Recalled:
        """Those of some heads."""
        return Recalled(*(x[:, heads] for x in (self.keys, self.values, self.positions, self.valid)))


class BlockStore:
    """Blocks of ``size`` slots of one layer.

    Args:
        representatives: of a block, per view (see ``policies.base.Recall.views``). views: their number.
        room: blocks to make room for at first; more of them double it.
    """

    held: Tensor
    """``[B, H, room, size]`` bool on the device: which rows hold a slot."""
    index: Tensor
    """``[B, H, room, R, D]`` on the device: keys of the representatives."""
    worth: Tensor
    """``[B, H, room, R]`` float32 on the device: what they were worth; -inf where there is none."""
    keys: Tensor
    """``[B, H, room, size, D]`` in the host's memory, and so are the values."""
    values: Tensor

    def __init__(self, size: int, representatives: int, views: int = 1, room: int = 0) -> None:
        self.size, self.representatives, self.views, self.room = size, representatives, views, room
        self.blocks = 0
        """Blocks up to the newest that holds a slot."""
        self.last: tuple[Tensor, Recalled] | None = None
        """Numbers of the blocks that came back last, and their slots."""

    # ---- storing ---------------------------------------------------------------------------------------------------

    def put(self, slots: Sequence[Tensor], gone_BHS: Tensor, views: Sequence[Tensor]) -> None:
        """Store evicted slots.

        Args:
            slots: keys and values ``[B, H, S, D]`` and positions ``[B, H, S]`` of a layer's slots.
            gone_BHS: bool, those that are evicted.
            views: worth ``[B, H, S]`` of the slots as representatives.
        """
        keys_BHSD, values_BHSD, positions_BHS = slots
        # The host waits here for how many slots go, once a layer and eviction.
        b_M, h_M, s_M = gone_BHS.nonzero(as_tuple=True)
        if not len(s_M):
            return
        at_M = positions_BHS[b_M, h_M, s_M].long()
        newest = int(at_M.max()) // self.size + 1
        self._make_room(keys_BHSD, values_BHSD, newest)
        self.blocks, self.last = max(self.blocks, newest), None
        block_M, keys_MD = (b_M * keys_BHSD.shape[1] + h_M) * self.room + at_M // self.size, keys_BHSD[b_M, h_M, s_M]
        row_M = block_M * self.size + at_M % self.size
        # A tensor, no number: a scalar through an index would be copied to the device.
        self.held.view(-1)[row_M] = self.held.new_ones(())
        for rows, new_MD in ((self.keys, keys_MD), (self.values, values_BHSD[b_M, h_M, s_M])):
            rows.flatten(0, 3)[row_M.cpu()] = new_MD.cpu()
        for number, worth_BHS in enumerate(views):
            self._represent(number, block_M, keys_MD, worth_BHS[b_M, h_M, s_M].float())

    def _represent(self, view: int, block_M: Tensor, keys_MD: Tensor, worth_M: Tensor) -> None:
        """Let new slots compete with the representatives that their blocks have; of equals the older one stays."""
        R = self.representatives
        mine = slice(view * R, (view + 1) * R)
        index, worth = self.index.flatten(0, 2)[:, mine], self.worth.flatten(0, 2)[:, mine]
        touched_U, group_M = block_M.unique(return_inverse=True)
        U = len(touched_U)
        # X: the R representatives that each touched block has, then the M new slots. They compete within their block.
        group_X = torch.cat((torch.arange(U, device=group_M.device).repeat_interleave(R), group_M))
        lowest = torch.finfo(worth_M.dtype).min
        worth_X = torch.cat((worth[touched_U].flatten(), worth_M.clamp(min=lowest)))
        keys_XD = torch.cat((index[touched_U].flatten(0, 1), keys_MD))
        # Stable, and older ones stand first: of equals they stay.
        order_X = worth_X.argsort(descending=True, stable=True)
        order_X = order_X[group_X[order_X].argsort(stable=True)]  # group after group, the best of each first
        group_X = group_X[order_X]
        # The place of each within its block; the first R stay.
        count_U = group_X.bincount(minlength=U)
        place_X = torch.arange(len(order_X), device=order_X.device) - (count_U.cumsum(0) - count_U)[group_X]
        first_X = place_X < R
        to_X, place_X, from_X = touched_U[group_X[first_X]], place_X[first_X] + view * R, order_X[first_X]
        self.index.view(-1, *self.index.shape[3:])[to_X, place_X] = keys_XD[from_X]
        self.worth.view(-1, self.worth.shape[-1])[to_X, place_X] = worth_X[from_X]

    def _make_room(self, k_BHSD: Tensor, v_BHSD: Tensor, blocks: int) -> None:
        """Make room for so many blocks."""
        made = hasattr(self, "held")
        if made and blocks <= self.room:
            return
        B, H, _, D = k_BHSD.shape
        # Room at least doubles, so a text is copied a constant number of times.
        R, room = self.views * self.representatives, max(blocks, 2 * self.room if made else self.room)
        device = k_BHSD.device
        with torch.inference_mode(False):  # so that a prefill in inference mode may be gone on with outside of it
            new = {
                "held": torch.zeros(B, H, room, self.size, dtype=torch.bool, device=device),
                "index": torch.zeros(B, H, room, R, D, dtype=k_BHSD.dtype, device=device),
                "worth": torch.full((B, H, room, R), float("-inf"), dtype=torch.float32, device=device),
            }
            for name, like in zip(ON_HOST, (k_BHSD, v_BHSD), strict=True):
                new[name] = torch.empty(B, H, room, self.size, like.shape[-1], dtype=like.dtype, device="cpu")
        for name, buffer in new.items():
            if made:
                buffer[:, :, : self.room] = getattr(self, name)
            setattr(self, name, buffer)
        self.room = room

    # ---- bringing back -----------------------------------------------------------------------------------------------

    def load(self, chosen_BHK: Tensor, k_BHSD: Tensor, v_BHSD: Tensor) -> tuple[Recalled, int]:
        """The slots of chosen blocks, on the device, and how many blocks had to be copied there for it. ``k`` and ``v``: the
        layer's own, which tell the form where nothing is chosen."""
        B, H, K = chosen_BHK.shape
        if not K:
            none = chosen_BHK.new_empty(B, H, 0)
            return Recalled(k_BHSD[:, :, :0], v_BHSD[:, :, :0], none, none.bool()), 0
        # Tokens of one answer mostly ask for the same blocks: nothing is copied for them.
        if self.last is not None and torch.equal(self.last[0], chosen_BHK):
            return self.last[1], 0
        device = chosen_BHK.device
        head_BHK = torch.arange(B * H, device=device).view(B, H, 1).expand(B, H, K)
        block_X = (head_BHK * self.room + chosen_BHK).flatten()
        on_host = block_X.cpu()
        keys, values = (
            x.flatten(0, 2)[on_host].to(device).view(B, H, K * self.size, -1) for x in (self.keys, self.values)
        )
        row_S = torch.arange(self.size, device=device)
        positions = (chosen_BHK[..., None] * self.size + row_S).flatten(2)
        valid = self.held.flatten(0, 2)[block_X].view(B, H, -1)
        # A row that holds no slot holds no number either.
        keys, values = (x.masked_fill(~valid[..., None], 0) for x in (keys, values))
        recalled = Recalled(keys, values, positions, valid)
        self.last = chosen_BHK, recalled
        return recalled, B * H * K

    # ---- copies, files ------------------------------------------------------------------------------------------------

    def export(self) -> dict[str, Tensor]:
        """What is stored, and by what it is found: tensors without the free room; none where nothing is stored."""
        if not self.blocks:
            return {}
        found = {name: getattr(self, name)[:, :, : self.blocks] for name in ("held", "index", "worth")}
        there = found["held"].cpu()
        found |= {name: getattr(self, name)[:, :, : self.blocks][there] for name in ON_HOST}
        return {STORE + name: tensor for name, tensor in found.items()}

    def layout(self, tensors: Mapping[str, Tensor], like: Tensor, seen: int) -> Shapes:
        """Dtype and shape of every tensor that ``export`` gives after ``seen`` tokens, the stored ones being as ``tensors`` say.

        Args:
            like: keys ``[B, H, 0, D]``, and values alike.

        Raises:
            ValueError: what is stored is no such tensor, or of tokens that are not read yet.
        """
        held = tensors.get(f"{STORE}held")
        if held is None:
            return {}
        (B, H, _, D), N, name = like.shape, -(-seen // self.size), f"{STORE}held"
        blocks = held.shape[2] if held.dim() == 4 else 0
        whole = held.dtype == torch.bool and held.shape == (B, H, blocks, self.size) and 0 < blocks <= N
        if not whole or held.flatten(2)[..., seen:].any():
            there = f"{held.dtype} {tuple(held.shape)}"
            raise ValueError(
                f"{name}: {there} in the file, must be bool {(B, H, N, self.size)} of {seen} tokens at most"
            )
        rows, found = int(held.sum()), (B, H, held.shape[2], self.views * self.representatives)
        made: Shapes = {name: (held.dtype, tuple(held.shape)), f"{STORE}worth": (torch.float32, found)}
        made[f"{STORE}index"] = like.dtype, (*found, D)
        return made | {STORE + name: (like.dtype, (rows, D)) for name in ON_HOST}

    def restore(self, tensors: Mapping[str, Tensor], k_BH0D: Tensor, v_BH0D: Tensor) -> None:
        """Become what ``export`` took out of another store; nothing is shared.

        Args:
            k_BH0D: empty keys, and so are the values: they tell channels, dtype and device.
        """
        self.clear()
        if f"{STORE}held" not in tensors:
            return
        held = tensors[f"{STORE}held"].cpu()
        self._make_room(k_BH0D, v_BH0D, held.shape[2])
        self.blocks = held.shape[2]
        for name in ("held", "index", "worth"):
            getattr(self, name)[:, :, : self.blocks] = tensors[STORE + name].to(k_BH0D.device)
        for name in ON_HOST:
            getattr(self, name)[:, :, : self.blocks][held] = tensors[STORE + name].cpu()

    def clear(self) -> None:
        """Forget all blocks."""
        if self.blocks:
            self.held.zero_()
            self.worth.fill_(float("-inf"))
        self.blocks, self.last = 0, None

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values, in one head."""
        return self.size * sum(x.shape[-1] * x.itemsize for x in (self.keys, self.values))

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers in the host's memory."""
        return sum(int(getattr(self, name).nbytes) for name in ON_HOST if hasattr(self, name))

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the device, and of the slots that have come back."""
        held = [getattr(self, name) for name in ("held", "index", "worth") if hasattr(self, name)]
        if self.last is not None:
            held += [self.last[0], *vars(self.last[1]).values()]
        return sum(int(tensor.nbytes) for tensor in held)
