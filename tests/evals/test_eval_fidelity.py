"""Likelihood under eviction, and the lm-evaluation-harness adapter, against the plain model."""

import math
import sys
from array import array
from dataclasses import replace
from types import SimpleNamespace

import forked
import pytest
import torch
from accelerate.state import AcceleratorState
from real_templates import real_tokenizer
from tiny_models import tiny_model
from tiny_tokenizer import save_tiny_backbone, tiny_tokenizer

from locret_kit.backbones.load import load_config
from locret_kit.backbones.spec import spec_of
from locret_kit.cache.bounded import BoundedCache
from locret_kit.cli.eval import main
from locret_kit.documents.kept import Kept
from locret_kit.evals.engine import Setup, Variant, bm25
from locret_kit.evals.engine.harness import LocretLM, sampling_of
from locret_kit.evals.engine.measure import Forced, continuation_ids, nll_reading
from locret_kit.evals.tasks import find_tasks
from locret_kit.evals.tasks.task import Example
from locret_kit.heads import HeadsConfig, RetainingHeads
from locret_kit.runtime import sequence
from locret_kit.runtime.session import Sampling
from locret_kit.settings import RunSettings
from locret_kit.text.tokens import stream_ids

IDS = torch.randint(5, 97, (150,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def setup(model):
    return Setup(model, tiny_tokenizer(), "tiny", lambda variant, tokens: RunSettings().resolved({}, tokens))


def forced_scores(setup, ids, bounded, continuation) -> dict[str, float]:
    forced = Forced(continuation)
    assert forced.answer(setup, ids, bounded).report.new_tokens == len(continuation)
    return forced.scores()


def reference(model, ids: list[int]) -> list[float]:
    """NLL of every token but the first, from one plain forward, in float64."""
    logits = model(torch.tensor([ids])).logits[0].double()
    return [float(-torch.log_softmax(logits[i], -1)[ids[i + 1]]) for i in range(len(ids) - 1)]


def cache(policy: str, length: int, budget: int = 48, **more) -> BoundedCache:
    return BoundedCache(budget, policy, chunk=16, prompt_length=length, **more)


def test_full_attention_s_likelihood_is_the_model_s(model, setup):
    plain = reference(model, IDS)
    nll = forced_scores(setup, IDS[:120], cache("full", 120), IDS[120:])["nll"]
    assert math.isclose(nll, sum(plain[119:]) / 30, rel_tol=1e-4)
    for skip in (1, 60, 75, 149):
        nll, _ = nll_reading(setup, cache("full", len(IDS)), IDS, skip)
        assert math.isclose(nll, sum(plain[skip - 1 :]) / (len(IDS) - skip), rel_tol=1e-4)


def test_agreement_counts_the_tokens_that_would_have_been_chosen(model, setup):
    """Every other token of the continuation is the model's own choice behind what was given, each of the rest is not."""
    ids = IDS[:60]
    for i in range(12):
        choice = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        ids = [*ids, choice if i % 3 else (choice + 1) % model.config.vocab_size]
    scores = forced_scores(setup, ids[:60], cache("full", 60), ids[60:])
    assert scores["agreement"] == 8 / 12
    assert math.isclose(scores["nll"], sum(reference(model, ids)[59:]) / 12, rel_tol=1e-4)


@pytest.mark.parametrize("family", ["smollm2", "mistral"])
def test_a_continuation_has_the_tokens_of_the_whole_text(family):
    """A vocabulary of SentencePiece puts a blank before a text: a continuation by itself would begin with another word."""
    tokenizer = real_tokenizer(family)
    (task,) = find_tasks(["perplexity"])
    for sample in range(4):
        made = Example(task, tokenizer, 300, sample).made()
        whole = stream_ids(tokenizer, [made.prompt + made.continuation], special=made.special)
        assert made.error is None and [*made.ids, *continuation_ids(made)] == [*whole]
        short = replace(
            made, ids=array("i", bm25.shortened(tokenizer, made, 100))
        )  # of passages, whose text follows it too
        assert continuation_ids(short) == continuation_ids(made)


@pytest.mark.parametrize("pieces", [256, 7])
def test_a_token_sees_what_was_kept_and_no_more(model, setup, monkeypatch, pieces):
    """Streaming with original positions: every block against a forward whose mask allows what the cache held."""
    monkeypatch.setattr(sequence, "BLOCK", pieces)
    budget, chunk, ids = 32, 16, IDS[:96]
    bounded = cache("streaming(sinks=4)", len(ids), budget, positions="original", stabilizers=0, local_len=0)
    nll, _ = nll_reading(setup, bounded, ids, 48)
    mask = torch.full((1, 1, len(ids), len(ids)), float("-inf"))
    held: list[int] = []
    for start in range(0, len(ids), chunk):
        block = list(range(start, start + chunk))
        for query in block:
            seen = held + [key for key in block if key <= query]
            mask[0, 0, query, seen] = 0
        held = held + block
        if len(held) > budget:
            held = held[:4] + held[-(budget - 4) :]
    logits = model(torch.tensor([ids]), attention_mask=mask).logits[0].double()
    wanted = [float(-torch.log_softmax(logits[i], -1)[ids[i + 1]]) for i in range(47, len(ids) - 1)]
    assert math.isclose(nll, sum(wanted) / len(wanted), rel_tol=1e-3)


def test_kept_counts_what_each_head_holds(setup):
    bounded = cache("h2o", len(IDS))
    nll_reading(setup, bounded, IDS, 1)
    kept = Kept.of(IDS, bounded)
    for layer in range(3):
        wanted = [0] * len(IDS)
        for positions in bounded.kept_positions(layer)[0]:
            for position in positions.tolist():
                wanted[position] += 1
        heads, n_heads = kept.heads(layer)
        assert heads.tolist() == wanted and sum(wanted) == 2 * 48 and n_heads == 2


# ---- the harness ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm():
    model = tiny_model("llama")
    torch.manual_seed(0)
    model.resize_token_embeddings(400)
    model.generation_config.eos_token_id = None

    def settings_for(variant, tokens):
        return RunSettings(budget=variant.budget or 64, chunk=32).resolved({}, tokens)

    def build(policy: str, budget: int) -> LocretLM:
        return LocretLM(Setup(model, tiny_tokenizer(), "tiny", settings_for), Variant(policy, "-", budget))

    return build


def request(*args) -> SimpleNamespace:
    return SimpleNamespace(args=args)


PAIRS = [
    ("The harbour was quiet when the boats came in.", " The pass key"),
    ("The harbour was quiet when the boats came in.", " The"),
    ("The harbour was quiet when the boats came in.", " What is it?"),
    ("Remember it. ", "What is"),
]


def test_loglikelihoods_are_the_model_s_under_full_attention(lm):
    one = lm("full", 0)
    found = one.loglikelihood([request(*pair) for pair in PAIRS], disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(PAIRS, found, strict=True):
        before, behind = one._encode_pair(context, continuation)
        logits = one.model(torch.tensor([before + behind])).logits[0].double()
        rows = [logits[len(before) - 1 + i] for i in range(len(behind))]
        wanted = sum(float(torch.log_softmax(row, -1)[token]) for row, token in zip(rows, behind, strict=True))
        assert math.isclose(total, wanted, rel_tol=1e-4)
        assert greedy == all(int(row.argmax()) == token for row, token in zip(rows, behind, strict=True))


def test_shared_prefills_change_nothing(lm):
    one = lm("streaming", 40)
    long = [(context * 8, continuation) for context, continuation in PAIRS]
    together = one.loglikelihood([request(*pair) for pair in long], disable_tqdm=True)
    apart = [one.loglikelihood([request(*pair)], disable_tqdm=True)[0] for pair in long]
    full = lm("full", 0).loglikelihood([request(*pair) for pair in long], disable_tqdm=True)
    assert [total for total, _ in together] == pytest.approx([total for total, _ in apart])
    assert [greedy for _, greedy in together] == [greedy for _, greedy in apart]
    assert [total for total, _ in together] != pytest.approx([total for total, _ in full])


def test_rolling_is_the_sum_over_the_text(lm):
    one = lm("full", 0)
    text = PAIRS[0][0] * 3
    (total,) = one.loglikelihood_rolling([request(text)], disable_tqdm=True)
    ids = [one.prefix_token_id, *one.tok_encode(text, add_special_tokens=False)]
    assert math.isclose(total, -sum(reference(one.model, ids)), rel_tol=1e-4)


def test_generation_is_transformers_own(lm):
    one = lm("full", 0)
    context = PAIRS[0][0]
    (whole,) = one.generate_until([request(context, {"until": [], "max_gen_toks": 12})])
    assert len(whole) > 4
    ids = torch.tensor([one.tok_encode(context)])
    given = dict(attention_mask=torch.ones_like(ids), do_sample=False, eos_token_id=None)
    plain = one.model.generate(ids, max_new_tokens=12, **given)
    assert one.tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True).startswith(whole[:8])


def test_marks_cut_as_a_search_of_the_whole_text_does(lm):
    """Marks that span tokens and characters; what was written before the mark is the same text."""
    one, context = lm("full", 0), PAIRS[0][0]
    (whole,) = one.generate_until([request(context, {"until": [], "max_gen_toks": 24})], disable_tqdm=True)
    for start, length, other in ((0, 1, ""), (5, 6, whole[-3:]), (11, 3, "zzzz"), (len(whole) - 2, 2, whole[9:12])):
        marks = [whole[start : start + length], other]
        (cut,) = one.generate_until([request(context, {"until": marks, "max_gen_toks": 24})], disable_tqdm=True)
        assert cut == whole[: min(whole.index(mark) for mark in marks if mark and mark in whole)]


def test_sampling_takes_what_it_is_given(lm):
    assert sampling_of({"do_sample": False, "temperature": 0.0, "until": [], "num_beams": 1}) == Sampling()
    given = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": None}
    assert sampling_of(given) == Sampling(0.7, 5, 0.9)
    for more, said in (
        ({"do_sample": True}, "do_sample=true needs temperature above 0"),
        ({"temperature": 0.5, "top_pp": 0.5}, "generation_kwargs: unknown setting 'top_pp'. Did you mean 'top_p'"),
        ({"temperature": 0.5, "top_p": 0.0}, "top_p=0.0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=said):
            lm("full", 0).generate_until([request(PAIRS[0][0], {"until": [], "max_gen_toks": 2, **more})])


def test_samples_of_one_prompt_differ_and_come_again(lm):
    one = lm("full", 0)
    hot = {"until": [], "max_gen_toks": 12, "temperature": 1.0}
    requests = [request(PAIRS[0][0], hot)] * 3
    first, again = (one.generate_until(requests, disable_tqdm=True) for _ in range(2))
    assert first == again and len({*first}) == 3
    likeliest = {**hot, "temperature": 5.0, "top_k": 1}
    greedy, kept = ({**hot, "temperature": 0.0}, likeliest)
    assert one.generate_until([request(PAIRS[0][0], greedy)]) == one.generate_until([request(PAIRS[0][0], kept)])


def test_processes_share_the_requests(lm, tmp_path):
    """As the harness's evaluator asks for it: each process its requests, the answers gathered in the first."""

    def work() -> int:
        AcceleratorState._reset_state(reset_partial_state=True)  # of other tests, before the fork
        one = lm("full", 0)
        counts = one.all_gather(torch.tensor(3 + one.rank, device=one.device)).tolist()
        mine = [request(*pair) for pair in PAIRS[one.rank :: one.world_size]]
        found = one.gather_object(one.loglikelihood(mine, disable_tqdm=True))
        one.barrier()
        alone = lm("full", 0).loglikelihood([request(*pair) for pair in PAIRS], disable_tqdm=True)
        wanted = [alone[0::2], alone[1::2]] if one.rank == 0 else None
        return 0 if (one.world_size, counts, found) == (2, [3, 4], wanted) else 1

    assert forked.ranks(work, 2, tmp_path / "log") == [0, 0], (tmp_path / "log").read_text()


def test_the_command_line_is_the_harness_s_with_one_model_more(monkeypatch):
    """When it starts, its words are those that were given and the model is known."""
    from lm_eval.api.registry import get_model

    found = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: found.append((sys.argv, get_model("locret"))))
    monkeypatch.setattr(sys, "argv", [])
    words = ["--model", "locret", "--model_args", "model=x,budget=32", "--tasks", "own"]
    assert main(["lm_eval", *words]) == 0
    from locret_kit.lm_eval import Locret

    assert found == [(["lm_eval", *words], Locret)]


def test_the_class_that_a_registry_names(tmp_path):
    """As the harness makes it: of the strings of ``--model_args``, and what it adds of its own."""
    from lm_eval.utils import simple_parse_args_string

    from locret_kit.lm_eval import Locret

    given = simple_parse_args_string("policy=streaming(sinks=8),budget=32,chunk=16,one_shot=true,adapter=none")
    folder = save_tiny_backbone(tmp_path)
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(load_config(str(folder))), str(folder), 8, adapter="lora"))
    heads.save_pretrained(tmp_path / "heads")
    one = Locret(ckpt=str(tmp_path / "heads"), batch_size=1, **given)
    assert (one.variant.policy, one.variant.budget) == ("streaming(sinks=8)", 32)
    assert one.setup.settings_for(one.variant, 90).one_shot and one.setup.adapter is None
    with pytest.raises(ValueError, match="budgt"):
        Locret(model=str(tmp_path), budgt=32)
