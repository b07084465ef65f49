"""Slots that a token of the prompt sees while the prompt is read (`prefill_mask=sliding(newest, sinks)`)."""

import pytest
import torch
from bounded_masks import IDS, bounded, mask_by_definition
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model

from locret_kit.backbones.intercept import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.bounded import BoundedCache
from locret_kit.policies.methods.windowed import Sliding

pytestmark = pytest.mark.usefixtures("poisoned")


def read(model, cache, piece: int = IDS.shape[1]) -> torch.Tensor:
    """Logits of every token of the prompt, fed in pieces."""
    with attach(model), torch.no_grad():
        pieces = [model(input_ids=ids, **{CACHE: cache}).logits for ids in IDS.split(piece, dim=1)]
    return torch.cat(pieces, dim=1)


@given(st.integers(0, 40), st.integers(0, 20), st.integers(0, 12), st.integers(0, 60))
def test_rows_that_are_seen_are_the_first_and_the_newest_without_doubles(newest, sinks, fresh, older):
    rows = older + fresh
    seen = Sliding(newest, sinks).visible(rows, fresh)
    wanted = [row for row in range(rows) if row < sinks or row >= rows - fresh - newest]
    found = list(range(rows)) if seen is None else [row for piece in seen for row in range(rows)[piece]]
    assert found == wanted


@pytest.mark.parametrize(("newest", "sinks"), [(10, 2), (0, 3), (7, 0), (50, 2)])
def test_logits_are_those_of_full_attention_under_the_mask_of_the_definition(newest, sinks):
    model = tiny_model("llama").double()
    sees = mask_by_definition(67, 62, 8, 24, 4, newest, sinks)
    hidden = torch.zeros(67, 67, dtype=torch.float64).masked_fill(~sees, float("-inf"))
    wanted = model(input_ids=IDS, attention_mask=hidden[None, None]).logits
    found = read(model, bounded(f"streaming(4) prefill_mask=sliding({newest},{sinks})", positions="original"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    plain = read(model, bounded("streaming(4)", positions="original"))
    assert (newest == 50) == torch.allclose(found, plain)


STORED = [(p, bits) for p in ("random", "h2o", "pyramidkv(6,3,beta=2)") for bits in (None, 4)]
STORED += [("ada-snapkv(6,3)", None), ("sirllm", None), ("h2o", 8)]


@pytest.mark.parametrize(("policy", "kv_bits"), STORED)
def test_pieces_do_not_matter(policy, kv_bits):
    positions = ("compact", "original", "original", "compact")[STORED.index((policy, kv_bits)) % 4]
    model, text = tiny_model("llama").double(), f"{policy} prefill_mask=sliding(5,2)"
    caches = [bounded(text, kv_bits=kv_bits, positions=positions) for _ in range(3)]
    whole, *others = (read(model, cache, piece) for cache, piece in zip(caches, (67, 7, 1), strict=True))
    for other in others:
        torch.testing.assert_close(other, whole, rtol=0, atol=1e-4 if kv_bits else 1e-9)
    assert all(caches[0].kept_positions(0)[0][0].tolist() == c.kept_positions(0)[0][0].tolist() for c in caches)
    assert not torch.allclose(whole, read(model, bounded(policy, kv_bits=kv_bits, positions=positions)))


def test_slots_out_of_sight_gain_no_attention():
    model = tiny_model("llama").double()
    cache = bounded("h2o prefill_mask=sliding(6,2)", chunk=16)
    with attach(model), torch.no_grad():
        model(input_ids=IDS[:, :32], **{CACHE: cache})
        before = cache.bounded[0].slots("stats").clone()
        assert before.shape[-1] == 24
        model(input_ids=IDS[:, 32:40], **{CACHE: cache})
    gained = (cache.bounded[0].slots("stats")[..., :24] - before)[cache.context.statistics.index("sum")]
    assert (gained[..., :2] > 0).all() and (gained[..., 18:] > 0).all() and not gained[..., 2:18].any()
    everything = cache.bounded[0].slots("stats")[cache.context.statistics.index("sum")].sum(-1) - before.sum(-1)[0]
    torch.testing.assert_close(everything, torch.full_like(everything, 8.0))  # a row of attention sums to 1


def test_where_the_prompt_ends_must_be_known():
    with pytest.raises(ValueError, match="prompt_length"):
        BoundedCache(16, "recency prefill_mask=sliding")
