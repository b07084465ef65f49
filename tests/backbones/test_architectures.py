"""A sample of architectures, one of each kind, through checks by turns; ``scripts/decoders.py`` runs all of both."""

import re
from copy import deepcopy

import pytest
import torch
from tiny_decoders.checks import BUDGET, CHUNK, PROMPT, TAIL, Subject, verdict
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows
from tiny_decoders.simulation import Plan, simulate

from locret_kit import attach, load_cache, save_cache
from locret_kit.backbones.libraries import ASKED_FOR_STATES, CACHE
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


@pytest.fixture
def lines_of(request):
    """Verdicts of a row's checks: of ``generate`` and every third other, by turns from row to row; with ``--all`` of all."""
    turns, full = [*RIGHT.values(), *REFUSED], request.config.getoption("--all")

    def run(name, every=full):
        checks = Subject(ROWS[name], Sizes()).checks()
        left = () if every else [check for n, check in enumerate(checks) if (n + turns.index(name)) % 3]
        return {check: verdict(call) for check, call in checks.items() if check not in left or check == "generate"}

    return run


@pytest.mark.parametrize("name", RIGHT.values(), ids=RIGHT)
def test_right(name, lines_of):
    lines = lines_of(name)
    assert lines == dict.fromkeys(lines, "exact")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, lines_of):
    lines = lines_of(name)
    plain = lines.pop("plain", "exact")
    assert {check: line for check, line in lines.items() if not is_refused(line, REFUSED[name])} == {}
    assert plain == "exact" or is_refused(plain, REFUSED[name])


@pytest.mark.parametrize("name", PARTLY)
def test_partly_refused(name, lines_of):
    (words, refused), lines = PARTLY[name], lines_of(name, every=True)
    right = {check: is_refused(line, words) if re.fullmatch(refused, check) else line == "exact"
             for check, line in lines.items()}  # fmt: skip
    wrong = {check: line for check, line in lines.items() if not right[check]}
    assert wrong == {}


def test_a_policy_that_scores_by_logits_has_those_of_every_token():
    """Layers that read others' keys compute the tokens alone whose logits are asked for, where they may."""
    Subject(ROWS["gemma4_text shared"], Sizes()).long("sirllm")


@pytest.mark.parametrize("name", ["llama", "lfm2"] if ASKED_FOR_STATES else ["llama"])
def test_a_text_that_begins_in_inference_mode_goes_on_outside_of_it(name, tmp_path):
    """The kit's own prefill, and copies and files that are read in inference mode, then ``model.generate``."""
    subject = Subject(ROWS[name], Sizes())
    caches = [subject.cache("knorm", "original") for _ in range(2)]
    with attach(subject.model), torch.no_grad():
        prefill(subject.model, subject.ids, caches[0])
        subject.model(input_ids=torch.tensor([subject.ids]), **{CACHE: caches[1]})
        save_cache(caches[1], tmp_path / "text.locret")
        with torch.inference_mode():
            loaded = load_cache(tmp_path / "text.locret", subject.model)
            caches += [deepcopy(caches[1]), caches[1].with_budget(BUDGET), loaded]
        last = [subject.model(torch.tensor([subject.more[:1]]), **{CACHE: one}).logits for one in caches]
    torch.testing.assert_close(last[1:], last[:1] * 4)


def is_refused(line, words):
    return re.match(rf"refused: .*({words})", line) is not None


# ---- the checks can fail -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama():
    return Subject(ROWS["llama"], Sizes())


@pytest.mark.parametrize("policy", ["streaming", "locret"])
def test_another_policy_shows(llama, policy, monkeypatch):
    """A cache that keeps other slots than those of the simulated policy."""
    other = llama.cache("tova", "original", backend="reference")
    monkeypatch.setattr(llama, "cache", lambda *args, **kwargs: other)
    assert re.match(r"wrong: attention layer 0 lacks \d+ of 104 slots", verdict(lambda: llama.simulated(policy)))


def test_the_simulation_of_a_long_budget_is_the_model(llama):
    ids = torch.tensor([llama.ids])
    logits, run = simulate(llama.wide, ids, Plan("full", PROMPT, CHUNK, TAIL, PROMPT))
    assert (logits - llama.wide(input_ids=ids).logits[0]).abs().max() < 1e-4
    assert [call.kept.sum().item() for call in run.rows] == [2 * PROMPT] * 4


def test_slots_worked_out_by_hand(llama):
    """StreamingLLM: the first four and the newest, at every boundary."""
    plan = Plan("streaming", budget=8, chunk=6, tail=2, prompt=20)
    assert list(plan.blocks(22)) == [(0, 6, 8), (6, 12, 8), (12, 18, 6), (18, 22, None)]
    _, run = simulate(llama.wide, torch.arange(2, 24)[None], plan)
    assert [row.nonzero()[:, 0].tolist() for row in run.rows[0].kept] == [[0, 1, 2, 3, 16, 17, 18, 19, 20, 21]] * 2


# ---- other architectures and sizes ---------------------------------------------------------------------------------

OTHER = Sizes(hidden=96, layers=6, heads=6, kv_heads=3, head_dim=24, vocab=300, window=16, chunk=48, experts=3)


def test_other_sizes_are_right():
    lines = {check: verdict(call) for check, call in Subject(ROWS["qwen3"], OTHER, seed=1).checks().items()}
    assert lines == dict.fromkeys(lines, "exact")


# ---- the script ----------------------------------------------------------------------------------------------------
