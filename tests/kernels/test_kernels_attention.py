"""Column statistics, the CIS target, attention in two parts and of blocks: Triton (interpreted), the references, and float64."""

import pytest
import torch
from attention_oracle import attention, logits
from interpreted import BOTH, KERNELS, REFERENCES, close, common, poisoned, random
from pairwise import pairs

from locret_kernels.attend import STATISTICS, Blocks
from locret_kernels.ragged_decode import Spans
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
        "ragged_decode": (q[:, :, 0].contiguous(), flat, spans, 0.2),
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


# ---- attention in two parts ----


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("B", "T", "before", "D"), [(1, 1, 40, 64), (2, 40, 7, 96), (1, 33, 200, 128)])
def test_two_parts_are_joined(functions, B, T, before, D, dtype):
    """Rows before a chunk and its own, whose heads of a token lie side by side; logits may be large."""
    q, k = queries_and_keys(4, 2, T, before + T, D, B, dtype)
    v = random(*k.shape, seed=3, dtype=dtype)
    q[:, 0] *= 30
    keys, values = (x.repeat_interleave(2, 1).double() for x in (k, v))
    parts = []
    for rows, own in ((slice(0, before), False), (slice(before, None), True)):
        x = q.double() @ keys[:, :, rows].mT * 0.1
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if own else x
        out = (x.softmax(-1) @ values[:, :, rows]).to(dtype)
        parts += [out.transpose(1, 2).contiguous().transpose(1, 2), x.logsumexp(-1).float()]
    with poisoned():
        made, lse = functions["join_parts"](*parts)
    close(made.float(), attention(q, k, v, 0.1).float(), dtype)
    close(lse, logits(q, k, 0.1).logsumexp(-1).float())
    assert made.dtype == dtype and made.stride() == parts[0].stride()


# ---- attention over chosen blocks of rows ----


def blocks_drawn(B, Q, H, T, S, D, queries, unit, share, dtype=torch.float32):
    """q, k, v and random blocks."""
    (q, k), v = queries_and_keys(Q, H, T, S, D, B, dtype), random(B, H, S, D, seed=3, dtype=dtype)
    seen = torch.rand(B, Q, -(-T // queries), -(-S // unit), generator=torch.Generator().manual_seed(0)) < share
    return q, k, v, Blocks(seen, queries, unit)


def masked(q, k, v, scaling, blocks: Blocks):
    """Dense attention in float64 of what the blocks and causality leave; 0 where that is nothing."""
    (B, Q, T, _), S = q.shape, k.shape[2]
    mask = torch.zeros(B, Q, T, S, dtype=torch.bool)
    for t in range(T):
        for s in range(S - T + t + 1):
            mask[:, :, t, s] = blocks.seen_BQNU[:, :, t // blocks.queries, s // blocks.unit]
    return attention(q, k, v, scaling, mask)


@pytest.mark.parametrize(
    ("Q", "H", "T", "S", "D", "queries", "unit"),
    [
        (4, 2, 1, 1, 64, 64, 1), (2, 2, 70, 70, 64, 64, 1), (2, 1, 67, 200, 96, 64, 128), (2, 1, 40, 129, 128, 128, 128),
        (2, 2, 20, 33, 256, 7, 5),
    ],
)  # fmt: skip
def test_it_is_masked_attention(Q, H, T, S, D, queries, unit):
    inputs = blocks_drawn(2 if T == 70 else 1, Q, H, T, S, D, queries, unit, 0.4)
    with poisoned():
        mine, theirs = (f["sparse_attend"](*inputs[:3], 0.2, inputs[3]) for f in (KERNELS, REFERENCES))
    oracle = masked(*inputs[:3], 0.2, inputs[3]).float()
    close(theirs, oracle)
    close(mine, oracle)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BOTH
def test_blocks_in_half_precision(functions, dtype):
    q, k, v, blocks = blocks_drawn(1, 4, 2, 9, 200, 64, 64, 16, 0.5, dtype=dtype)
    made = functions["sparse_attend"](q, k, v, 0.1, blocks)
    assert made.dtype == dtype
    close(made.float(), masked(q, k, v, 0.1, blocks).float(), dtype)


@BOTH
def test_what_is_not_chosen_is_never_read(functions):
    """NaN in a unit that no block sees, and after a buffer's rows, changes nothing."""
    q, k, v, blocks = blocks_drawn(1, 2, 1, 40, 100, 64, 16, 10, 0.5)
    blocks.seen_BQNU[..., 3] = False
    wanted = functions["sparse_attend"](q, k, v, 0.1, blocks)
    buffers = [torch.full((1, 1, 130, 64), float("nan")) for _ in range(2)]
    for buffer, x in zip(buffers, (k, v), strict=True):
        buffer[:, :, :100] = x
        buffer[:, :, 30:40] = float("nan")
    assert torch.equal(functions["sparse_attend"](q, *(x[:, :, :100] for x in buffers), 0.1, blocks), wanted)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b._replace(seen_BQNU=b.seen_BQNU[..., 1:]), r"seen \[1, 2, 3, 9\] must be \[1, 2, 3, 10\]"),
        (lambda b: b._replace(unit=0), "unit=0 must be at least 1"),
    ],
)
def test_blocks_that_do_not_fit(functions, change, message):
    q, k, v, blocks = blocks_drawn(1, 2, 1, 40, 100, 64, 16, 10, 0.5)
    with pytest.raises(ValueError, match=message):
        functions["sparse_attend"](q, k, v, 0.1, change(blocks))
