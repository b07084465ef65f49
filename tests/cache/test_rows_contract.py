"""Contract of rows: every layout with every codec holds what a plain list of rows would, in float64. A new layout or codec
runs the same tests once it is listed here."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from locret_kit.cache.attend import decode_rows
from locret_kit.cache.storage.codec import Codec, Plain, Scratch
from locret_kit.cache.storage.exports import export_rows, exported_shapes, restore_rows
from locret_kit.cache.storage.layouts import Layout, RaggedRows
from locret_kit.cache.storage.quantised import CompiledBits, GroupedBits, RowBits
from locret_kit.cache.storage.rows import BoundedLayer

H, D, Q, ROOM = 3, 16, 6, 60
CODECS: dict[str, tuple[Callable[[], Codec], float]] = {
    "plain": (Plain, 0.0),
    "8 bits": (RowBits, 0.02),
    "grouped": (lambda: GroupedBits(4, Scratch(), group=8, residual=4), 0.5),
    "compiled": (lambda: CompiledBits(4, Scratch(), group=8, residual=4), 0.5),
}
"""Codecs, and the length of a row's error in lengths of the row, at most."""
EVERY = [*((Layout, codec) for codec in CODECS), (RaggedRows, "plain")]
BLOCKS = [(20, None), (1, None), (25, 24), (1, None), (1, None), (14, 30), (9, None), (1, 20)]
"""Tokens of a block, and the rows a head that are kept after it."""
FEED = 17


class Listed:
    """Rows of each head in a list: number of the token, key, value, score."""

    def __init__(self) -> None:
        self.heads: list[list[tuple[int, Tensor, Tensor, float]]] = [[] for _ in range(H)]
        self.seen = 0

    def append(self, k: Tensor, v: Tensor, score: Tensor) -> None:
        for h, rows in enumerate(self.heads):
            new = range(k.shape[2])
            rows += [(self.seen + t, k[0, h, t].double(), v[0, h, t].double(), float(score[0, h, t])) for t in new]
        self.seen += k.shape[2]

    def keep(self, chosen: list[list[bool]]) -> None:
        pairs = zip(self.heads, chosen, strict=True)
        self.heads = [[row for row, stays in zip(rows, stay, strict=True) if stays] for rows, stay in pairs]

    def numbers(self, h: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[rows, D]`` of a head."""
        return torch.stack([row[1] for row in self.heads[h]]), torch.stack([row[2] for row in self.heads[h]])


def made(layout: type[Layout], codec: str, room: int = ROOM, **rest: object) -> BoundedLayer:
    return BoundedLayer(layout(room), CODECS[codec][0](), statistics=2, **rest)  # type: ignore[arg-type]


def drawn(draw: torch.Generator, T: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of channels with means of their own, and scores."""
    k, v = (torch.randn(1, H, T, D, generator=draw) + torch.linspace(-2, 2, D) for _ in "kv")
    return k, v, torch.rand(1, H, T, generator=draw)


def feed(rows: BoundedLayer, block: tuple[Tensor, Tensor, Tensor]) -> None:
    rows.update(*block[:2])
    rows.append(*block)
    rows.codec.finish_block()


def chosen(draw: torch.Generator, lists: Listed, mean: int, ragged: bool) -> list[list[bool]]:
    """Marks of the rows of each head that stay: ``mean`` of each, or of all heads on average."""
    wanted = [mean] * H
    if ragged:
        first = min(len(lists.heads[0]), mean + 5)
        wanted = [first, len(lists.heads[1]) and 2, 0]
        wanted[2] = H * mean - sum(wanted)
        if wanted[2] > len(lists.heads[2]):
            wanted = [mean] * H
    out = []
    for rows, n in zip(lists.heads, wanted, strict=True):
        stay = set(torch.randperm(len(rows), generator=draw)[:n].tolist())
        out.append([i in stay for i in range(len(rows))])
    return out


def masks(marks: list[list[bool]]) -> Tensor:
    """Marks of rows as those of slots, aligned to the right."""
    S = max(map(len, marks))
    return torch.tensor([[False] * (S - len(marked)) + marked for marked in marks])[None]


def same(rows: BoundedLayer, lists: Listed, most: float) -> None:
    """Compare all that can be read."""

    def close(mine: Tensor, exact: Tensor) -> None:
        error = (mine.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
        assert float(error.max()) <= most

    q = torch.randn(1, Q, 1, D, generator=torch.Generator().manual_seed(1))
    out = decode_rows(q, rows.varlen(), 0.1, "reference")
    parts = {h: (part, h - part.heads.start) for part in rows.parts() for h in range(H)[part.heads]}
    kept = rows.kept()
    for h, listed in enumerate(lists.heads):
        exact, valid, (part, at) = lists.numbers(h), rows.layout.valid()[0, h], parts[h]
        assert int(valid.sum()) == len(listed)
        for name, whole, x in zip(("keys", "values"), (part.keys, part.values), exact, strict=True):
            close(rows.slots(name)[0, h][valid], x)
            assert torch.equal(rows.slots(name)[0, h][valid], whole[0, at])
            assert not rows.slots(name)[0, h][~valid].any()
        positions = [row[0] for row in listed]
        assert rows.slots("positions")[0, h][valid].tolist() == part.positions[0, at].tolist() == positions
        assert kept[0][h].tolist() == positions
        assert rows.slots("scores")[0, h][valid].tolist() == [row[3] for row in listed]
        assert rows.slots("stats").shape == (2, 1, H, len(valid)) and part.stats.shape[-1] == len(listed)
        # Attention over the rows as they are stored, against that over the rows as they are read.
        k, v = (rows.slots(name)[0, h][valid].double() for name in ("keys", "values"))
        weights = (q[0, 2 * h : 2 * h + 2, 0].double() @ k.T * 0.1).softmax(-1)
        torch.testing.assert_close(out[0, 2 * h : 2 * h + 2, 0].double(), weights @ v, rtol=1e-5, atol=1e-5)
    rows.codec.finish_block()


def filled(layout: type[Layout], codec: str, rows: BoundedLayer, check: bool = False) -> Listed:
    """Feed every block, and cut where it is due; compare after each."""
    draw, lists = torch.Generator().manual_seed(FEED), Listed()
    for T, mean in BLOCKS:
        block = drawn(draw, T)
        feed(rows, block)
        lists.append(*block)
        if mean is not None:
            marks = chosen(draw, lists, mean, layout.ragged)
            rows.keep(masks(marks), mean)
            lists.keep(marks)
        if check:
            same(rows, lists, CODECS[codec][1])
    return lists


@pytest.mark.parametrize(("layout", "codec"), EVERY)
def test_rows_are_those_of_a_list(layout, codec):
    """After every block and every eviction: keys, values, positions, scores, and attention over them."""
    lists = filled(layout, codec, made(layout, codec), check=True)
    assert len({len(listed) for listed in lists.heads}) == (3 if layout.ragged else 1)


@pytest.mark.parametrize(("layout", "codec"), EVERY)
def test_an_export_is_all_that_a_layer_needs(layout, codec):
    """It has the tensors that ``exported_shapes`` names. A layer that takes it holds the same rows, with more room too, and
    goes on alike; a reset forgets all."""
    rows, other, wider = (made(layout, codec, room) for room in (ROOM, ROOM, ROOM + 9))
    lists, draw = filled(layout, codec, rows), torch.Generator().manual_seed(3)
    counts, tensors = export_rows(rows)
    assert {n: (x.dtype, tuple(x.shape)) for n, x in tensors.items()} == exported_shapes(rows, Q)
    rows.codec.check(tensors)
    tensors = {name: x.clone() for name, x in tensors.items()}
    empty = torch.empty(1, H, 0, D)
    for each in (other, wider):
        restore_rows(each, counts, tensors, empty, empty)
        same(each, lists, CODECS[codec][1])
    assert all(torch.equal(x, tensors[name]) for name, x in export_rows(other)[1].items())
    for T in (1, 1, 12):
        block = drawn(draw, T)
        for each in (rows, other):
            feed(each, block)
    for name in ("keys", "values", "positions", "scores"):
        torch.testing.assert_close(rows.slots(name), other.slots(name), rtol=0, atol=0)
        for each in (rows, other):
            each.codec.finish_block()
    rows.reset()
    assert rows.rows == 0 and rows.seen == 0
    filled(layout, codec, rows, check=True)


@pytest.mark.parametrize(("layout", "codec"), EVERY)
def test_bytes_are_known_before_there_is_a_tensor(layout, codec):
    rows, meta = made(layout, codec), torch.empty(1, H, 0, D, device="meta")
    rows.measure(meta, meta)
    planned = rows.planned_bytes(Q)
    rows.reset()
    filled(layout, codec, rows)
    assert rows.nbytes == planned


@pytest.mark.parametrize(("layout", "codec"), EVERY)
def test_rows_lie_in_memory_of_somebody_else(layout, codec):
    """The same rows, in the tensors that were handed in."""
    own = made(layout, codec)
    filled(layout, codec, own)
    lent = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in own.shapes().items()}
    rows = made(layout, codec)
    rows.external = lent
    lists, taken = filled(layout, codec, rows), export_rows(own)[1]
    assert all(torch.equal(x, taken[name]) for name, x in export_rows(rows)[1].items())
    assert all(getattr(rows.holder(name), name) is x for name, x in lent.items())
    same(rows, lists, CODECS[codec][1])
    with pytest.raises(ValueError, match=f"buffers: room for {ROOM} rows a head, {ROOM + 1} are needed"):
        rows.grow(ROOM + 1)
