"""Heads of four kinds of decoder: training lowers the loss; what was trained is saved, loaded, runs within its budget and serves.
What a step learns, and that caches of every kind are saved, batched and planned, ``test_architectures.py`` holds."""

from array import array

import pytest
import torch
from scripts_loaded import load_script
from served import ask_together
from tiny_decoders.checks import PROMPT, Subject
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows
from tiny_tokenizer import tiny_tokenizer

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.config.recipes import load_config
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import prefill
from locret_kit.samples import Sample
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.settings import RunSettings
from locret_kit.training.module import HeadTraining

decode = load_script("scripts/decoding.py").decode

KINDS = {
    "experts": "qwen3_moe", "latent": "deepseek_v3", "shared keys": "gemma4_text shared", "gated delta rule": "qwen3_next",
}  # fmt: skip
STEPS, BUDGET, NEW = 20, 48, 6
SETTINGS = RunSettings(budget=BUDGET, chunk=32, stabilizers=4, local_len=8)


@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_heads_learn_and_run(name, tmp_path):
    subject = Subject(rows(Sizes())[name], Sizes())
    training = HeadTraining(subject.model, load_config(["recipe=tiny", "backbone.model=tiny"]))
    training._attachment = attach(subject.model)
    optimiser = torch.optim.AdamW(training.heads.parameters(), lr=3e-3)
    sample, losses = Sample(tuple(subject.ids), ((PROMPT - 20, PROMPT),)), []
    try:
        for _ in range(STEPS):
            optimiser.zero_grad()
            (figures,) = training.observe([sample], lambda loss: loss.backward())
            losses.append(float(figures[0].mean()))
            optimiser.step()
    finally:
        training._attachment.detach()
    assert losses[-1] < 0.8 * losses[0], losses
    training.heads.save_pretrained(tmp_path / "heads", torch.float32)
    heads = RetainingHeads.from_pretrained(tmp_path / "heads")
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), training.heads.parameters(), strict=True))
    prompts = [subject.ids, subject.ids[::-1][:120]]
    alone = [answer(subject.model, heads, ids) for ids in prompts]
    engine = EngineThread(subject.model, tiny_tokenizer(), SETTINGS, parse_policy("locret"), heads, sessions=2)
    try:
        together = ask_together(engine, *(array("i", ids) for ids in prompts), tokens=NEW)
        assert [one.sequence.tokens for one in together] == alone
        (later,) = ask_together(engine, array("i", [*prompts[0], *alone[0], *subject.more]), tokens=NEW)
        assert later.cached_tokens >= PROMPT
    finally:
        engine.stop()


def answer(model, heads, ids):
    """Tokens after a prompt, as an engine writes them, of one that is read and answered alone within the budget."""
    end = tiny_tokenizer().eos_token_id
    cache = BoundedCache(SETTINGS, "locret", heads, prompt_length=len(ids))
    with attach(model), torch.inference_mode():
        logits = prefill(model, ids, cache)
        windows = cache.context.spec.windows
        assert {rows for rows, window in zip(cache.kept_rows, windows, strict=True) if window is None} == {BUDGET}
        return list(decode(model, cache, logits, prompt=ids, max_new_tokens=NEW, stop=frozenset({end})))
