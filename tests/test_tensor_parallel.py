"""Tensor parallelism: two processes, each with half of the heads, against one with all of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from forked import ranks
from tiny_heads import save_tiny_heads
from tiny_tokenizer import TEXT, save_tiny_backbone
from transformers import AutoModelForCausalLM

from locret_kit import BoundedCache, attach
from locret_kit.backbones.load import load_backbone
from locret_kit.backbones.releases import CACHE
from locret_kit.heads import RetainingHeads
from locret_kit.runtime.batch import Request, run
from locret_kit.runtime.session import generate
from locret_kit.settings import RunSettings

SETTINGS = RunSettings(budget=40, chunk=16, local_len=5, stabilizers=4)
POLICIES = ("locret", "h2o", "ada-locret")
"""Retaining heads; attention scores; heads that share a layer's slots by retaining heads."""


def answers(model, tokenizer, folder: Path) -> dict[str, object]:
    """Tokens and kept positions of every policy, and of a batch whose texts differ in length."""
    heads = RetainingHeads.from_pretrained(str(folder / "heads"))
    ids, found = tokenizer(TEXT).input_ids, {}
    with attach(model):
        for policy in POLICIES:
            cache = BoundedCache(SETTINGS, policy, heads if "locret" in policy else None, prompt_length=len(ids))
            text, _ = generate(model, tokenizer, ids, cache, max_new_tokens=12)
            kept = [[[int(at) for at in head] for head in of_text] for of_text in cache.kept_positions(1)]
            found[policy] = text, kept
        requests = [Request(ids[:n], 6) for n in (70, 31)]

        def new_cache(request):
            return BoundedCache(SETTINGS, "locret", heads, prompt_length=len(request.ids))

        batch = {len(one.request.ids): one.tokens for one in run(model, tokenizer, requests, new_cache)}
        whole = BoundedCache(SETTINGS, "locret", heads)
        found["batch"] = [batch[70], batch[31]]
        found["generate"] = model.generate(
            torch.tensor([ids]), **{CACHE: whole}, max_new_tokens=8, do_sample=False
        )[0, len(ids) :].tolist()  # fmt: skip
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("parallel")
    sizes = dict(num_attention_heads=8, num_key_value_heads=4, hidden_size=64, initializer_range=0.3)
    save_tiny_heads(made, 16, backbone=save_tiny_backbone(made, **sizes))
    return made


def test_two_processes_give_the_tokens_of_one(folder):
    def work() -> int:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
        q = model.model.layers[0].self_attn.q_proj.weight
        assert q.shape[0] == 64 and q.to_local().shape[0] == 32  # the weights are divided
        _, tokenizer = load_backbone(str(folder), dtype="float32", device="cpu")
        found = answers(model.eval().requires_grad_(False), tokenizer, folder)
        (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
        torch.distributed.destroy_process_group()
        return 0

    log = folder / "log.txt"
    assert ranks(work, 2, log) == [0, 0], log.read_text()
    model, tokenizer = load_backbone(str(folder), dtype="float32", device="cpu")
    alone = json.loads(json.dumps(answers(model, tokenizer, folder)))
    for rank in range(2):
        assert json.loads((folder / f"rank{rank}.json").read_text()) == alone
    assert len({text for text, _ in map(alone.get, POLICIES)}) > 1  # policies differ, so the caches do evict


def test_heads_that_ranks_do_not_divide_are_refused(folder):
    model, _ = load_backbone(str(folder), dtype="float32", device="cpu")
    model._tp_size, model._device_mesh = 3, object()
    with pytest.raises(ValueError, match="num_attention_heads=8 must be a multiple of the 3 ranks"):
        attach(model)
    assert model.config._attn_implementation != "locret"
