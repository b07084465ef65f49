"""By which position a cached key is rotated: `clipped` between `compact` and `original`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_runs import logits_of
from tiny_models import tiny_model

from locret_kit.backbones.rope import rotate, rotate_lean
from locret_kit.cache.bounded import BoundedCache
from locret_kit.cache.rotation import Positions


@given(st.data())
def test_places_are_true_distances_inside_the_span_and_ranks_below(data):
    seen = data.draw(st.integers(1, 60))
    held = sorted(data.draw(st.sets(st.integers(0, seen - 1), min_size=1)))
    span = data.draw(st.integers(0, 80))
    rank, position = torch.arange(len(held)), torch.tensor(held)
    place = Positions(span).place(rank, position, seen).tolist()
    assert place == [max(r, t - max(0, seen - span)) for r, t in enumerate(held)]
    assert place == sorted(set(place))
    assert place[-1] < Positions(span).largest(len(held), seen)
    if span >= seen:
        assert place == held
    if span == 0:
        assert place == list(range(len(held)))


def logits(model, ids, policy, positions, **kw):
    kw |= dict(chunk=8, prompt_length=len(ids), stabilizers=3, local_len=2)
    cache = BoundedCache(12, policy, positions=positions, **kw)
    return logits_of(cache, ids, [5], model)


@pytest.mark.parametrize(
    "policy", ["random", "h2o", "snapkv(window=3)", "ada-snapkv(window=3)", "compactor", "score=window(6,1)"]
)
@pytest.mark.parametrize("family", ["llama", "phi3-longrope"])
def test_a_wide_span_is_original_and_a_narrow_one_compact(policy, family):
    model = tiny_model(family).double()
    ids = torch.randint(3, 60, (37,), generator=torch.Generator().manual_seed(0)).tolist()
    wide, narrow = logits(model, ids, policy, "clipped(100)"), logits(model, ids, policy, "clipped(0)")
    torch.testing.assert_close(wide, logits(model, ids, policy, "original"), rtol=0, atol=1e-5)
    torch.testing.assert_close(narrow, logits(model, ids, policy, "compact"), rtol=0, atol=1e-5)
    between = logits(model, ids, policy, "clipped(25)")
    assert (between - wide).abs().max() > 1e-5 and (between - narrow).abs().max() > 1e-5


def test_clipped_alone_is_half_the_window():
    assert Positions.parse("clipped", 8192) == Positions(4096)
    assert Positions.parse("clipped(17)", 8192) == Positions(17)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape, table", [((1, 3, 7, 16), (7, 16)), ((2, 3, 5, 16), (5, 8)), ((2, 6, 1, 16), (2, 6, 1, 16))]
)
def test_the_lean_rotation_has_the_same_bits(shape, table, dtype):
    torch.manual_seed(0)
    x, angle = torch.randn(shape).to(dtype), 9 * torch.rand(table)
    cos, sin = (part.to(dtype) for part in (angle.cos(), angle.sin()))
    before = x.clone()
    assert torch.equal(rotate_lean(x, cos, sin), rotate(x, cos, sin)) and torch.equal(x, before)
