"""One token's attention over rows in full and in few bits: the reference and Triton (interpreted) against float64."""

import pytest
import torch
from attention_oracle import turned
from few_bits import rotated
from interpreted import BOTH, KERNELS, REFERENCES, close, common, poisoned, random
from pairwise import pairs

from locret_kernels.ragged_decode import Angles, ByteRows, PackedRows, Rotation, Rows, Spans, angle_steps

FORMS = ["full", "8 bits", "4 bits", "2 bits"]
TURNS = [("none", 0), ("tables", 1), ("tables", 0.75), ("placed", 1), ("placed", 0.75), ("angles", 1), ("angles", 0.75)]
"""How keys are turned, and the share of columns that turn."""
SHAPES = [([1, 7, 129], 64, 1), ([65, 64], 96, 2), ([40], 128, 3), ([150, 3], 256, 2), ([300, 0], 64, 2)]
SHAPES += [([33, 90, 0], 96, 1)]
"""Rows of each head of the first text (the second has two more), columns, query heads of a head."""


class Drawn:
    """Random rows of every head, end to end with poisoned room between them, and their numbers in float64."""

    def __init__(
        self, form: str, lengths: list[int], D: int, texts: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        self.D, self.draw, self.dtype = D, torch.Generator().manual_seed(0), dtype
        self.lengths_BH = torch.tensor([[n and n + 2 * b for n in lengths] for b in range(texts)])
        stretch = self.lengths_BH + 3 * (self.lengths_BH > 0)  # a head without rows may start after the last one
        self.starts_BH = (stretch.flatten().cumsum(0) - stretch.flatten()).view_as(stretch)
        self.spans = Spans(self.starts_BH, self.lengths_BH, int(self.lengths_BH.max()))
        self.heads = [slice(s, s + n) for s, n in zip(*(x.flatten().tolist() for x in self.spans[:2]), strict=True)]
        self.N = int(stretch.sum())
        outside = torch.ones(self.N, dtype=torch.bool)
        for head in self.heads:
            outside[head] = False
        self.outside_N1 = outside[:, None]
        self.rows, (self.keys, self.values) = self.full() if form == "full" else self.coded(int(form[0]))

    def full(self) -> tuple[Rows, list[list[torch.Tensor]]]:
        rows = [torch.randn(self.N, self.D, generator=self.draw).to(self.dtype) for _ in range(2)]
        rows = [x.masked_fill(self.outside_N1, torch.nan) for x in rows]
        return (rows[0], rows[1]), [[x[head].double() for head in self.heads] for x in rows]

    def levels(self, bits: int, *size: int) -> list[torch.Tensor]:
        """Steps and zero points, as numbers of about unit size have them."""
        step, zero = (1 + torch.rand(*size, generator=self.draw) for _ in range(2))
        return [(step * 2 / 2**bits).half(), -zero.half()]

    def coded(self, bits: int) -> tuple[Rows, list[list[torch.Tensor]]]:
        N, D, groups, P = self.N, self.D, self.D // 32, len(self.heads)
        stored = [torch.randint(256, (N, D * bits // 8), generator=self.draw, dtype=torch.uint8) for _ in range(2)]
        codes = [torch.stack([x.long() >> s & 2**bits - 1 for s in range(0, 8, bits)], -1).flatten(1) for x in stored]
        of_rows = [[x.masked_fill(self.outside_N1, torch.nan) for x in self.levels(bits, N, groups)] for _ in range(2)]
        spread = [[x.double().repeat_interleave(32, 1) for x in levels] for levels in of_rows]
        keys, values = (zero + x * step for x, (step, zero) in zip(codes, spread, strict=True))
        if bits == 8:
            rows: Rows = ByteRows(*stored, *of_rows[0], *of_rows[1])
            return rows, [[x[head] for head in self.heads] for x in (keys, values)]
        group, (step, zero) = torch.randint(5, (N,), generator=self.draw), self.levels(bits, P, 5, D)
        tails = [torch.full((P, 6, D), torch.nan, dtype=self.dtype) for _ in range(2)]
        held: list[list[torch.Tensor]] = [[], []]
        counts = [min(head.stop - head.start, (4, 6, 0)[p % 3]) for p, head in enumerate(self.heads)]
        for p, (head, n) in enumerate(zip(self.heads, counts, strict=True)):
            own = zero[p, group[head]].double() + codes[0][head] * step[p, group[head]].double()
            for x, tail, out in zip((own, rotated(values[head])), tails, held, strict=True):
                tail[p, :n] = torch.randn(n, D, generator=self.draw).to(self.dtype)
                out.append(torch.cat((x[: len(x) - n], tail[p, :n].double())))
        of_tail = torch.tensor(counts, dtype=torch.int32).view_as(self.lengths_BH)
        return PackedRows(*stored, group.short(), step, zero, *of_rows[1], *tails, of_tail), held


def angles(place: torch.Tensor, R: int) -> torch.Tensor:
    return place.double()[:, None] * 0.3 ** torch.arange(R // 2).double()


def tables_of(places: int, R: int) -> Rotation:
    angle = angles(torch.arange(places), R).repeat(1, 2)
    return Rotation(angle.cos().float(), angle.sin().float())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("form", "turn", "shape"), pairs(FORMS, TURNS, SHAPES))
def test_one_token(form, turn, shape):
    (kind, share), (lengths, D, G) = turn, shape
    drawn, R = Drawn(form, lengths, D, texts=2), int(share * D)
    longest, H = drawn.spans.longest, len(lengths)
    place = torch.randint(-30, longest + 20, (drawn.N,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    turn = None if kind == "none" else tables_of(longest + 20, R)
    if kind == "placed":
        turn = turn._replace(place_N=place)
    elif kind == "angles":  # what turns is scaled
        steps = (angle_steps(0.3 ** torch.arange(R // 2).double(), longest, by) for by in (1.25, 0.5))
        turn = Angles(*steps)
    q = random(2, G * H, D)
    with poisoned():
        mine = KERNELS["ragged_decode"](q, drawn.rows, drawn.spans, 0.2, turn, received=True)
        alone = KERNELS["ragged_decode"](q, drawn.rows, drawn.spans, 0.2, turn)
    theirs = REFERENCES["ragged_decode"](q, drawn.rows, drawn.spans, 0.2, turn, received=True)
    assert torch.equal(alone.out_BQD, mine.out_BQD) and alone.received_BHS is None
    for p, (k, v) in enumerate(zip(drawn.keys, drawn.values, strict=True)):
        (b, h), n, own = divmod(p, H), len(k), q[p // H, p % H * G :][:G].double()
        rank = torch.arange(n)
        if kind != "none":
            k = turned(k, angles(torch.maximum(rank, place[drawn.heads[p]]) if kind == "placed" else rank, R))
        if kind == "angles":
            own = turned(own, angles(torch.tensor([max(0, n - 1)]), R))
            own, k = (torch.cat((x[:, :R] * by, x[:, R:]), 1) for x, by in ((own, 0.5), (k, 1.25)))
        weights = (own @ k.T * 0.2).softmax(-1)
        for made in (theirs, mine):
            close(made.out_BQD[b, h * G :][:G], (weights @ v).float())
            close(made.received_BHS[b, h, :n], weights.mean(0).float())
            assert not made.received_BHS[b, h, n:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision(form, dtype):
    drawn, q = Drawn(form, [90, 60], 64, dtype=dtype), random(1, 4, 64, seed=1, dtype=dtype)
    mine = KERNELS["ragged_decode"](q, drawn.rows, drawn.spans, 0.1).out_BQD
    assert mine.dtype == dtype
    for h, (k, v) in enumerate(zip(drawn.keys, drawn.values, strict=True)):
        exact = (q[0, 2 * h : 2 * h + 2].double() @ k.T * 0.1).softmax(-1) @ v
        close(mine[0, 2 * h : 2 * h + 2].float(), exact.float(), dtype)


def test_rows_of_many_heads_may_be_over_2_to_the_31_elements(monkeypatch):
    """Offsets of heads are 64-bit, so the rows of one head alone are bounded. Meta tensors: nothing is allocated."""
    launched = []
    monkeypatch.setattr(common, "launch", lambda kernel, *rest, **options: launched.append(kernel))
    B, H, S, D = 4, 32, 131072, 128
    rows, q = torch.empty(B * H * S, D, device="meta"), torch.empty(B, H, D, device="meta")
    starts = torch.empty(B, H, dtype=torch.int64, device="meta")
    assert rows.numel() >= 2**31
    KERNELS["ragged_decode"](q, (rows, rows), Spans(starts, starts, S), 0.1)
    assert launched
    with pytest.raises(ValueError, match=f"keys spans {2**31} elements per head, which must be below 2"):
        KERNELS["ragged_decode"](q, (rows, rows), Spans(starts, starts, 2**24), 0.1)
    q, k = (torch.empty(1, heads, 2**20, D, device="meta") for heads in (16, 1))
    with pytest.raises(ValueError, match=f"q spans {2**31} elements per group, which must be below 2"):
        KERNELS["window_attention"](q, k, 0.1)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("4 bits", lambda r: r._replace(tail_keys_PRD=r.tail_keys_PRD.bfloat16()), "the tail is torch.bfloat16"),
        ("4 bits", lambda r: r._replace(key_codes_NX=r.key_codes_NX.short()), "takes 4 or 2 in torch.uint8"),
        ("4 bits", lambda r: r._replace(key_step_PMD=r.key_step_PMD[:1]), "does not belong to"),
        ("8 bits", lambda r: r._replace(key_codes_ND=r.key_codes_ND.short()), "torch.uint8 with their steps"),
        ("8 bits", lambda r: r._replace(value_step_NC=r.value_step_NC.float()), "must be float16"),
    ],
)
def test_what_few_bits_refuse(form, change, message):
    drawn = Drawn(form, [40, 40], 64)
    with pytest.raises(ValueError, match=message):
        KERNELS["ragged_decode"](random(1, 4, 64), change(drawn.rows), drawn.spans, 0.1)


@BOTH
def test_no_row_to_decode_over(functions):
    q, rows, one = torch.zeros(1, 1, 64), torch.zeros(4, 64), torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="longest: 0 rows must be at least 1"):
        functions["ragged_decode"](q, (rows, rows), Spans(one, one, 0), 0.1)
