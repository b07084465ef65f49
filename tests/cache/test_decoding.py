"""One token's attention through the decoding kernels' references, in the cache, against plain float64 attention.

Outputs are compared where attention makes them: a norm that computes in float32, as these backbones' do, hides small errors
from the logits.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from policy_runs import LENGTH, backbone, held, make, tokens
from tiny_models import COMMON, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.rope import rotate
from locret_kit.cache.step import read_block
from locret_kit.cache.storage.codec import Scratch
from locret_kit.cache.storage.quantised import GroupedBits
from locret_kit.cache.view import _keys
from locret_kit.runtime.session import prefill

STEPS = 40
PLACES = ["compact", "original", "clipped(75)"]
RAGGED = ["ada-snapkv(6,3)", "ada-locret", "score=aas allocation=adaptive", "score=aqas allocation=adaptive"]
EVEN = ["h2o", "scissorhands", "roco", "streaming", "full"]


EACH = 4
"""Of so many attentions one is compared, in another of the three layers each time."""


class Watch:
    """Counts every one-token attention that goes through ``varlen``, and compares one of ``EACH`` with attention written out."""

    def __init__(self, atol: float) -> None:
        self.atol, self.steps, self.gains = atol, 0, 0

    def block(self, ctx, rows, q, *rest):
        """In the place of ``step.read_block``."""
        compared = self.steps % EACH == 0
        before = rows.slots("stats").clone() if compared and rows.is_initialized and rows.rows else None
        out = read_block(ctx, rows, q, *rest)
        if q.shape[2] == 1 and rows.uses_varlen:
            self.steps += 1
            if compared:
                self.compare(ctx, rows, q, rows.scaling, out, before)
        return out

    def compare(self, ctx, rows, q, scaling, out, before) -> None:
        keys, values, valid = _keys(ctx, rows), rows.slots("values"), rows.layout.valid()
        span, seen = ctx.positions.span, rows.seen
        newest = seen - 1 if span is None else seen - 1 - max(0, seen - span)
        place_BH = torch.full(valid.shape[:2], newest)
        if span is not None:
            place_BH = torch.maximum(place_BH, valid.sum(-1) - 1)
        G = q.shape[1] // keys.shape[1]
        stats = rows.slots("stats")
        for b in range(q.shape[0]):
            for h in range(keys.shape[1]):
                own = valid[b, h]
                cos, sin = ctx.ropes[rows.number].tables(place_BH[b, h][None], q.dtype)
                query = rotate(q[b, h * G : (h + 1) * G], cos, sin)[:, 0].double()
                weights = (query @ keys[b, h, own].double().T * scaling).softmax(-1)
                oracle = (weights @ values[b, h, own].double()).to(out.dtype)
                torch.testing.assert_close(out[b, h * G : (h + 1) * G, 0], oracle, rtol=0, atol=self.atol)
                a = weights.mean(0)
                for stat, name in zip(stats[:, b, h, own], ctx.statistics, strict=True):
                    made = {"sum": a, "square": a * a, "above": (a > 1.00001 / len(a)).double()}[name]
                    old = before[ctx.statistics.index(name), b, h][-(len(a) - 1) :] if len(a) > 1 else a[:0]
                    torch.testing.assert_close(stat[:-1], old + made[:-1].float(), rtol=1e-6, atol=1e-6)
                    torch.testing.assert_close(stat[-1], made[-1].float(), rtol=1e-6, atol=1e-6)
                    self.gains += 1
        if isinstance(rows.codec, GroupedBits):
            rows.codec.scratch.owner = None  # what the oracle has read does not count


def decoded(model, cache, ids, steps: int = STEPS, atol: float = 1e-12) -> Watch:
    """Read a prompt and ``steps`` tokens, watched."""
    watch = Watch(atol)
    prefill(model, ids, cache)
    with attach(model), torch.no_grad(), mock.patch("locret_kit.cache.step.read_block", watch.block):
        for token in range(steps):
            model(input_ids=torch.tensor([[5 + token]]), **{CACHE: cache})
    return watch


@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-mqa"])
@pytest.mark.parametrize("policy", RAGGED)
def test_ragged_rows(policy, family):
    positions = PLACES[RAGGED.index(policy) % 3]
    cache = make(policy, family=family, positions=positions)
    watch = decoded(backbone(family), cache, tokens())
    assert watch.steps == STEPS * 3 and cache.counters.evictions >= 8  # five of the prompt
    lengths = {len(head) for layer in held(cache) for head in layer}
    assert len(lengths) > 1 or family == "llama-mqa"
    assert bool(watch.gains) == policy.startswith("score=a")


@pytest.mark.parametrize(("policy", "bits"), [*zip(EVEN, [4, 2] * 4, strict=False), ("h2o", 2)])
def test_rows_in_few_bits(policy, bits):
    turn = [*EVEN, *RAGGED].index(policy)
    family = ["llama", "llama-mha", "llama-mqa"][turn % 3]
    cache = make(policy, 60, length=150, family=family, kv_bits=bits, positions=PLACES[turn // 2 % 3])
    watch = decoded(backbone(family), cache, tokens(150), steps=70)
    # All but those that find the tail full, one in 32, and what an eviction leaves in it.
    assert 3 * 64 <= watch.steps < 3 * 70
    assert bool(watch.gains) == bool(cache.context.statistics)


def test_layers_with_a_window_among_ragged_ones():
    model = tiny_model("gemma3").double()
    cache = BoundedCache(24, "ada-snapkv(6,3)", chunk=13, prompt_length=LENGTH)
    watch = decoded(model, cache, tokens())
    assert watch.steps == STEPS * sum(layer.layout.ragged for layer in cache.bounded) > 0


def test_a_part_of_the_head_is_rotated():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    config = AutoConfig.for_model("phi3", sliding_window=None, rope_parameters=rope, **COMMON)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().double()
    cache = BoundedCache(24, "ada-snapkv(6,3)", chunk=13, prompt_length=LENGTH)
    assert decoded(model, cache, tokens()).steps == STEPS * 3
    assert cache.context.ropes[0].inv_freq.shape == (2,), "of a head of eight, four are rotated"


@pytest.mark.parametrize("policy", ["h2o", "score=random"])
def test_a_token_reads_no_row_back(policy):
    """Rows are brought back from their bits where the tail is full and before an eviction, and for no other token."""
    model, cache, opened = backbone(), make(policy, 60, length=150, chunk=50, kv_bits=4), []
    real = Scratch.acquire
    with attach(model), torch.no_grad():
        prefill(model, tokens(150), cache)
        codecs, due, seen = [rows.codec for rows in cache.bounded], [], []
        with mock.patch.object(Scratch, "acquire", lambda scratch, codec: (opened.append(codec), real(scratch, codec))):
            for token in range(100):
                full = [r.codec.tail == r.codec.max_tail or r.rows == r.capacity for r in cache.bounded]
                due.append({layer for layer, is_full in enumerate(full) if is_full})
                opened.clear()
                model(input_ids=torch.tensor([[5 + token % 90]]), **{CACHE: cache})
                seen.append({codecs.index(codec) for codec in opened})
    assert seen == due and all(3 <= sum(layer in full for full in due) <= 6 for layer in range(3))
