"""LoCoCo's pool: its fold and whole runs against Python loops in float64, its files and its place in the grammar."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from merge_replay import replayed
from policy_runs import backbone, make, tokens
from tiny_models import tiny_model

from locret_kit.backbones.spec import spec_of
from locret_kit.policies.methods.lococo import (
    ConvPool,
    PoolConfig,
    SlotConvolution,
    load_pool,
    merge_convolved,
    save_pool,
)

BASES = ["h2o", "locret", "streaming", "ada-snapkv(6,3)", "kvcrush(base=h2o)"]
BASES += ["score=cis scope=stabilizers allocation=pyramid(3)"]


# ---- the definition -----------------------------------------------------------------------------------------------------


def mixed(conv: SlotConvolution, xs: list[np.ndarray], pool: list[int]) -> list[list[float]]:
    """Weights of every merged slot over the slots ``xs``, by loops."""
    kernel, bias = conv.conv.weight.detach().double().numpy(), conv.conv.bias.detach().double().numpy()
    share, K = 1 / (1 + math.exp(-float(conv.gate))), kernel.shape[-1]
    if conv.norm is not None:
        scale, shift = conv.norm.weight.numpy(), conv.norm.bias.numpy()
        xs = [(x - x.mean()) / math.sqrt(x.var() + 1e-5) * scale + shift for x in xs]
    rows = []
    for m, own in enumerate(pool):
        logits = []
        for i in range(len(xs)):
            total = float(bias[m])
            for j in range(K):
                at = i + j - (K - 1) // 2
                if 0 <= at < len(xs):
                    total += sum(float(kernel[m, c, j]) * float(xs[at][c]) for c in range(kernel.shape[1]))
            logits.append(max(0.0, total))
        whole = sum(math.exp(a) for a in logits)
        rows.append([(1 - share) * (i == own) + share * math.exp(a) / whole for i, a in enumerate(logits)])
    return rows


def folded(conv: SlotConvolution, keys, values, pool: list[bool], stay: list[bool]) -> dict[int, tuple]:
    """Key and value of every slot of the pool after the fold."""
    taking = [s for s in range(len(stay)) if pool[s] or not stay[s]]
    if all(stay):
        return {}
    rows = mixed(
        conv, [np.concatenate((keys[s], values[s])) for s in taking], [i for i, s in enumerate(taking) if pool[s]]
    )
    merged = [s for s in range(len(stay)) if pool[s]]
    return {
        s: tuple(sum(w * x[t] for w, t in zip(row, taking, strict=True)) for x in (keys, values))
        for s, row in zip(merged, rows, strict=True)
    }


def convolution(
    D: int, slots: int, kernel: int, seed: int = 0, gate: float = 0.5, scale: float = 3.0, norm: bool = False
) -> SlotConvolution:
    torch.manual_seed(seed)
    config = PoolConfig("tiny", "llama", 1, 1, D, slots, kernel, norm)
    made = SlotConvolution(config).double().requires_grad_(False)
    made.gate.fill_(math.log(gate / (1 - gate)))
    if made.norm is not None:
        made.norm.weight.uniform_(0.5, 2)
        made.norm.bias.uniform_(-1, 1)
    made.conv.weight.mul_(scale)
    return made


@st.composite
def heads_of_slots(draw):
    """Keys, values, what stays and the pool among it, of one head; and a convolution."""
    S, D, kernel = draw(st.integers(1, 20)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 3, 21]))
    seed = draw(st.integers(0, 10_000))
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, S, D))
    stay = rng.random(S) < draw(st.sampled_from([0.0, 0.4, 0.8, 1.0]))
    slots = draw(st.integers(1, 6))
    pool = np.zeros(S, bool)
    pool[rng.permutation(np.flatnonzero(stay))[:slots]] = True
    scale = draw(st.sampled_from([0.1, 0.5, 0.9]))
    return keys, values, pool, stay, convolution(D, slots, kernel, seed, scale, norm=seed % 2 == 0)


@given(heads_of_slots())
def test_one_head_is_the_definition(case):
    keys, values, pool, stay, conv = case
    got = merge_convolved(conv, *map(torch.from_numpy, (keys, values, pool, stay)))
    want = folded(conv, keys, values, pool, stay)
    assert got.slots_R.tolist() == sorted(want)
    for i, s in enumerate(sorted(want)):
        np.testing.assert_allclose(got.keys_RD[i], want[s][0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(got.values_RD[i], want[s][1], rtol=1e-9, atol=1e-9)


# ---- runs -------------------------------------------------------------------------------------------------------------


def saved(folder: Path, family: str = "llama") -> str:
    """A pool with weights that matter."""
    torch.manual_seed(7)
    pool = ConvPool(PoolConfig.for_backbone(spec_of(tiny_model(family).config), "tiny", 5, kernel=5))
    with torch.no_grad():
        for layer in pool.layers:
            layer.conv.weight.mul_(3)
    save_pool(pool, folder, torch.float32)
    return str(folder)


@pytest.fixture(scope="module")
def pool(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("pool"))


@pytest.mark.parametrize("base", BASES)
def test_a_run_is_the_definition(base, pool):
    """After chunked prefill and evictions while decoding, every row of every head is what the loops make of the tokens."""
    positions = ("compact", "original", "clipped(20)")[BASES.index(base) % 3]
    weights, merged = load_pool(pool).double(), []

    def fold(layer, slots, scores, protected, stays):
        free = [i for i, stay in enumerate(stays) if stay and not protected[i]]
        worst = sorted(free, key=lambda i: (scores[i], i))[:5]
        keys, values, _ = zip(*slots, strict=True)
        after = folded(weights[layer], keys, values, [i in worst for i in range(len(slots))], stays)
        merged.append(len(after))
        return {i: (*new, 0.0) for i, new in after.items()}

    for _ in replayed(f"{base} merge=lococo({pool})", [*tokens(), *range(4, 9)], positions, fold, 1e-5):
        pass
    assert sum(merged) > 40


# ---- files and the grammar ----------------------------------------------------------------------------------------------


def test_a_saved_pool_comes_back(pool, tmp_path):
    first = load_pool(pool)
    save_pool(first, tmp_path)
    second = load_pool(tmp_path)
    assert first.config == second.config
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b.bfloat16()) and b.dtype == torch.float32 and not b.requires_grad
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_another_backbone_is_an_error_that_says_what_differs(tmp_path):
    other = saved(tmp_path, family="llama-mha")
    with pytest.raises(ValueError, match="this pool is for tiny: n_kv_heads: the pool has 6, the backbone has 2"):
        make(f"h2o merge=lococo({other})").bind(backbone())
