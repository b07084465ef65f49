"""Texts of different lengths at once. The oracle is each text alone."""

from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from pairwise import one_of, pairs
from policy_runs import POLICIES, answer, backbone, by_kind, distinct_tokens, held, make, tokens
from tiny_decoders.needed import Sizes
from tiny_decoders.shrink import tiny_decoder
from tiny_models import tiny_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from locret_kernels import cpp, quantise
from locret_kit import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.cache.batch import BatchCache
from locret_kit.runtime.engine import Engine, Request, run
from locret_kit.runtime.sampling import Chooser
from locret_kit.runtime.session import Answer, Sampling

LENGTHS = (83, 20, 61, 7)
REREADING = "rereading-locret(tokens=12,window=4,kernel=3,first=2,smooth=3,each=true,least=0.8)"
NEW = 6
SILENT = SimpleNamespace(eos_token_id=None)
"""A tokenizer without an end of sequence."""


def alone(policy, ids, family="llama", sampling=None, seed=0, **settings):
    cache = make(policy, length=len(ids), family=family, **settings)
    return answer(cache, ids, NEW, backbone(family), sampling=sampling, seed=seed), held(cache)


def caches_of(policy, **settings):
    """A maker of each request's cache."""
    return lambda request: make(policy, length=len(request.ids), **settings)


class Kept:
    """Caches as they are when a text ends."""

    def __init__(self, policy, ids, **settings):
        self.made = partial(make, policy, length=len(ids), **settings)

    def __call__(self):
        self.cache = self.made()
        return self.cache


@pytest.mark.parametrize("policy", by_kind([*POLICIES, REREADING, "score=cis(0.05)"]))
def test_each_text_is_as_alone(policy):
    """With one family by lot; documents (test_documents.py) have the other."""
    family = one_of(["llama", "gemma3"], policy)
    texts = [distinct_tokens(length, seed=number) for number, length in enumerate(LENGTHS[:3])]
    caches = [Kept(policy, ids, family=family) for ids in texts]
    batch = Engine(backbone(family), frozenset(), piece=40)
    made = []
    while len(made) < len(texts) or batch.running:
        for ids, cache in [*zip(texts, caches, strict=True)][len(made) : len(made) + 2 - len(batch.running)]:
            made.append(batch.add(Request(ids, NEW), cache))
        batch.step()
    for ids, text, cache in zip(texts, made, caches, strict=True):
        assert text.error is None
        expected, positions = alone(policy, ids, family)
        assert text.tokens == expected and held(cache.cache) == positions


@pytest.mark.parametrize("policy", ["locret", "h2o", "sirllm"])
def test_few_bits_and_sampling_are_each_texts_own(policy):
    texts = [tokens(length, seed=number) for number, length in enumerate(LENGTHS)]
    sampling = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1)
    requests = [Request(ids, NEW, sampling, seed=number) for number, ids in enumerate(texts)]

    ended = run(backbone(), SILENT, requests, caches_of(policy, kv_bits=4), max_running=3, piece=40)
    found = {id(text.request): text.tokens for text in ended}
    for number, (ids, request) in enumerate(zip(texts, requests, strict=True)):
        assert found[id(request)] == alone(policy, ids, sampling=sampling, seed=number, kv_bits=4)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_calls_that_do_not_compile_in_time_end_no_answer(dtype, monkeypatch):
    """What others compile is there. In float32 rounding may choose other tokens."""
    texts = [tokens(length, seed=number) for number, length in enumerate(LENGTHS)]
    load, refused = cpp.load, []

    def late(source, *options):
        if source == quantise.SOURCE:
            refused.append(source)
            raise cpp.Unavailable("the compiler took too long")
        return load(source, *options)

    monkeypatch.setattr(cpp, "load", late)
    cpp.runs.cache_clear()
    try:
        requests = [Request(ids, NEW) for ids in texts]
        ended = run(deepcopy(backbone()).to(dtype), SILENT, requests, caches_of("h2o", kv_bits=4), piece=40)
        found = {id(text.request): text.tokens for text in ended}
    finally:
        cpp.runs.cache_clear()
    monkeypatch.undo()
    assert refused == [quantise.SOURCE]  # asked once
    for ids, request in zip(texts, requests, strict=True):
        assert len(found[id(request)]) == NEW
        assert dtype == torch.float32 or found[id(request)] == alone("h2o", ids, kv_bits=4)[0]


def test_texts_come_go_and_fail_alone():
    batch = Engine(backbone(), frozenset(), piece=30)
    first = batch.add(Request(tokens(60), 30), Kept("h2o", tokens(60)))
    broken = batch.add(Request(tokens(60, seed=1), 30), partial(make, "h2o", length=60, budget=3))
    for _ in range(12):
        batch.step()
    late = batch.add(Request(tokens(40, seed=2), NEW), Kept("h2o", tokens(40)))
    assert broken.finish_reason == "error" and "budget" in str(broken.error)
    with pytest.raises(ValueError, match="budget"):
        len(broken.tokens)  # an error is no short answer
    batch.cancel(first)
    assert first.finish_reason == "cancelled" and first.cache is None and first.tokens
    while batch.running:
        batch.step()
    assert late.tokens == alone("h2o", tokens(40, seed=2))[0] and late.finish_reason == "length"
    with pytest.raises(ValueError, match="the prompt holds no tokens"):
        batch.add(Request([]), Kept("h2o", [1]))


def test_a_forward_that_fails_ends_its_texts_and_no_others():
    batch = Engine(backbone(), frozenset(), piece=10)  # below a chunk: one prompt in a forward
    first = batch.add(Request(tokens(60), 30), Kept("h2o", tokens(60)))
    late = batch.add(Request(tokens(40, seed=2), NEW), Kept("h2o", tokens(40)))

    with mock.patch("locret_kit.cache.step.read_block", side_effect=RuntimeError("no")):
        assert batch.step() == [first]
    while batch.running:
        batch.step()
    assert first.finish_reason == "error" and len(first.written) == 0
    assert late.tokens == alone("h2o", tokens(40, seed=2))[0]


def padded(texts, side: str = "left"):
    """Ids of a batch and their mask."""
    longest = max(map(len, texts))
    ids, mask = (torch.zeros(len(texts), longest, dtype=torch.long) for _ in range(2))
    for row, text in enumerate(texts):
        place = slice(longest - len(text), None) if side == "left" else slice(0, len(text))
        ids[row, place], mask[row, place] = torch.tensor(text), 1
    return ids, mask


@pytest.mark.parametrize(
    ("policy", "side", "family"), pairs(["locret", "ada-locret", "h2o", "full"], ["left", "right"], ["llama", "gemma3"])
)
def test_generate_takes_a_padded_batch(policy, side, family):
    model, texts = backbone(family), [tokens(length, seed=number) for number, length in enumerate(LENGTHS)]
    ids, mask = padded(texts, side)
    like = make(policy, length=None, family=family)
    cache = BatchCache(like.options.settings, policy, like.heads)
    with attach(model):
        out = model.generate(
            ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    for row, text in enumerate(texts):
        expected, positions = alone(policy, text, family)
        # generate feeds all new tokens but the last, as decode does
        assert out[row, max(LENGTHS) :].tolist() == expected and held(cache.texts[row]) == positions
    assert model.config._attn_implementation != "locret"


def test_generate_samples_several_answers_and_searches_with_beams():
    model, (ids, mask) = backbone(), padded([tokens(40, seed=1), tokens(25, seed=2)])
    for form in (dict(num_beams=3), dict(do_sample=True, num_return_sequences=2)):
        whole = []
        for past in (BatchCache(4096, "h2o"), None):
            torch.manual_seed(0)
            given = {} if past is None else {CACHE: past}
            with attach(model):
                out = model.generate(
                    ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0, **given, **form
                )
            whole.append(out.tolist())
        assert whole[0] == whole[1]  # nothing is evicted: transformers' own


def test_a_cache_of_a_batch_takes_other_texts_after_a_reset():
    """And rows that are repeated or picked; what it cannot do it refuses, and answers nothing wrong."""
    model, ids = backbone(), torch.tensor([tokens(40, seed=1), tokens(40, seed=2)])
    cache = BatchCache(24, "h2o", chunk=13, local_len=5)

    def generated(ids, **form):
        form |= {CACHE: cache, "max_new_tokens": 4, "eos_token_id": None, "do_sample": False}
        return model.generate(ids, **form).tolist()

    with attach(model), torch.no_grad():
        first = generated(ids)
        for again in (ids, torch.cat((ids, ids), 1)[:, :42]):
            with pytest.raises(ValueError, match=r"position_ids=.* others need reset\(\) or a new cache"):
                generated(again)
        with pytest.raises(ValueError, match=r"attention_mask=\[2, 9\] must be \[2, 44\]: the 43 columns"):
            model(ids[:, :1], **{CACHE: cache}, attention_mask=torch.ones(2, 9))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([False, True, True, False]))
        assert [text.get_seq_length() for text in cache.texts] == [43, 43]
        want = [model(torch.tensor([[7], [7]]), **{CACHE: one}).logits for one in (deepcopy(cache), cache)]
        assert torch.equal(*want) and not torch.equal(*want[0])
        # A prompt in pieces would be evicted as an answer; a row of the first piece may hold padding alone.
        for mask, said in (
            (torch.ones(2, 40), "13 columns after 13"),
            (torch.arange(40) > torch.tensor([[-1], [14]]), "row 1"),
        ):
            cache.reset()
            with pytest.raises(ValueError, match=f"{said}.*one forward, without prefill_chunk_size"):
                generated(ids, attention_mask=mask.long(), prefill_chunk_size=13)
        cache.reset()
        assert generated(ids) == first
        cache.reset()
        with pytest.raises(ValueError, match="cannot be cropped, as assisted generation and prompt lookup do"):
            generated(torch.cat((ids[:1], ids[:1]), 1), prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_later_turn_may_be_padded_on_either_side(side):
    model, texts, turns = backbone(), [tokens(40, seed=1), tokens(40, seed=2)], [[11, 12, 13, 14], [21, 22]]
    cache, (new, mask) = BatchCache(24, "h2o", chunk=13, local_len=5), padded(turns, side)
    with attach(model), torch.no_grad():
        model(torch.tensor(texts), **{CACHE: cache})
        model(torch.tensor([[5], [6]]), **{CACHE: cache})
        made = model(new, **{CACHE: cache}, attention_mask=torch.cat((torch.ones(2, 41), mask), 1)).logits[:, -1]
        for row, (text, turn) in enumerate(zip(texts, turns, strict=True)):
            own = make("h2o", length=40, stabilizers=cache.texts[row].settings.stabilizers)
            for ids in (text, [5 + row], turn):
                alone = model(torch.tensor([ids]), **{CACHE: own}).logits[0, -1]
            assert (made[row] - alone).abs().max() < 1e-9 and held(cache.texts[row]) == held(own)


def test_a_batch_that_was_refused_begins_anew():
    """A forward that was refused, or ended before its first layer, has changed nothing."""
    model, ids = backbone(), torch.tensor([tokens(40, seed=1), tokens(40, seed=2)])
    cache, fresh = (BatchCache(24, "h2o", chunk=13, local_len=5) for _ in range(2))
    with attach(model), torch.no_grad():
        with pytest.raises(ValueError, match="position_ids=5 to 44"):
            model(ids, **{CACHE: cache}, position_ids=torch.arange(5, 45).expand(2, -1))
        with pytest.raises(IndexError):
            model(ids + 97, **{CACHE: cache})
        for new in (ids[:1], torch.tensor([[7]])):  # other texts than those that were refused
            with mock.patch.object(cache, "finish", side_effect=RuntimeError), pytest.raises(RuntimeError):
                model(new, **{CACHE: cache})
            assert cache.get_seq_length() == 0
        for new in (ids, torch.tensor([[7], [9]])):
            assert torch.equal(*(model(new, **{CACHE: one}).logits for one in (cache, fresh)))
        with pytest.raises(IndexError):
            model(torch.tensor([[7], [97]]), **{CACHE: cache})
        new = torch.tensor([[8], [9]])
        assert torch.equal(*(model(new, **{CACHE: one}).logits for one in (cache, fresh)))


@pytest.mark.parametrize("place", ["cache.step.read_block", "cache.texts.TextBatch.finish"])
def test_a_batch_that_was_interrupted_is_not_gone_on_with(place):
    model, ids, new = backbone(), torch.tensor([tokens(40, seed=1), tokens(40, seed=2)]), torch.tensor([[7], [9]])
    cache = BatchCache(24, "h2o", chunk=13, local_len=5)
    with attach(model), torch.no_grad():
        model(ids, **{CACHE: cache})
        with mock.patch(f"locret_kit.{place}", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            model(new, **{CACHE: cache})
        with pytest.raises(ValueError, match=r"this cache was interrupted .*: reset\(\) it and read again"):
            model(new, **{CACHE: cache})
        cache.reset()
        model(ids, **{CACHE: cache})
    other = tiny_model("llama", num_hidden_layers=2).double()
    with attach(other), torch.no_grad(), pytest.raises(ValueError, match="holds rows of another model"):
        other(new, **{CACHE: cache})


def test_pieces_are_the_answer_where_a_tokenizer_cleans_up():
    """A blank that a later token would take away is a piece already."""
    words = Tokenizer(models.WordLevel({f"w{n}" if n else "'": n for n in range(97)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w1", clean_up_tokenization_spaces=True)
    cache, sampling = make("streaming", length=5), Sampling(logit_bias=((0, 1e6),))
    answer = Answer(backbone(), tokenizer, [5, 6, 7, 8, 9], cache, max_new_tokens=5, sampling=sampling)
    assert "".join(answer) == str(answer) == "' ' ' ' '"


def test_logits_that_are_not_finite_choose_no_token():
    choose = Chooser(Sampling(), 0, torch.device("cpu"), [1])
    for wrong in ("nan", "-inf"):
        with pytest.raises(RuntimeError, match=f"logits are not finite, but {wrong}: no token can be chosen"):
            choose(torch.full((9,), float(wrong)))
    assert choose(torch.tensor([0.0, float("-inf"), 2.0, 2.0])) == 2


@pytest.mark.parametrize(("given", "said"), [
    (dict(prompt_length=40), "unknown setting 'prompt_length'"), (dict(chunk=0), "chunk=0 must be at least 1"),
    (dict(budgt=24), "Did you mean 'budget'"), (dict(policy="h2p"), "Did you mean 'h2o'"), (dict(policy="locret"), "pass heads="),
])  # fmt: skip
def test_wrong_arguments_are_refused_before_a_forward(given, said):
    with pytest.raises(ValueError, match=said):
        BatchCache(**{"policy": "h2o", **given})


def test_a_policy_that_generate_cannot_run_says_so():
    model, ids = backbone(), torch.tensor([tokens(30)])
    for policy in ("sirllm", REREADING):
        heads = make(policy).heads
        said = "is not for model.generate with a batch: use locret_kit.runtime.engine.run"
        with attach(model), pytest.raises(ValueError, match=said):
            model.generate(ids, **{CACHE: BatchCache(24, policy, heads, chunk=13, local_len=5)}, max_new_tokens=2)


def test_a_model_whose_texts_are_apart_says_so():
    """GPT-J has neither states nor shared rows."""
    model = tiny_decoder("gptj", {}, Sizes(layers=1))
    with (
        attach(model),
        pytest.raises(ValueError, match="or place tokens in a way of their own, so each text is a forward"),
    ):
        model.generate(torch.tensor([tokens(30)]), **{CACHE: BatchCache(24, "h2o")}, max_new_tokens=2)


def test_what_is_read_twice_is_noted_once():
    """Log-probabilities of a prompt are those of its first reading."""
    noted = []
    for policy in (REREADING, "locret"):
        batch = Engine(backbone(), frozenset())
        text = batch.add(Request(tokens(), 1, prompt_logprobs=True), partial(make, policy))
        while batch.running:
            batch.step()
        assert text.error is None
        noted.append([row[-1][1] for row in text.prompt_logprobs])
    assert noted[0] == noted[1] and len(noted[0]) == len(tokens()) - 1


def test_at_most_so_many_run_and_prompts_are_read_in_their_order(monkeypatch):
    running, read, pieces = [], [], Engine._turns

    def noted(batch):
        running.append(len(batch.running))
        found = [*pieces(batch)]
        read.extend(number for text in found if text.reading and (number := text.request.seed) not in read)
        return found

    monkeypatch.setattr(Engine, "_turns", noted)
    requests = (Request(tokens(n, seed=number), 3, seed=number) for number, n in enumerate((80, 7, 61, 20, 9)))

    with pytest.raises(ValueError, match="max_running=0 must be at least 1"):
        next(run(backbone(), SILENT, requests, caches_of("h2o"), max_running=0))
    done = run(backbone(), SILENT, requests, caches_of("h2o"), max_running=2, piece=10)
    ended = [one.request.seed for one in done]
    assert sorted(ended) == read == [0, 1, 2, 3, 4] and max(running) == 2
