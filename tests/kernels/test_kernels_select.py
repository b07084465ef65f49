"""Selection of rows, as marks and as an index: Triton (interpreted) and the reference against a sort by hand."""

import math
from itertools import product

import pytest
import torch
from interpreted import BOTH, KERNELS, REFERENCES, poisoned

pytestmark = pytest.mark.usefixtures("poisoned")


def by_hand(scores: list[float], protected: list[int], valid: list[bool], most: int, largest: float) -> list[bool]:
    """From the words of the definition: Python's own sort of the best ones."""

    def worth(s: int) -> tuple[float, ...]:
        if not valid[s]:
            return 0.0, 0.0, s
        if protected[s] > 1:
            return 4.0, 0.0, s
        if protected[s]:
            return 2.0, 0.0, s
        if math.isnan(scores[s]):
            return 3.0, 0.0, s
        return 1.0, min(max(scores[s], -largest), largest), s

    best = sorted(range(len(scores)), key=worth, reverse=True)[: max(0, most)]
    return [s in best for s in range(len(scores))]


def draw(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "ties":
        return x.round()
    if kind == "equal":
        return torch.zeros(shape) * x.sign()  # 0 and -0
    if kind == "odd":
        some = torch.tensor([math.inf, math.nan, 3.4028235e38, 1e-45, 0.0])
        some = torch.cat((some, -some))
        return some[torch.randint(0, len(some), shape, generator=generator)]
    return x


KINDS = {"plain": torch.float32, "ties": torch.bfloat16, "equal": torch.float32, "odd": torch.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_select_rows(kind):
    """A batch whose heads hold different numbers of rows, padded on the left, some protected; one block of rows, and two
    where scores are equal or infinite."""
    for S in (1, 77, 2100) if kind in ("ties", "odd") else (1, 77):
        heads = (2, 3) if S < 2100 else (1, 2)
        scores = draw(kind, (*heads, S), S).to(KINDS[kind])
        generator = torch.Generator().manual_seed(S)
        lengths = torch.randint(S // 2 + 1, S + 1, heads, generator=generator)
        valid = torch.arange(S) >= S - lengths[..., None]
        protected = torch.rand(*heads, S, generator=generator) < 0.2
        most = torch.tensor([S // 2, S - 1, 0, 1, S, S + 3])[: lengths.numel()].view(heads).minimum(lengths + 2)
        with poisoned():
            mine = KERNELS["select_rows"](scores, protected, valid, most)
        theirs = REFERENCES["select_rows"](scores, protected, valid, most)
        assert mine.dtype == theirs.dtype == torch.bool
        for b, h in product(*map(range, heads)):
            exact = by_hand(
                scores[b, h].tolist(), protected[b, h].tolist(), valid[b, h].tolist(), int(most[b, h]),
                torch.finfo(KINDS[kind]).max,
            )  # fmt: skip
            assert theirs[b, h].tolist() == exact, (S, b, h)
            assert mine[b, h].tolist() == exact, (S, b, h)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("S", "keep", "newest"), [(1, 1, 0), (77, 40, 10), (77, 9, 20), (64, 64, 5), (2100, 1500, 30), (2100, 1, 1)]
)
def test_select_index(kind, S, keep, newest):
    """Newest rows protected by their number; others by marks, some of them above all."""
    heads = (2, 1) if S < 2100 else (1, 2)
    scores = draw(kind, (*heads, S), S).to(KINDS[kind])
    mark = torch.randint(0, 12, (*heads, S), generator=torch.Generator().manual_seed(S), dtype=torch.uint8)
    for guard in (None, mark * (mark < 2), torch.where(mark < 3, mark, 0)):
        if guard is not None and int((guard > 1).sum(-1).max()) > keep:
            continue
        with poisoned():
            found = [functions["select_index"](scores, keep, newest, guard) for functions in (KERNELS, REFERENCES)]
        marks = torch.zeros_like(mark) if guard is None else guard
        marks = marks.maximum((torch.arange(S) >= S - newest).to(torch.uint8))
        for b, h in product(*map(range, heads)):
            exact = by_hand(scores[b, h].tolist(), marks[b, h].tolist(), [True] * S, keep, torch.finfo(KINDS[kind]).max)
            assert all(index[b, h].tolist() == [s for s in range(S) if exact[s]] for index in found), (guard, b, h)


def test_views_are_read_as_they_look():
    scores = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
    none, most = torch.zeros(1, 1, 1, dtype=torch.bool).expand(2, 3, 40), torch.tensor(7).expand(2, 3)
    mine, theirs = (functions["select_rows"](scores, none, ~none, most) for functions in (KERNELS, REFERENCES))
    assert torch.equal(mine, theirs) and mine.sum(-1).eq(7).all()


@BOTH
def test_what_select_rows_refuses(functions):
    scores, marks, most = torch.zeros(1, 2, 5), torch.zeros(1, 2, 5, dtype=torch.bool), torch.ones(1, 2)
    with pytest.raises(ValueError, match="scores: 0 rows must be at least 1"):
        functions["select_rows"](scores[..., :0], marks[..., :0], marks[..., :0], most)
    with pytest.raises(ValueError, match=r"valid \(1, 2, 4\) must have the shape of scores \(1, 2, 5\)"):
        functions["select_rows"](scores, marks, marks[..., :4], most)
    with pytest.raises(ValueError, match=r"most \(1, 1\) must be \(1, 2\), a number of each head"):
        functions["select_rows"](scores, marks, marks, most[:, :1])
    for keep in (0, 6):
        with pytest.raises(ValueError, match=f"index: {keep} rows must be at least 1 and at most the 5 rows"):
            functions["select_index"](scores, keep)
