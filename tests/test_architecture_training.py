"""Heads of ten kinds of decoder: training lowers the loss, and what was trained is saved, loaded and runs within its budget."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders.checks import PROMPT, Subject
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.config.recipes import load_config
from locret_kit.runtime.session import prefill
from locret_kit.samples.sample import Sample
from locret_kit.training.module import HeadTraining

KINDS = {
    "plain": "llama", "experts": "qwen3_moe", "sinks": "gpt_oss", "soft cap": "gemma2", "latent": "deepseek_v3",
    "shared keys": "gemma4_text shared", "gated delta rule": "qwen3_next", "short convolutions": "lfm2",
    "Mamba 2": "falcon_h1", "layers without positions": "smollm3 no positions",
}  # fmt: skip
STEPS, BUDGET, TAIL = 30, 48, 8


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
            ((observer,),) = training.observe([sample], lambda loss: loss.backward())
            losses.append(float(torch.stack(observer.figures.regression).mean()))
            optimiser.step()
    finally:
        training._attachment.detach()
    assert losses[-1] < 0.8 * losses[0], losses
    training.heads.save_pretrained(tmp_path / "heads", torch.float32)
    heads = RetainingHeads.from_pretrained(tmp_path / "heads")
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), training.heads.parameters(), strict=True))
    cache = BoundedCache(BUDGET, "locret", heads, chunk=32, local_len=TAIL, prompt_length=PROMPT)
    with attach(subject.model):
        logits = prefill(subject.model, subject.ids, cache)
    windows = cache.context.spec.windows
    assert logits.isfinite().all()
    assert {rows for rows, window in zip(cache.kept_rows, windows, strict=True) if window is None} == {BUDGET}
