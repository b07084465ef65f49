"""Where the blocks of a store lie in the host's memory: segments that copies share until one of them writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .host import HostMemory, RowForm

NOWHERE = -1


@dataclass(frozen=True)
class Segment:
    """Buffers of some places; a block lies in one place, in all heads."""

    first: int
    """Number of its first place."""
    rows: tuple[Tensor, Tensor]
    """Keys and values ``[B, H, places, size, width]``, as they are stored."""
    shared: bool = False
    """Whether copies read it too, so that it must stay as it is."""

    @property
    def places(self) -> int:
        return self.rows[0].shape[2]

    @property
    def end(self) -> int:
        return self.first + self.places


class Segments:
    """Rows of a store's blocks.

    Args:
        heads: texts and key/value heads. size: rows of a block in one head. forms: of keys and of values.
        room: places to make at first.
    """

    def __init__(
        self, memory: HostMemory, heads: tuple[int, int], size: int, forms: tuple[RowForm, RowForm], room: int
    ) -> None:
        self.memory, self.heads, self.size, self.forms, self.room = memory, heads, size, forms, room
        self.segments: list[Segment] = []
        self.place = torch.empty(0, dtype=torch.int64, device="cpu")
        """Of each block: the place in which it lies, or ``NOWHERE``."""
        self.used = torch.empty(0, dtype=torch.int64, device="cpu")
        """When it was stored or came back last, by a clock that counts both."""
        self.clock = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one head."""
        return self.size * sum(form.nbytes for form in self.forms)

    @property
    def most(self) -> int | None:
        """Blocks that there may be; None without a bound."""
        return self.memory.most(self.block_bytes * self.heads[0] * self.heads[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, those that are shared too."""
        return sum(int(rows.nbytes) for one in self.segments for rows in one.rows)

    def grow(self, blocks: int) -> None:
        """Know so many blocks."""
        more = max(0, blocks - len(self.place))
        with torch.inference_mode(False):  # so that a prefill in inference mode may be gone on with outside of it
            self.place = torch.cat((self.place, torch.full((more,), NOWHERE, dtype=torch.int64, device="cpu")))
            self.used = torch.cat((self.used, torch.zeros(more, dtype=torch.int64, device="cpu")))

    def touch(self, blocks: Tensor) -> None:
        """Note that blocks are used."""
        self.clock += 1
        self.used[blocks] = self.clock

    # ---- places ------------------------------------------------------------------------------------------------------

    def open(self, blocks_U: Tensor) -> Tensor:
        """Give blocks (ascending) places that may be written; the numbers of those that go for it, the ones that were used least
        lately. Where not even these blocks have room, the oldest new ones stay without."""
        self.touch(blocks_U)
        new_U, gone = blocks_U[self.place[blocks_U] == NOWHERE], blocks_U[:0]
        # Blocks that were used least lately go, but none of those that are opened now.
        if (most := self.most) is not None:
            held = self.place != NOWHERE
            over = int(held.sum()) + len(new_U) - most
            if over > 0:
                others = held.index_fill(0, blocks_U, False).nonzero().flatten()
                gone = others[self.used[others].argsort(stable=True)][:over]
                self.place[gone] = NOWHERE
                new_U = new_U[over - len(gone) :]
        # Copy on write: what a copy reads still moves to a place of our own before it is written.
        shared_U = blocks_U[self._is_shared(self.place[blocks_U])]
        if moving := len(new_U) + len(shared_U):
            free = self._free(moving)
            self.place[new_U] = free[: len(new_U)]
            for target, source in zip(free[len(new_U) :].tolist(), self.place[shared_U].tolist(), strict=True):
                for to, rows in zip(self._at(target), self._at(source), strict=True):
                    to.copy_(rows)
            self.place[shared_U] = free[len(new_U) :]
        return gone

    def forget(self) -> None:
        """Let all blocks go; the buffers stay for others."""
        self.place.fill_(NOWHERE)
        # What copies read stays with them; our own buffers serve the next text.
        self.segments = [one for one in self.segments if not one.shared]

    def _is_shared(self, places: Tensor) -> Tensor:
        """Bool: places in segments that copies read."""
        found = torch.zeros_like(places, dtype=torch.bool)
        for one in self.segments:
            if one.shared:
                found |= (places >= one.first) & (places < one.end)
        return found

    def _free(self, wanted: int) -> Tensor:
        """Places of our own in which nothing lies."""
        own = [torch.arange(one.first, one.end, device="cpu") for one in self.segments if not one.shared]
        numbers = torch.cat([self.place[:0], *own])
        free = numbers[~torch.isin(numbers, self.place)]
        if len(free) < wanted:
            # At least as many places as there are: a text is then copied a constant number of times.
            more = max(wanted - len(free), len(numbers) if self.segments else self.room)
            if (most := self.most) is not None:
                more = min(more, most - len(numbers))
            first = self.segments[-1].end if self.segments else 0
            self.segments.append(Segment(first, self._buffers(more)))
            free = torch.cat((free, torch.arange(first, first + more, device="cpu")))
        return free[:wanted]

    def _buffers(self, places: int) -> tuple[Tensor, Tensor]:
        keys, values = (
            self.memory.buffer((*self.heads, places, self.size, form.width), form.stored) for form in self.forms
        )
        return keys, values

    def _at(self, place: int) -> Sequence[Tensor]:
        """Keys and values ``[B, H, size, width]`` in a place."""
        one = next(one for one in self.segments if place < one.end)
        return [rows[:, :, place - one.first] for rows in one.rows]

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _parts(self, blocks_M: Tensor) -> Iterator[tuple[Segment, Tensor, Tensor]]:
        """Each segment in which blocks lie, which of them, and their places in it. Of a block that lies nowhere: the first place
        of all."""
        place_M = self.place[blocks_M].clamp(min=0)
        for one in self.segments:
            here = ((place_M >= one.first) & (place_M < one.end)).nonzero().flatten()
            if len(here):
                yield one, here, place_M[here] - one.first

    def write(self, head_M: Tensor, blocks_M: Tensor, row_M: Tensor, rows: Sequence[Tensor]) -> None:
        """Write rows ``[M, width]`` of blocks that are open: heads (``b * H + h``), blocks and rows of the block ``[M]``."""
        for one, here, place in self._parts(blocks_M):
            for buffer, new in zip(one.rows, rows, strict=True):
                buffer.flatten(0, 1)[head_M[here], place, row_M[here]] = new[here]

    def read(self, head_M: Tensor, blocks_M: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[M, size, width]`` of blocks. Those of a block that lies nowhere are anything."""
        parts = list(self._parts(blocks_M))
        # Nearly always: one gather, and nothing is written twice.
        if len(parts) == 1 and len(parts[0][1]) == len(blocks_M):
            keys, values = (buffer.flatten(0, 1)[head_M, parts[0][2]] for buffer in parts[0][0].rows)
            return keys, values
        shape = len(blocks_M), self.size
        found = [torch.empty(*shape, form.width, dtype=form.stored, device="cpu") for form in self.forms]
        for one, here, place in parts:
            for rows, buffer in zip(found, one.rows, strict=True):
                rows[here] = buffer.flatten(0, 1)[head_M[here], place]
        return found[0], found[1]

    def pick(self, head_M: Tensor, blocks_M: Tensor, row_M: Tensor) -> list[Tensor]:
        """Keys and values ``[M, width]``: single rows."""
        found = [torch.empty(len(blocks_M), form.width, dtype=form.stored, device="cpu") for form in self.forms]
        for one, here, place in self._parts(blocks_M):
            for rows, buffer in zip(found, one.rows, strict=True):
                rows[here] = buffer.flatten(0, 1)[head_M[here], place, row_M[here]]
        return found

    # ---- copies ------------------------------------------------------------------------------------------------------

    def copy(self, memory: HostMemory, blocks: int, room: int) -> Segments:
        """A copy of so many blocks, with ``room`` for more, that reads the same segments until one of both writes."""
        # From here on neither of both writes to what is there: each makes places for what it writes next.
        self.segments = [replace(one, shared=True) for one in self.segments]
        new = Segments(memory, self.heads, self.size, self.forms, room)
        new.segments, new.clock = list(self.segments), self.clock
        new.place, new.used = self.place[:blocks].clone(), self.used[:blocks].clone()
        new.grow(room)
        return new
