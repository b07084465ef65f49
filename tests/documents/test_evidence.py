"""Passages that an answer was read from. The oracle is the attention that transformers gives of the same tokens."""

from itertools import pairwise

import pytest
import torch
from read_texts import QUESTIONS, REREADING, load, parts, read, text_of

from locret_kit import BoundedCache
from locret_kit.runtime.evidence import WINDOW, EvidenceSearch, passages
from locret_kit.runtime.session import Answer, prefill
from locret_kit.text.folder import HEADING

POLICIES = ("full", "locret", "h2o", "roco", "ada-snapkv", "nacl", "infllm", REREADING)


def attention_of(model, ids: list[int], first: int) -> torch.Tensor:
    """Attention ``[first]`` that the tokens before ``first`` receive from all later ones: means of groups, summed over key/value
    heads and the later half of the layers, from the model's own eager attention."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    chosen, model.config._attn_implementation = model.config._attn_implementation, "eager"
    try:
        given = model(torch.tensor([ids]), output_attentions=True).attentions
    finally:
        model.config._attn_implementation = chosen
    return torch.stack(given[len(given) // 2 :]).double()[:, 0, :, first:, :first].sum((0, 1, 2)) / group


def test_attention_is_the_models():
    model = parts("llama")[0]
    document = read("llama", "full", text_of(160))
    answer = document.ask(QUESTIONS[0], max_new_tokens=6, evidence=True)
    assert answer.evidence
    ids, tokens = list(answer.ids), answer.tokens
    expected = attention_of(model, ids + tokens[:-1], len(ids))
    torch.testing.assert_close(answer._search.received.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "policy, bits", [*((policy, None) for policy in POLICIES), ("h2o", 4), ("full", 4), ("locret", 2)]
)
def test_answers_stay_the_same(policy, bits):
    document = read("llama", policy, text_of(160), budget=128, chunk=64, stabilizers=32, kv_bits=bits)
    for question in QUESTIONS:
        plain, shown = document.ask(question, max_new_tokens=8), document.ask(question, max_new_tokens=8, evidence=True)
        assert str(plain) == str(shown) and plain.tokens == shown.tokens
        assert plain.evidence == [] and 1 <= len(shown.evidence) <= 3
        shares = [one.share for one in shown.evidence]
        assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1 + 1e-6


def test_what_is_read_again_counts_at_its_place_in_the_prompt():
    document = read("llama", REREADING, text_of(160))
    answer = document.ask(QUESTIONS[0], max_new_tokens=4, evidence=True)
    str(answer)
    again = answer.cache.reread_positions
    received = answer.cache.attention_received()
    elsewhere = torch.ones(len(answer.ids), dtype=torch.bool)
    elsewhere[again] = False
    assert again and not received[: len(answer.ids)][elsewhere].any() and received[again].any()


def test_passages_are_lines_of_files(tmp_path):
    _, tokenizer, _ = parts("llama")
    lines = [f"Line {number} of this file has a word." for number in range(40)]
    lines[1] = HEADING.format(path="old/name.py").strip()  # a comment of its author's
    lines[3] = "\f"  # as C and Python files have it between sections
    text = "".join(HEADING.format(path=path) + "\n".join(lines) + "\n\n" for path in ("a.py", "sub/b.py"))
    before, ids = (tokenizer(words, add_special_tokens=False).input_ids for words in ("x", text))
    target = text.rindex("Line 21 of")
    at = len(tokenizer(text[:target], add_special_tokens=False).input_ids)
    received = torch.zeros(len(before) + len(ids))
    received[len(before) + at + WINDOW // 2] = 1
    (found,) = passages(tokenizer, before + ids, received, len(before), len(before) + len(ids))
    assert found.file == "sub/b.py" and found.share == 1
    first, last = found.text.splitlines()[0], found.text.splitlines()[-1]
    assert first in lines and last in lines  # whole lines
    assert found.line == lines.index(first) + 1 and found.page is None
    received[:] = 0
    heading = len(before) + len(tokenizer(text[: text.rindex("# File: sub")], add_special_tokens=False).input_ids)
    received[heading] = received[heading + WINDOW - 1] = 1  # one window alone has both
    (found,) = passages(tokenizer, before + ids, received, len(before), len(before) + len(ids))
    assert (found.file, found.line) == ("sub/b.py", 1) and found.text.startswith(lines[0])


def test_passages_have_their_page():
    """Form feeds part the text, as a PDF's; the page is that on which a passage begins."""
    _, tokenizer, _ = parts("llama")
    pages = [" ".join(f"Word {number} of page {page}." for number in range(30)) for page in range(1, 5)]
    ids = tokenizer("\n\n\f".join(pages), add_special_tokens=False).input_ids
    found = []
    for page in pages:
        received = torch.zeros(len(ids))
        received[len(tokenizer("\n\n\f".join(pages[: pages.index(page)]), add_special_tokens=False).input_ids) + 60] = 1
        found += passages(tokenizer, ids, received, 0, len(ids))
    assert [passage.page for passage in found] == [1, 2, 3, 4]
    assert all(f"of page {passage.page}." in passage.text for passage in found)
    assert str(found[1]).startswith("page 2: Word")


@pytest.mark.parametrize("tokens", [(100, 160, 220), (160, 100, 220)])
def test_passages_share_no_words(tokens):
    """Passages of one sentence, in which each would grow over the others."""
    _, tokenizer, _ = parts("llama")
    words = [f"w{number}" for number in range(200)]
    ids = tokenizer(" ".join(words), add_special_tokens=False).input_ids
    received = torch.zeros(len(ids))
    received[list(tokens)] = torch.tensor([3.0, 2.0, 1.0])
    found = passages(tokenizer, ids, received, 0, len(ids))
    texts = sorted((" ".join(words).index(one.text), one.text) for one in found)
    assert [one.share for one in found] == [3 / 6, 2 / 6, 1 / 6]
    assert all(at + len(text) <= after for (at, text), (after, _) in pairwise(texts))


def test_no_text_no_evidence(tmp_path):
    document = read("llama", "h2o", text_of(160))
    document.save(tmp_path / "text.locret", text=False)
    loaded = load(tmp_path / "text.locret", "h2o", "llama")
    assert loaded.ask("Who came in?", max_new_tokens=4, evidence=True).evidence == []


def test_a_cache_without_sums_says_none():
    model, tokenizer, _ = parts("llama")
    cache = BoundedCache(24, "snapkv")
    prefill(model, [1, 2, 3, 4], cache)
    assert cache.attention_received() is None
    ids = [1, 2, 3, 4, 5]
    search = EvidenceSearch(tokenizer, ids, (0, 3))
    answer = Answer(model, tokenizer, ids, BoundedCache(24, "snapkv"), max_new_tokens=2, search=search)
    assert answer.evidence == []
