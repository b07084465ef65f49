"""One contract for every stage, and a stage of a user's own."""

import pytest
import torch
from policy_runs import tokens
from tiny_models import tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.cache.context import Stage
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
@torch.no_grad()
def test_a_stage_of_ones_own_changes_nothing_and_sees_everything(policy):
    """Beside the policy's own stages: every block of tokens, and every eviction before its rows move."""
    model, ids, diary = tiny_model("llama"), tokens(90), Diary()
    with attach(model):
        caches = [BoundedCache(24, policy, chunk=16, prompt_length=90, stages=stages) for stages in ((), (diary,))]
        logits = [prefill(model, ids, cache) for cache in caches]
    assert torch.equal(*logits)
    evictions = sum(rows.evictions for rows in caches[1].bounded)
    assert len(diary.kept) == evictions > 0 or policy == "minference"
    if "recall" not in policy:  # whose own attention ends the asking, where blocks come back
        assert sum(tokens for _, tokens in diary.asked) == 90 * len(caches[1].bounded)
    last = diary.kept[-1] if diary.kept else None
    if last is not None:  # what the last layer kept at its last eviction is among its rows until the next
        assert set(last.tolist()) <= set(caches[1].kept_positions(len(caches[1].bounded) - 1).flatten().tolist())


@torch.no_grad()
def test_a_stage_may_compute_the_attention():
    """What ``attend`` returns is the layer's attention output; rows are there already."""

    class Silent(Stage):
        def attend(self, ctx, rows, q_BQTD):
            assert rows.seen >= q_BQTD.shape[2] and rows.slots("keys").shape[2] == rows.rows
            return torch.zeros_like(q_BQTD)

    model, ids = tiny_model("llama"), tokens(20)
    with attach(model):
        cache = BoundedCache(24, "streaming", chunk=8, prompt_length=20, stages=(Silent(),))
        logits, plain = (
            prefill(model, ids, each) for each in (cache, BoundedCache(24, "streaming", chunk=8, prompt_length=20))
        )
    assert not torch.equal(logits, plain)
    wanted = model.lm_head(model.model.norm(mlps_alone(model, ids)))[0, -1]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def mlps_alone(model, ids) -> torch.Tensor:
    """Hidden states of a decoder whose attention adds nothing."""
    x = model.model.embed_tokens(torch.tensor([ids]))
    for layer in model.model.layers:
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x


@torch.no_grad()
def test_forks_share_them():
    model, ids, diary = tiny_model("llama"), tokens(60), Diary()
    with attach(model):
        cache = BoundedCache(24, "streaming", chunk=8, prompt_length=60, stages=(diary,))
        prefill(model, ids[:40], cache)
        fork = cache.fork(60)
        before = len(diary.asked)
        prefill(model, ids, fork)
    assert len(diary.asked) > before
