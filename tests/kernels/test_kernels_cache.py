"""A cache whose statistics, moves of rows and decoding go through Triton (interpreted) equals one that uses the references."""

from unittest import mock

import pytest
import torch
from interpreted import common
from kernel_runs import DECODED, LENGTH, model, run  # noqa: F401  (fixtures)
from tiny_heads import tiny_heads
from tiny_models import LONGROPE, tiny_model

from locret_kernels.ragged_decode.triton import _arrived
from locret_kit import BoundedCache, attach
from locret_kit.cache import attend
from locret_kit.runtime.drivers.graph import GraphDriver
from locret_kit.runtime.session import prefill

FACTORS, HALF = [1.0 + n / 16 for n in range(16)], {"partial_rotary_factor": 0.5}
ONE_LAYER = pytest.mark.parametrize("model", [1], indirect=True)
pytestmark = pytest.mark.usefixtures("poisoned")


@ONE_LAYER
@pytest.mark.parametrize(
    ("policy", "bits", "flat", "positions"),
    [
        ("h2o", None, False, "compact"),
        ("roco", 4, True, "compact"),
        ("snapkv(6,3)", 2, True, "original"),
        ("ada-snapkv(6,3)", None, True, "clipped(35)"),
        ("score=aqas allocation=adaptive", None, True, "compact"),
    ],
)
def test_backends_agree(model, policy, bits, flat, positions):
    assert common.INTERPRETED
    with mock.patch.object(attend, "function", wraps=attend.function) as used:
        mine, theirs = (run(model, policy, bits, backend, positions) for backend in ("triton", "reference"))
    calls = [call.args for call in used.call_args_list if call.args[0] != "rotate_rows"]
    # With kernels one token reads rows of every kind as they lie.
    names = ("triton", "reference")[: 1 + flat]
    assert calls == [("ragged_decode", name) for name in names for _ in range(DECODED)]
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-3, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(mine[1], theirs[1], strict=True))


def test_frequencies_of_longrope_and_a_part_of_the_columns():
    """Its factor scales what turns, and nothing else."""
    found = []
    for backend in ("triton", "reference"):
        longrope = tiny_model(
            "phi3-longrope", hidden_size=128, head_dim=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            rope_parameters=LONGROPE["rope_parameters"] | dict.fromkeys(("short_factor", "long_factor"), FACTORS) | HALF,
        )  # fmt: skip
        found.append(run(longrope, "h2o", None, backend)[0])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("model", "policy", "positions"),
    [(2, "recency", "compact"), (1, "h2o", "clipped(20)"), (1, "roco", "original")],
    indirect=["model"],
)
def test_fixed_shapes(model, policy, positions):
    """Kernels that read lengths from the device keep the slots that the references keep, and their logits agree."""
    out = []
    for backend in ("triton", "reference"):
        kept = dict(chunk=13, prompt_length=LENGTH, stabilizers=4, decode_every=3)
        cache = BoundedCache(16, policy, backend=backend, positions=positions, **kept)
        with attach(model), torch.no_grad():
            logits = [prefill(model, list(range(2, 2 + LENGTH)), cache)]
            step = GraphDriver(model, cache)
            logits += [step([cache], [5 + token])[0] for token in range(DECODED)]
        out.append((torch.stack(logits), [cache.kept_positions(layer) for layer in range(len(cache.layers))]))
    (mine, own), (exact, others) = out
    torch.testing.assert_close(mine, exact, rtol=1e-3, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(own, others, strict=True))


@ONE_LAYER
@pytest.mark.parametrize(
    ("policy", "bits"), [("locret", None), ("merge-locret", None), ("ada-locret", None), ("locret", 8), ("locret", 4)]
)
def test_scores_by_heads(model, policy, bits):
    """The launch that writes rows makes a head's second product; where rows are of another kind, PyTorch does."""
    heads = tiny_heads(model, 24)
    mine, theirs = (run(model, policy, bits, backend, heads=heads) for backend in ("triton", "reference"))
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-4)
    for own, others in zip(mine[1], theirs[1], strict=True):
        assert torch.equal(own, others)


def test_counts_that_a_graph_holds_stay_where_they_are():
    """A launch over more heads takes a buffer of its own; the first one is neither moved nor freed."""
    few = _arrived(1024, torch.device("cpu"))
    assert len(_arrived(4096, torch.device("cpu"))) == 4096 and _arrived(1024, torch.device("cpu")) is few
