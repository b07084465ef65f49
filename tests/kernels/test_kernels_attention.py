"""Column statistics, the CIS target and decoding: Triton (interpreted) against the references, those against float64."""

from __future__ import annotations

import pytest
import torch
from attention_oracle import logits, turned
from interpreted import BOTH, KERNELS, REFERENCES, close, common, poisoned, random
from pairwise import pairs

from locret_kernels.column_stats import STATISTICS
from locret_kernels.ragged_decode import Angles, Rotation, Spans, angle_steps
from locret_kit.cis import cis_target

pytestmark = pytest.mark.usefixtures("poisoned")

GROUPS = {"mha": (3, 3), "gqa": (4, 2), "mqa": (3, 1)}


def queries_and_keys(Q, H, T, S, D, B=1, dtype=torch.float32):
    return random(B, Q, T, D, seed=1, dtype=dtype), random(B, H, S, D, seed=2, dtype=dtype)


# ---- column statistics -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("T", "S", "D"), [(1, 1, 64), (7, 7, 64), (5, 129, 96), (70, 75, 128), (33, 40, 256)])
def test_column_stats(group, T, S, D):
    Q, H = GROUPS[group]
    q, k = queries_and_keys(Q, H, T, S, D, B=2 if D == 64 else 1)
    lse = logits(q, k, 0.2).logsumexp(-1).float()
    with poisoned():
        mine = KERNELS["column_stats"](q, k, 0.2, lse, want=STATISTICS)
    theirs = REFERENCES["column_stats"](q, k, 0.2, lse, want=STATISTICS)
    a = logits(q, k, 0.2).softmax(-1).unflatten(1, (H, -1)).mean(2)
    seen = torch.arange(S - T + 1, S + 1)[:, None]
    oracle = {"sum": a.sum(2), "square": a.square().sum(2), "above": (a > 1.00001 / seen).sum(2)}
    for name, expected in oracle.items():
        close(getattr(theirs, name), expected.float())
        close(getattr(mine, name), getattr(theirs, name))


@pytest.mark.parametrize("name", sorted(STATISTICS))
def test_only_what_is_wanted(name):
    q, k = queries_and_keys(4, 2, 5, 9, 64)
    lse = logits(q, k, 0.2).logsumexp(-1).float()
    want = frozenset({name})
    mine, theirs = (f["column_stats"](q, k, 0.2, lse, want=want)._asdict() for f in (KERNELS, REFERENCES))
    close(mine.pop(name), theirs.pop(name))
    assert set(mine.values()) == set(theirs.values()) == {None}


@pytest.mark.parametrize(("W", "S"), [(1, 1), (4, 4), (6, 300), (70, 90)])
def test_window_attention(W, S):
    q, k = queries_and_keys(4, 2, W, S, 64)
    with poisoned():
        mine = KERNELS["window_attention"](q, k, 0.2)
    close(mine, REFERENCES["window_attention"](q, k, 0.2))
    close(mine, logits(q, k, 0.2).softmax(-1).unflatten(1, (2, 2)).mean(2).sum(2).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    q, k = queries_and_keys(4, 2, 9, 70, 64, dtype=dtype)
    lse = logits(q, k, 0.1).logsumexp(-1).float()
    mine = KERNELS["column_stats"](q, k, 0.1, lse, want=STATISTICS)
    theirs = REFERENCES["column_stats"](q, k, 0.1, lse, want=STATISTICS)
    for a, b in zip((mine.sum, mine.square), (theirs.sum, theirs.square), strict=True):
        close(a, b, dtype)


def test_float16_as_a_card_computes_it(monkeypatch):
    """Without the interpreter's turn to float32: products of float16, weights rounded to float16 before the values."""
    monkeypatch.setattr(common, "UPCAST", False)
    q, k = queries_and_keys(4, 2, 9, 300, 96, dtype=torch.float16)
    v = random(1, 2, 300, 96, seed=3, dtype=torch.float16)
    spans = Spans(torch.tensor([[0, 300]]), torch.full((1, 2), 300), 300)
    flat = (k.reshape(-1, 96), v.reshape(-1, 96))
    pos = torch.arange(291, 300)
    calls = {
        "window_attention": (q, k, 0.2), "column_max": (q, k, pos, 0.2),
        "ragged_decode": (q[:, :, 0].contiguous(), flat, spans, 0.2, tables_of(300, 96)),
    }  # fmt: skip
    for name, arguments in calls.items():
        mine, theirs = (functions[name](*arguments) for functions in (KERNELS, REFERENCES))
        for a, b in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (mine, theirs)), strict=True):
            if b is not None:
                close(a.float(), b.float(), torch.float16)


# ---- the CIS target ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("T", "S", "D", "group", "log_prob"),
    pairs([(1, 1, 64), (7, 129, 96), (70, 90, 128), (3, 65, 256)], GROUPS, [False, True]),
)
def test_column_max(T, S, D, group, log_prob):
    Q, H = GROUPS[group]
    q, k = queries_and_keys(Q, H, T, S, D)
    pos = torch.randperm(S, generator=torch.Generator().manual_seed(3))[:T].sort().values
    with poisoned():
        mine = KERNELS["column_max"](q, k, pos, 0.2, log_prob=log_prob)
    theirs = REFERENCES["column_max"](q, k, pos, 0.2, log_prob=log_prob)
    exact = logits(q, k, 0.2, torch.arange(S) <= pos[:, None])
    oracle = (exact.log_softmax(-1) if log_prob else exact).unflatten(1, (H, -1)).amax((2, 3)).float()
    close(theirs, oracle)
    close(mine, oracle)
    kind = "log_prob" if log_prob else "logit"
    target = cis_target(q, k, pos, 0.2, kind=kind, floor=-12.0)
    close(mine.clamp_min(-12.0) if log_prob else mine, target)


@BOTH
def test_a_query_that_sees_no_slot(functions):
    """It counts for no slot; the others' log-probabilities stay."""
    q, k = queries_and_keys(2, 1, 2, 9, 64)
    out = functions["column_max"](q, k, torch.tensor([-1, 3]), 0.2, log_prob=True)
    close(out, REFERENCES["column_max"](q[:, :, 1:], k, torch.tensor([3]), 0.2, log_prob=True))
    assert out[..., :4].isfinite().all() and (out[..., 4:] == float("-inf")).all()


# ---- decoding ------------------------------------------------------------------------------------------------------


def angles(place, R):
    return place.double()[:, None] * 0.3 ** torch.arange(R // 2).double()


def steps_of(places, R, scale=1.0):
    return angle_steps(0.3 ** torch.arange(R // 2).double(), places, scale)


def tables_of(places, R):
    angle = angles(torch.arange(places), R).repeat(1, 2)
    return Rotation(angle.cos().float(), angle.sin().float())


@pytest.mark.parametrize(
    ("lengths", "D", "group", "share"),
    pairs([([1, 7, 129], 64), ([65, 64, 2], 96), ([40, 1, 33], 128), ([300, 3, 5], 256)], GROUPS, [0, 1, 0.75]),
)
def test_ragged_decode(lengths, D, group, share):
    Q, H = GROUPS[group]
    lengths = torch.tensor([[length + 2 * b for length in lengths[:H]] for b in range(2)])
    stretch = lengths + 3  # room for new rows behind each head's, poisoned
    starts = (stretch.flatten().cumsum(0) - stretch.flatten()).view(2, H)
    total, longest, R = int(stretch.sum()), int(lengths.max()), int(share * D)
    keys, values = (torch.full((total, D), float("nan")) for _ in range(2))
    for seed, (start, rows) in enumerate(zip(starts.flatten().tolist(), lengths.flatten().tolist(), strict=True)):
        keys[start : start + rows] = random(rows, D, seed=10 + seed)
        values[start : start + rows] = random(rows, D, seed=20 + seed)
    turns = [
        tables_of(longest, R),
        Angles(steps_of(longest, R, 1.25), steps_of(longest + 70, R, 0.5)[: 32 - -longest // 32]),
    ]
    for turn in turns if R else [None]:
        arguments = (random(2, Q, D), (keys, values), Spans(starts, lengths, longest), 0.2, turn)
        with poisoned():
            mine = KERNELS["ragged_decode"](*arguments, received=True)
            alone = KERNELS["ragged_decode"](*arguments)
        theirs = REFERENCES["ragged_decode"](*arguments, received=True)
        close(mine.out_BQD, theirs.out_BQD)
        close(mine.received_BHS, theirs.received_BHS)
        assert torch.equal(alone.out_BQD, mine.out_BQD) and alone.received_BHS is None
        b, h, rows = 1, H - 1, int(lengths[1, H - 1])
        k, v = (x[int(starts[b, h]) :][:rows].double() for x in (keys, values))
        k, q = turned(k, angles(torch.arange(rows), R)), arguments[0][b].double().view(H, Q // H, D)[h]
        if isinstance(turn, Angles):  # what turns is scaled; queries come before it
            q, k = (
                torch.cat((x[:, :R] * by, x[:, R:]), 1)
                for x, by in ((turned(q, angles(torch.tensor([rows - 1]), R)), 0.5), (k, 1.25))
            )
        weights = (q @ k.T * 0.2).softmax(-1)
        close(mine.out_BQD[b, -1], (weights @ v)[-1].float())
        close(mine.received_BHS[b, h, :rows], weights.mean(0).float())
        assert not mine.received_BHS[b, h, rows:].any()


def test_rows_are_rotated_by_a_place_above_their_rank():
    q, keys, values = random(1, 4, 64), random(60, 64, seed=1), random(60, 64, seed=2)
    starts, lengths = torch.tensor([[0, 24]]), torch.tensor([[20, 36]])
    place = torch.randint(-30, 50, (60,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    for functions in (KERNELS, REFERENCES):
        turn = tables_of(50, 64)._replace(place_N=place)
        mine = functions["ragged_decode"](q, (keys, values), Spans(starts, lengths, 36), 0.2, turn)
        for h, (start, rows) in enumerate(((0, 20), (24, 36))):
            own = slice(start, start + rows)
            k = turned(keys[own].double(), angles(torch.maximum(torch.arange(rows), place[own]), 64))
            oracle = (q[0, 2 * h : 2 * h + 2].double() @ k.T * 0.2).softmax(-1) @ values[own].double()
            close(mine.out_BQD[0, 2 * h : 2 * h + 2], oracle.float())


@BOTH
@pytest.mark.parametrize("longest", [30, 700], ids=["one split", "several splits"])
def test_a_head_without_rows(functions, longest):
    """Its output is 0 and nothing receives attention; it may start after the last row. The other head is as without it."""
    keys, values = random(longest, 64, seed=1), random(longest, 64, seed=2)
    starts, lengths = torch.tensor([[0, longest]]), torch.tensor([[longest, 0]])
    with poisoned():
        q = random(1, 4, 64)
        spans = Spans(starts, lengths, longest)
        mine = functions["ragged_decode"](q, (keys, values), spans, 0.2, tables_of(longest, 64), received=True)
        alone = Spans(starts[:, :1], lengths[:, :1], longest)
        other = functions["ragged_decode"](q[:, :2], (keys, values), alone, 0.2, tables_of(longest, 64), received=True)
    assert not mine.out_BQD[:, 2:].any() and not mine.received_BHS[:, 1].any()
    close(mine.out_BQD[:, :2], other.out_BQD)
    close(mine.received_BHS[:, :1], other.received_BHS)


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
    ("change", "message"),
    [
        (dict(k=(1, 2, 9, 80), q=(1, 4, 3, 80)), "head size 80 must be one of: 64, 96, 128, 256"),
        (dict(k=(1, 3, 9, 64)), "do not belong together"),
        (dict(dtype=torch.float64), "q is torch.float64: backend='triton' takes float32, bfloat16, float16"),
    ],
)
def test_what_the_kernels_refuse(change, message):
    shapes = {"q": (1, 4, 3, 64), "k": (1, 2, 9, 64), **{n: s for n, s in change.items() if n != "dtype"}}
    q, k = (torch.zeros(shapes[name], dtype=change.get("dtype", torch.float32)) for name in "qk")
    with pytest.raises(ValueError) as caught:
        KERNELS["column_max"](q, k, torch.arange(3), 1.0)
    assert message in str(caught.value)
