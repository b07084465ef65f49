"""KVzip, the unbounded oracle, keeps what a repetition of the text reads most, by the attention weights of the model itself."""

from functools import partial

import pytest
import torch
from tiny_models import COMMON, tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit.runtime import repetition
from locret_kit.runtime.repetition import KVzip
from locret_kit.runtime.session import Answer
from locret_kit.settings import Resolved


def paper_kvzip(model, context, requests, sinks):
    """Scores ``[layer][head][slot]`` from the attention weights of plain forwards over context and request."""
    H = model.config.num_key_value_heads
    model.set_attn_implementation("eager")
    scores = None
    for start, stop, ids in requests:
        weights = model(torch.tensor([list(context) + ids]), output_attentions=True).attentions
        scores = scores or [[[0.0] * len(context) for _ in range(H)] for _ in weights]
        columns = [*range(min(sinks, start)), *range(start, stop), *range(len(context), len(context) + len(ids))]
        for layer, weight_QTS in enumerate(w[0] for w in weights):
            for query_head, weight_TS in enumerate(weight_QTS):
                for row in weight_TS[len(context) :].double():
                    share = row[columns] / row[columns].sum()
                    best = scores[layer][query_head // (len(weight_QTS) // H)]
                    for slot, value in zip(columns, share.tolist(), strict=True):
                        if start <= slot < stop:
                            best[slot] = max(best[slot], value)
    model.set_attn_implementation("sdpa")
    return scores


TOKENIZER = tiny_tokenizer()
WORDS = 400  # of the tokenizer


@pytest.fixture
def model_of(monkeypatch):
    monkeypatch.setattr(repetition, "CHUNK", 20)
    monkeypatch.setitem(COMMON, "vocab_size", WORDS)
    return tiny_model


def words(tokens, seed=0):
    return torch.randint(3, WORDS, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def settings(budget, **more):
    return Resolved(budget=budget, local_len=6, **more)


def requests(context):
    """Pieces of 20 tokens, so that a context of 50 takes three."""
    return list(repetition.requests(partial(TOKENIZER.encode, add_special_tokens=False), context))


@pytest.mark.parametrize("positions", ["original", "compact"])
@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-mqa", "qwen3"])
def test_kvzip_keeps_what_the_repetition_reads_most(model_of, family, positions):
    model = model_of(family)
    context = words(50, seed=0)
    cache = KVzip(settings(24, positions=positions)).read(model, TOKENIZER, [*context, *words(6)])
    assert cache.kept_rows == [18] * len(cache.kept_rows) and cache.get_seq_length() == 50
    for layer, heads in enumerate(paper_kvzip(model, context, requests(context), repetition.SINKS)):
        for head, scores in enumerate(heads):
            kept = cache.kept_positions(layer)[0][head].tolist()
            assert kept[:4] == [0, 1, 2, 3]
            lost = max(scores[t] for t in range(50) if t not in kept)
            assert min(scores[t] for t in kept[4:]) >= lost * (1 - 1e-4)


def test_kvzip_shares_slots_over_heads_and_layers_jointly(model_of):
    model = model_of("llama")
    context = words(50, seed=1)
    cache = KVzip(settings(24), joint=True).read(model, TOKENIZER, [*context, *words(6)])
    scores = paper_kvzip(model, context, requests(context), repetition.SINKS)
    kept = [[set(rows.tolist()) for rows in cache.kept_positions(layer)[0]] for layer in range(len(scores))]
    sizes = [len(rows) for heads in kept for rows in heads]
    assert sum(sizes) == 18 * len(sizes) and len(set(sizes)) > 1
    assert [rows.number for rows in cache.bounded] == [*range(len(scores))], "each layer's own rotation and budget"
    for layer, heads in enumerate(scores):
        stay = [heads[h][t] for h in range(len(heads)) for t in kept[layer][h] if t >= 4]
        lost = [heads[h][t] for h in range(len(heads)) for t in set(range(50)) - kept[layer][h]]
        assert min(stay) >= max(lost) * (1 - 1e-4)
    threshold = sorted((s for heads in scores for head in heads for s in head[4:]), reverse=True)
    threshold = threshold[18 * len(sizes) - 4 * len(sizes) - 1]
    for layer, heads in enumerate(scores):  # a layer's number is off by less than one row a head
        wanted = sum(s >= threshold for head in heads for s in head[4:]) + 4 * len(heads)
        assert abs(sum(len(rows) for rows in kept[layer]) - wanted) <= len(heads)


@pytest.mark.parametrize("joint", [False, True])
def test_kvzip_answers_from_what_it_kept(model_of, joint):
    model = model_of("llama")
    ids = words(56, seed=2)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, 56:]
    for budget in (56, 20):
        cache = KVzip(settings(budget), joint).read(model, TOKENIZER, ids)
        answer = Answer(model, TOKENIZER, ids, cache, max_new_tokens=8)
        rows = answer.report.kept_rows
        assert answer.report.policy == "kvzip" and sum(rows) == budget * len(rows)
        if budget == 56:
            assert str(answer) == TOKENIZER.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize("joint", [False, True])
def test_kvzip_keeps_its_slots_at_every_place_in_a_text(model_of, monkeypatch, joint):
    """The text's end and the answer lie around a boundary of chunks."""
    monkeypatch.setattr(repetition, "CHUNK", 200)
    model, ids = model_of("llama"), words(510)
    cache = KVzip(settings(24), joint).read(model, TOKENIZER, ids)
    kept = [[head.tolist() for head in cache.kept_positions(layer)[0]] for layer in range(len(cache.bounded))]
    str(Answer(model, TOKENIZER, ids, cache, max_new_tokens=5, stop=frozenset()))
    for layer, heads in enumerate(kept):
        for head, before in zip(cache.kept_positions(layer)[0], heads, strict=True):
            assert head.tolist() == [*before, *range(504, 514)]


def test_kvzip_says_what_it_cannot_do(model_of):
    model = model_of("mistral-window")
    with pytest.raises(ValueError, match="budget=10: must be above 10: local_len=6 and 4 sinks"):
        KVzip(settings(10))
    with pytest.raises(ValueError, match="windowed layers"):
        KVzip(settings(20)).read(model, TOKENIZER, [5] * 56)
