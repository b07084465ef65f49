"""A sample of architectures, one of each kind, through every check; ``scripts/decoders.py`` runs all of them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from scripts_loaded import load_script
from tiny_decoders import checks
from tiny_decoders.checks import (
    BUDGET,
    CHUNK,
    NEW,
    PROMPT,
    STABILIZERS,
    TAIL,
    NotChecked,
    Subject,
    Wrong,
    same,
    verdict,
)
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows
from tiny_decoders.shrink import tiny_config
from tiny_decoders.simulation import Plan, simulate

from locret_kit import attach
from locret_kit.backbones.releases import ASKED_FOR_STATES, CACHE
from locret_kit.runtime.session import prefill

ROWS = rows(Sizes())
RIGHT = {
    "plain": "llama",
    "a residual multiplier": "granite multipliers",
    "a window below, full attention above": "qwen3 window",
    "windows of one layer in two, two frequencies": "gemma3_text",
    "parallel residual, part of the head": "stablelm parallel",
    "interleaved pairs": "glm4",
    "interleaved pairs, layers without positions": "cohere2",
    "layers without positions": "smollm3 no positions",
    "learned positions": "gpt2",
    "the other sense": "nanochat",
    "norms with weights after the rotation": "hunyuan_v1_dense",
    "attention that is a method": "gpt_neox_japanese",
    "attention of experts": "jetmoe",
    "experts": "qwen3_moe",
    "experts of other names": "granitemoe",
    "sinks": "gpt_oss",
    "a soft cap": "gemma2",
    "latent attention": "deepseek_v3",
    "latent attention, interleaved": "deepseek_v3 pairs",
    "shared keys": "gemma4_text shared",
    "heads of two widths": "gemma4_text",
    "keys that are values": "gemma4_text keys are values",
    "attention in chunks": "llama4_text chunks",
    "hybrid: gated delta rule": "qwen3_next",
    "hybrid: Mamba 2, without positions": "granitemoehybrid no positions",
    "hybrid: short convolutions": "lfm2",
    "hybrid: attention and states in one layer": "falcon_h1",
    "hybrid: layers of MLPs alone": "nemotron_h",
    "multimodal, text alone": "gemma3",
    "multimodal, three axes of positions": "qwen2_5_vl",
}
"""Kind -> row: everything is exact."""
REFUSED = {
    "bloom": "its attention is not behind transformers' interface",
    "gpt_neo": "is scaled or masked in a way of its own",
    "diffllama": "reads keys that are in no cache",
    "doge": "is given a mask of the model's own",
    "deepseek_v32": "is given 'indices', which the kit does not know",
    "inkling_text": "is given 'position_bias', which the kit does not know",
    "mamba": "no layer with keys and values|no attention call",
    "minimax": "does not run over transformers' own cache",
}
"""Row -> words of the sentence that everybody gets; attaching such a model is refused, or changes nothing."""
PARTLY = {
    "gptj": ("rotates queries and keys in a way that the kit does not know", r"heads \w+|training"),
    "bamba": ("lose their state between pieces of a text", "generate|save|fork"),
}
"""Row -> words of a sentence and the checks that get it; the others are exact."""
if not ASKED_FOR_STATES:
    hybrids = [RIGHT.pop(kind) for kind in [*RIGHT] if kind.startswith("hybrid")] + ["bamba"]
    REFUSED |= dict.fromkeys(hybrids, "layers that hold a state need transformers 5.21")
    del PARTLY["bamba"]
    # Their `generate` in chunks hands the first one the last one's positions.
    PARTLY[RIGHT.pop("multimodal, three axes of positions")] = ("position_ids=128 to 159 must be 0 to 31", "generate")


@pytest.mark.parametrize("name", RIGHT.values(), ids=RIGHT)
def test_right(name):
    lines = lines_of(name)
    assert lines == dict.fromkeys(lines, "exact")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    lines = lines_of(name)
    plain = lines.pop("plain")
    assert {check: line for check, line in lines.items() if not is_refused(line, REFUSED[name])} == {}
    assert plain == "exact" or is_refused(plain, REFUSED[name])


@pytest.mark.parametrize("name", PARTLY)
def test_partly_refused(name):
    (words, refused), lines = PARTLY[name], lines_of(name)
    wrong = {
        check: line
        for check, line in lines.items()
        if not (is_refused(line, words) if re.fullmatch(refused, check) else line == "exact")
    }
    assert wrong == {}


def test_a_policy_that_scores_by_logits_has_those_of_every_token():
    """Layers that read others' keys compute the tokens alone whose logits are asked for, where they may."""
    Subject(ROWS["gemma4_text shared"], Sizes()).long("sirllm")


@pytest.mark.parametrize("name", ["lfm2"] if ASKED_FOR_STATES else [])
def test_a_state_that_begins_in_inference_mode_goes_on_outside_of_it(name):
    """As buffers do: the kit's own prefill, then ``model.generate``."""
    subject = Subject(ROWS[name], Sizes())
    caches = [subject.cache("knorm", "original") for _ in range(2)]
    with attach(subject.model), torch.no_grad():
        prefill(subject.model, subject.ids, caches[0])
        subject.model(input_ids=torch.tensor([subject.ids]), **{CACHE: caches[1]})
        last = [subject.model(torch.tensor([subject.more[:1]]), **{CACHE: one}).logits for one in caches]
    torch.testing.assert_close(*last)


def lines_of(name):
    return {check: verdict(call) for check, call in Subject(ROWS[name], Sizes()).checks().items()}


def is_refused(line, words):
    return re.match(rf"refused: .*({words})", line) is not None


# ---- the checks can fail -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return Subject(ROWS["llama"], Sizes())


@pytest.mark.parametrize("policy", ["streaming", "h2o", "snapkv", "locret"])
def test_another_policy_shows(llama, policy, monkeypatch):
    """A cache that keeps other slots than those of the simulated policy."""
    other = llama.cache("tova", "original", backend="reference")
    monkeypatch.setattr(llama, "cache", lambda *args, **kwargs: other)
    assert re.match(r"wrong: attention layer 0 lacks \d+ of 112 slots", verdict(lambda: llama.simulated(policy)))


@pytest.mark.parametrize(
    "change", [{"budget": BUDGET - 1}, {"chunk": CHUNK // 2}, {"tail": TAIL - 4}, {"stabilizers": STABILIZERS + 20}]
)  # fmt: skip
def test_other_numbers_show(llama, change, monkeypatch):
    def otherwise(*given):
        return Plan(
            **(dict(zip(("policy", "budget", "chunk", "tail", "prompt", "stabilizers"), given, strict=True)) | change)
        )

    monkeypatch.setattr(checks, "Plan", otherwise)
    policy = "locret" if "stabilizers" in change else "h2o"
    assert verdict(lambda: llama.simulated(policy)).startswith("wrong: ")


def test_the_simulation_of_a_long_budget_is_the_model(llama):
    ids = torch.tensor([llama.ids])
    logits, run = simulate(llama.wide, ids, Plan("full", PROMPT, CHUNK, TAIL, PROMPT))
    assert (logits - llama.wide(input_ids=ids).logits[0]).abs().max() < 1e-4
    assert [call.kept.sum().item() for call in run.rows] == [2 * PROMPT] * 4


def test_slots_worked_out_by_hand():
    """StreamingLLM: the first four and the newest, at every boundary."""
    plan = Plan("streaming", budget=8, chunk=6, tail=2, prompt=20)
    assert list(plan.blocks(22)) == [(0, 6, 8), (6, 12, 8), (12, 18, 6), (18, 22, None)]
    model = Subject(ROWS["llama"], Sizes()).wide
    _, run = simulate(model, torch.arange(2, 24)[None], plan)
    assert [row.nonzero()[:, 0].tolist() for row in run.rows[0].kept] == [[0, 1, 2, 3, 16, 17, 18, 19, 20, 21]] * 2


def test_verdicts(monkeypatch):
    def crash():
        raise KeyError("rope")

    def refuse():
        Subject(ROWS["llama"], Sizes()).cache("nothing", "original")

    def never():
        while True:
            time.sleep(0.01)

    def off():
        same(torch.zeros(2), torch.tensor([1.0, -1.0]), "here")

    def not_applied():
        raise NotChecked("no such layer")

    monkeypatch.setattr(checks, "LIMIT", 1)
    assert verdict(lambda: None) == "exact"
    assert re.match(r"crash: KeyError: 'rope' \(\w+/test_architectures.py:\d+\)", verdict(crash))
    assert verdict(refuse).startswith("refused: policy='nothing'")
    assert re.match(r"no end: after 1 s at \w+/test_architectures.py:\d+", verdict(never))
    assert verdict(off) == "wrong: here: logits differ by 0.71 of their width"
    assert verdict(not_applied) == "not checked: no such layer"
    with pytest.raises(Wrong, match="not finite"):
        same(torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 2.0]), "here")


# ---- other architectures and sizes ---------------------------------------------------------------------------------

OTHER = Sizes(hidden=96, layers=6, heads=6, kv_heads=3, head_dim=24, vocab=300, window=16, chunk=48, experts=3)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3_text", "mixtral", "deepseek_v3", "qwen3_next", "llama4_text", "mistral3"]
)
def test_other_sizes_are_met(name):
    config = tiny_config(name, OTHER).get_text_config(decoder=True)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.vocab_size) == (
        96,
        6,
        6,
        300,
    )
    assert config.num_key_value_heads == (6 if name == "deepseek_v3" else 3)


def test_other_sizes_are_right():
    lines = {check: verdict(call) for check, call in Subject(ROWS["qwen3"], OTHER, seed=1).checks().items()}
    assert lines == dict.fromkeys(lines, "exact")


def test_a_text_needs_tokens_that_differ():
    with pytest.raises(ValueError, match=f"vocab=100 must be at least {PROMPT + NEW + 2}"):
        Subject(ROWS["llama"], Sizes(vocab=100))


# ---- the script ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/decoders.py")


class Fake:
    """Stands in for a model: its row says what its one check does."""

    def __init__(self, row, sizes, seed):
        self.row, self.model = row, SimpleNamespace()
        if row[0] == "unbuilt":
            raise ValueError("hidden_size=0 must be\nat least 1")

    def checks(self):
        def right():
            if self.row[0] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            while self.row[0] == "hangs":
                time.sleep(0.01)

        return {"plain": lambda: None, "long": right}


def test_processes(script, monkeypatch):
    """What ends with a signal, never ends or cannot be built is said so, and the others go on."""
    monkeypatch.setattr(script, "Subject", Fake)
    monkeypatch.setattr(script, "verdict", lambda call: call() or "exact")
    chosen = {name: (name, {}) for name in ("dies", "hangs", "works", "unbuilt")}
    found = {record["name"]: record for record in script.verdicts(chosen, Sizes(), 0, jobs=2, limit=2)}
    assert found["works"]["verdicts"] == {"plain": "exact", "long": "exact"}
    assert found["dies"]["verdicts"] == {"plain": "exact", "long": "crash: the process ended with -9"}
    assert found["hangs"]["verdicts"] == {"plain": "exact", "long": "no end: after 2 s"}
    assert found["unbuilt"]["not built"] == "ValueError: at least 1"
    assert json.loads(json.dumps(list(found.values())))


def test_the_page(script):
    """Yes, no with its sentence, and what is neither."""
    right = {check: "exact" for checks in script.GROUPS.values() for check in checks}
    heads = {
        check: "refused: model_type='b' rotates | otherwise"
        for check in ("heads compact", "heads original", "heads kept")
    }

    def record(name, lines):
        return {"name": name, "model_type": name, "class": name.upper(), "decoder": True, "verdicts": lines}

    records = [
        record("b", right | heads), record("a", right), record("c", right | {"h2o": "wrong: by 2"}),
        {"name": "d", "model_type": "d", "decoder": True, "verdicts": {}, "not built": "ImportError: timm"},
    ]  # fmt: skip
    text = script.page(records, "5.0")
    assert "Of 3 decoders of text: policies 2, generate 3, heads, compact 2" in text
    assert "| `a` | `A` | yes | yes | yes | yes | yes | yes | yes | yes |" in text
    assert "| `b` | `B` | yes | yes | no | no | yes | yes | yes | yes |" in text
    assert "| `c` | `C` | **not right** | yes | yes | yes | yes | yes | yes | yes |" in text
    assert "| model_type=... rotates \\| otherwise | `b` (heads, compact; heads, original) |" in text
    assert "| wrong: by 2 | `c` (policies) |" in text and "- `d`: ImportError: timm" in text


def test_the_command_prints_a_row(script, capsys, monkeypatch):
    monkeypatch.setattr(script, "Subject", Fake)
    monkeypatch.setattr(script, "verdict", lambda call: call() or "exact")
    assert script.main(["llama", "--rows", "-"]) == 1, "checks of the page that were not reached are not right"
    assert json.loads(capsys.readouterr().out)["verdicts"] == {"plain": "exact", "long": "exact"}
