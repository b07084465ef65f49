"""Evicted slots of one layer in blocks of the text: keys and values in the host's memory, what finds a block on the device.

Block ``n`` holds the tokens at positions ``n * size`` to ``n * size + size - 1``, each in a row of its own, as far as they were
evicted; the others are among the layer's rows still. Every head fills its blocks by itself.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layouts import Shapes

STORE = "store."
"""Prefix of the names under which a store is exported."""
ON_HOST = ("keys", "values")


class Recalled(NamedTuple):
    """Slots that have come back, ``R`` rows a head, as attention reads them."""

    keys: Tensor
    """``[1, H, R, D]``, as the layer stores keys."""
    values: Tensor
    positions: Tensor
    """``[1, H, R]`` int64."""
    valid: Tensor
    """``[1, H, R]`` bool: False where a row holds no slot."""

    def of(self, heads: slice) -> "Recalled":
        """The slots of some heads."""
        return Recalled(*(x[:, heads] for x in self))


class BlockStore:
    """Blocks of ``size`` slots of one layer.

    Args:
        representatives: of a block, per view (see ``policies.base.Recall.views``). views: their number.
        room: blocks to make room for at first; more of them double it.
    """

    held: Tensor
    """``[H, room, size]`` bool on the device: which rows hold a slot."""
    index: Tensor
    """``[H, room, R, D]`` on the device: keys of the representatives."""
    worth: Tensor
    """``[H, room, R]`` float32 on the device: scores of the representatives; -inf where there is none."""
    keys: Tensor
    """``[H, room, size, D]`` in the host's memory, and so are the values."""
    values: Tensor

    def __init__(self, size: int, representatives: int, views: int = 1, room: int = 0) -> None:
        self.size, self.representatives, self.views, self.room = size, representatives, views, room
        self.blocks = 0
        """Blocks up to the newest that holds a slot."""
        self.last: tuple[Tensor, Recalled] | None = None
        """Numbers of the blocks that came back last, and their slots."""

    def put(self, slots: Sequence[Tensor], gone_1HS: Tensor, views: Sequence[Tensor]) -> None:
        """Store evicted slots.

        Args:
            slots: keys and values ``[1, H, S, D]`` and positions ``[1, H, S]`` of a layer's slots.
            gone_1HS: bool, those that are evicted.
            views: worth ``[1, H, S]`` of the slots as representatives.
        """
        # The host waits here for how many slots go, once a layer and eviction.
        gone_M = _, h_M, s_M = gone_1HS.nonzero(as_tuple=True)
        if not len(s_M):
            return
        keys_MD, values_MD, at_M = (x[gone_M] for x in slots)
        at_M = at_M.long()
        newest = int(at_M.max()) // self.size + 1
        self._make_room(slots[0], slots[1], newest)
        self.blocks, self.last = max(self.blocks, newest), None
        block_M = h_M * self.room + at_M // self.size
        row_M = block_M * self.size + at_M % self.size
        # A tensor, no number: a scalar through an index would be copied to the device.
        self.held.view(-1)[row_M] = self.held.new_ones(())
        for rows, new_MD in ((self.keys, keys_MD), (self.values, values_MD)):
            rows.flatten(0, 2)[row_M.cpu()] = new_MD.cpu()
        for number, worth_1HS in enumerate(views):
            self._represent(number, block_M, keys_MD, worth_1HS[gone_M].float())

    def _represent(self, view: int, block_M: Tensor, keys_MD: Tensor, worth_M: Tensor) -> None:
        """Let new slots compete with the representatives that their blocks have; of equals the older one stays."""
        R = self.representatives
        mine = slice(view * R, (view + 1) * R)
        index, worth = self.index.flatten(0, 1)[:, mine], self.worth.flatten(0, 1)[:, mine]
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
        self.index.view(-1, *self.index.shape[2:])[to_X, place_X] = keys_XD[from_X]
        self.worth.view(-1, self.worth.shape[-1])[to_X, place_X] = worth_X[from_X]

    def _make_room(self, k_1HSD: Tensor, v_1HSD: Tensor, blocks: int) -> None:
        """Make room for ``blocks`` blocks ``[H, blocks, size, D]``."""
        made = hasattr(self, "held")
        if made and blocks <= self.room:
            return
        _, H, _, D = k_1HSD.shape
        # Room at least doubles, so a text is copied a constant number of times.
        R, room = self.views * self.representatives, max(blocks, 2 * self.room if made else self.room)
        device = k_1HSD.device
        with torch.inference_mode(False):  # so that a prefill in inference mode may be gone on with outside of it
            new = {
                "held": torch.zeros(H, room, self.size, dtype=torch.bool, device=device),
                "index": torch.zeros(H, room, R, D, dtype=k_1HSD.dtype, device=device),
                "worth": torch.full((H, room, R), float("-inf"), dtype=torch.float32, device=device),
            }
            for name, like in zip(ON_HOST, (k_1HSD, v_1HSD), strict=True):
                new[name] = torch.empty(H, room, self.size, like.shape[-1], dtype=like.dtype, device="cpu")
        for name, buffer in new.items():
            if made:
                buffer[:, : self.room] = getattr(self, name)
            setattr(self, name, buffer)
        self.room = room

    def load(self, chosen_1HK: Tensor, k_1HSD: Tensor, v_1HSD: Tensor) -> tuple[Recalled, int]:
        """The slots of chosen blocks on the device, ``[1, H, K * size, D]``, and the number of blocks copied there
        for it.

        ``k`` and ``v``: the layer's own, which tell the form where nothing is chosen.
        """
        _, H, K = chosen_1HK.shape
        if not K:
            return Recalled(k_1HSD[:, :, :0], v_1HSD[:, :, :0], chosen_1HK, chosen_1HK.bool()), 0
        # Tokens of one answer mostly ask for the same blocks: nothing is copied for them.
        if self.last is not None and torch.equal(self.last[0], chosen_1HK):
            return self.last[1], 0
        device = chosen_1HK.device
        block_X = (torch.arange(H, device=device)[:, None] * self.room + chosen_1HK).flatten()
        on_host = block_X.cpu()
        keys, values = (
            x.flatten(0, 1)[on_host].to(device).view(1, H, K * self.size, -1) for x in (self.keys, self.values)
        )
        row_S = torch.arange(self.size, device=device)
        positions = (chosen_1HK[..., None] * self.size + row_S).flatten(2)
        valid = self.held.flatten(0, 1)[block_X].view(1, H, -1)
        # A row that holds no slot holds no number either.
        keys, values = (x.masked_fill(~valid[..., None], 0) for x in (keys, values))
        recalled = Recalled(keys, values, positions, valid)
        self.last = chosen_1HK, recalled
        return recalled, H * K

    def export(self) -> dict[str, Tensor]:
        """Stored blocks and their index: tensors ``[1, H, ...]``, as in a file, without the free room. Empty where
        nothing is stored."""
        if not self.blocks:
            return {}
        found = {name: getattr(self, name)[None, :, : self.blocks] for name in ("held", "index", "worth")}
        there = found["held"].cpu()
        found |= {name: getattr(self, name)[None, :, : self.blocks][there] for name in ON_HOST}
        return {STORE + name: tensor for name, tensor in found.items()}

    def layout(self, tensors: Mapping[str, Tensor], like: Tensor, seen: int) -> Shapes:
        """Dtype and shape of every tensor of ``export`` after ``seen`` tokens. ``tensors``: the stored ones.

        Args:
            like: keys ``[1, H, 0, D]``, and values alike.

        Raises:
            ValueError: a stored tensor has another form, or holds tokens that are not read yet.
        """
        held = tensors.get(f"{STORE}held")
        if held is None:
            return {}
        (_, H, _, D), N, name = like.shape, -(-seen // self.size), f"{STORE}held"
        blocks = held.shape[2] if held.dim() == 4 else 0
        whole = held.dtype == torch.bool and held.shape == (1, H, blocks, self.size) and 0 < blocks <= N
        if not whole or held.flatten(2)[..., seen:].any():
            there = f"{held.dtype} {tuple(held.shape)}"
            raise ValueError(
                f"{name}: {there} in the file, must be bool {(1, H, N, self.size)} of {seen} tokens at most"
            )
        rows, found = int(held.sum()), (1, H, blocks, self.views * self.representatives)
        made: Shapes = {name: (held.dtype, tuple(held.shape)), f"{STORE}worth": (torch.float32, found)}
        made[f"{STORE}index"] = like.dtype, (*found, D)
        return made | {STORE + name: (like.dtype, (rows, D)) for name in ON_HOST}

    def restore(self, tensors: Mapping[str, Tensor], k_1H0D: Tensor, v_1H0D: Tensor) -> None:
        """Take the tensors ``[1, H, ...]`` that another store has exported; nothing is shared.

        Args:
            k_1H0D: empty keys, and so are the values: they tell channels, dtype and device.
        """
        self.clear()
        if f"{STORE}held" not in tensors:
            return
        held = tensors[f"{STORE}held"].cpu()
        self._make_room(k_1H0D, v_1H0D, held.shape[2])
        self.blocks = held.shape[2]
        for name in ("held", "index", "worth"):
            getattr(self, name)[None, :, : self.blocks] = tensors[STORE + name].to(k_1H0D.device)
        for name in ON_HOST:
            getattr(self, name)[None, :, : self.blocks][held] = tensors[STORE + name].cpu()

    def clear(self) -> None:
        """Forget all blocks."""
        if self.blocks:
            self.held.zero_()
            self.worth.fill_(float("-inf"))
        self.blocks, self.last = 0, None

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers in the host's memory."""
        return sum(int(getattr(self, name).nbytes) for name in ON_HOST if hasattr(self, name))

    @property
    def device_bytes(self) -> int:
        """Bytes of the buffers on the device, and of the slots that have come back."""
        held = [getattr(self, name) for name in ("held", "index", "worth") if hasattr(self, name)]
        if self.last is not None:
            held += [self.last[0], *self.last[1]]
        return sum(int(tensor.nbytes) for tensor in held)
