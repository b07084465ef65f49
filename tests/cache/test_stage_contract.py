"""One contract for every stage, and a stage of a user's own."""

import pytest
import torch
from policy_runs import decode, tokens
from tiny_models import tiny_model

from locret_kit import BoundedCache
from locret_kit.cache.context import Stage
from locret_kit.cache.saved import save_cache
from locret_kit.runtime.session import prefill

POLICIES = ["streaming merge=nearest", "streaming recall=blocks(size=4,take=2)", "minference", "streaming"]
"""A policy of each stage, and one without."""


class Diary(Stage):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.kept: list[torch.Tensor] = []

    def attend(self, ctx, rows, q_BQTD):
        self.asked.append((rows.seen, q_BQTD.shape[2]))

    def evicted(self, ctx, rows, slots, scores_BHS, stay_BHS):
        assert slots.valid.shape == stay_BHS.shape and not (stay_BHS & ~slots.valid).any()
        assert int(stay_BHS.sum(-1).max()) <= rows.rows
        self.kept.append(slots.positions[stay_BHS])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stage_of_ones_own_changes_nothing_and_sees_everything(policy):
    """Beside the policy's own stages: every block of tokens, and every eviction before its rows move."""
    diary = Diary()
    caches = [BoundedCache(24, policy, chunk=16, prompt_length=90, stages=stages) for stages in ((), (diary,))]
    assert torch.equal(*(prefill(tiny_model("llama"), tokens(90), cache) for cache in caches))
    evictions = sum(rows.evictions for rows in caches[1].bounded)
    assert len(diary.kept) == evictions > 0 or policy == "minference"
    if "recall" not in policy:  # whose own attention ends the asking, where blocks come back
        assert sum(tokens for _, tokens in diary.asked) == 90 * len(caches[1].bounded)
    for last in diary.kept[-1:]:  # what the last layer kept at its last eviction is among its rows until the next
        assert set(last.tolist()) <= set(caches[1].kept_positions(len(caches[1].bounded) - 1).flatten().tolist())


def test_a_stage_may_compute_the_attention():
    """What ``attend`` returns is the layer's attention output; rows are there already."""

    class Silent(Stage):
        def attend(self, ctx, rows, q_BQTD):
            assert rows.seen >= q_BQTD.shape[2] and rows.slots("keys").shape[2] == rows.rows
            return torch.zeros_like(q_BQTD)

    model, ids = tiny_model("llama"), tokens(20)
    cache = BoundedCache(24, "streaming", chunk=8, prompt_length=20, stages=(Silent(),))
    x = model.model.embed_tokens(torch.tensor([ids]))
    for layer in model.model.layers:  # a decoder whose attention adds nothing
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    wanted = model.lm_head(model.model.norm(x))[0, -1]
    torch.testing.assert_close(prefill(model, ids, cache), wanted, rtol=1e-4, atol=1e-4)


def test_a_stage_is_asked_for_decoded_tokens_too(tmp_path):
    """Drivers and files know the policy's stages alone; forks share them."""
    model, ids, diary = tiny_model("llama"), tokens(20), Diary()
    cache = BoundedCache(24, "streaming", chunk=8, prompt_length=20, stages=(diary,))
    fork = cache.fork(20)
    logits = prefill(model, ids, cache)
    diary.asked.clear()
    assert len([*decode(model, cache, logits, prompt=ids, max_new_tokens=4)]) == 4
    assert diary.asked == [(seen, 1) for seen in (21, 22, 23) for _ in cache.bounded]
    assert cache.counters.decoding == "dynamic: stages=1 besides those of the policy"
    with pytest.raises(ValueError, match="stages=1 besides those of the policy: no file can name them"):
        save_cache(cache, tmp_path / "cache.locret")
    assert not [*tmp_path.iterdir()]
    prefill(model, ids, fork)
    assert diary.asked[-1][0] == 20
