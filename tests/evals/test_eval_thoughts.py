"""Thoughts in evaluations: they have a bound of their own, and no score counts them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from families import chatml
from real_templates import real_tokenizer
from tiny_heads import save_tiny_heads
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit.backbones import load
from locret_kit.cli import eval_setup
from locret_kit.cli.eval import main
from locret_kit.evals.engine import Setup, Variant, read_rows
from locret_kit.evals.engine.harness import LocretLM
from locret_kit.samples import encode_chat
from locret_kit.settings import RunSettings
from locret_kit.text.template import set_defaults

OPENED = chatml("{{- m.content }}<!-- <think></think> enable_thinking -->", "<think>\n")
BOUND = 5


def test_rows_score_the_answer_alone(tmp_path: Path, monkeypatch):
    def load_thinking(*given, **more):
        model, tokenizer = load.load_backbone(*given, **more)
        tokenizer.chat_template = OPENED
        return model, tokenizer

    monkeypatch.setattr(eval_setup, "load_backbone", load_thinking)
    heads = save_tiny_heads(tmp_path / "heads")
    given = [
        "tasks=[passkey]", "policies=[full,locret]", "budgets=[64]", "lengths=[240]", "samples=2", f"ckpt={heads}",
        f"out={tmp_path / 'out'}", "max_new_tokens=6", "chat=always", "ending=open",
    ]  # fmt: skip
    assert main([*given, f"max_thought_tokens={BOUND}"]) == 0
    end = len(tiny_tokenizer()("</think>", add_special_tokens=False).input_ids)
    for row in read_rows(tmp_path / "out"):
        assert row.error is None and row.thought and "</think>" not in row.output + row.thought
        assert row.new_tokens <= BOUND + end + 6 and row.new_tokens > BOUND + end
    assert main([*given, "max_thought_tokens=9"]) != 0, "rows of a folder have one bound"


def test_the_harness_looks_for_its_marks_in_the_answer_alone(monkeypatch):
    tokenizer = real_tokenizer("qwen3")
    monkeypatch.setattr(tokenizer, "chat_template", OPENED)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = None
    setup = Setup(
        model, tokenizer, "tiny", lambda variant, tokens: RunSettings(budget=64, chunk=32).resolved({}, tokens),
        max_thought_tokens=BOUND,
    )  # fmt: skip
    one = LocretLM(setup, Variant("h2o", "-", 64))
    prompt = one.apply_chat_template([{"role": "user", "content": "How deep is the harbour?"}])
    asked = [SimpleNamespace(args=(prompt, {"until": [], "max_gen_toks": 9, "do_sample": False}))]
    (whole,) = one.generate_until(asked, disable_tqdm=True)
    assert whole and "think" not in whole
    first = tokenizer.decode(one.tok_encode(whole)[:1])
    with torch.no_grad():
        thought = tokenizer.decode(setup.model(torch.tensor([one.tok_encode(prompt)])).logits[0, -1].argmax().item())
    for mark, cut in ((first, ""), (thought, whole[: whole.find(thought)] if thought in whole else whole)):
        asked[0].args[1]["until"] = [mark]
        assert one.generate_until(asked, disable_tqdm=True) == [cut], "a mark in the thought ends nothing"


def test_samples_of_training_are_rendered_with_thoughts_or_without():
    tokenizer = tiny_tokenizer()
    shown = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokenizer.chat_template = "{% if enable_thinking is false %}/no_think {% endif %}" + shown
    messages = [{"role": "user", "content": "How deep?"}, {"role": "assistant", "content": "7 m"}]
    for think, begin in ((None, "["), (True, "["), (False, "/no_think [")):
        set_defaults(tokenizer, think=think)
        assert tokenizer.decode(encode_chat(tokenizer, messages).ids).startswith(begin)
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match="think=False: the model's chat template has no enable_thinking or thinking"):
        set_defaults(tokenizer, think=False)
