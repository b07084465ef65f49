"""Tokenizers with more tokens than a model has rows. The oracle is the definition: no text becomes a token beyond them."""

import pytest
from tiny_tokenizer import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from locret_kit.backbones.load import within_rows


def plain(model, *, pieces=None) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    made.pre_tokenizer = pieces
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("rows", [5, 4, 3])
@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece", "WordLevel"])
def test_no_text_becomes_a_token_beyond_the_rows(kind, rows):
    """Neither of the vocabulary nor added; what was spelt by tokens within the rows is spelt as before."""
    words = ["[UNK]", "a", "b", "ab", "aab"]
    numbered = {word: number for number, word in enumerate(words)}
    tokenizer = {
        "BPE": lambda: plain(models.BPE(numbered, [("a", "b"), ("a", "ab")], unk_token="[UNK]")),
        "Unigram": lambda: plain(
            models.Unigram([(word, -float(len(words) - i)) for i, word in enumerate(words)], unk_id=0)
        ),
        "WordPiece": lambda: plain(models.WordPiece(numbered, unk_token="[UNK]"), pieces=pre_tokenizers.Whitespace()),
        "WordLevel": lambda: plain(models.WordLevel(numbered, unk_token="[UNK]"), pieces=pre_tokenizers.Whitespace()),
    }[kind]()
    short = tokenizer("b a", add_special_tokens=False).input_ids
    added = ("<pad>", "<image>", "<|end|>")
    tokenizer.add_special_tokens({"pad_token": added[0], "extra_special_tokens": [added[1]]})
    tokenizer.add_tokens([AddedToken(added[2], normalized=False)])
    assert max(tokenizer("aab<image>").input_ids) >= 5
    assert within_rows(tokenizer, rows) is tokenizer
    for text in ("aab", "aab ab", "a<pad>b", "<image><|end|>", *added):
        assert max(tokenizer(text).input_ids, default=0) < rows
    assert tokenizer("b a", add_special_tokens=False).input_ids == short
    assert max(tokenizer.all_special_ids, default=0) < rows >= len(tokenizer) and tokenizer.pad_token is None


def test_a_tokenizer_within_the_rows_stays_as_it_is():
    tokenizer = tiny_tokenizer()
    backend = tokenizer.backend_tokenizer
    assert within_rows(tokenizer, len(tokenizer)).backend_tokenizer is backend
    assert within_rows(tokenizer, None).backend_tokenizer is backend


def test_a_token_beyond_the_rows_in_each_text_is_refused():
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"bos_token": "<new>"})
    adds = processors.TemplateProcessing("<new> $A", special_tokens=[("<new>", rows)])
    tokenizer.backend_tokenizer.post_processor = adds
    with pytest.raises(ValueError, match=f"^it adds token {rows} to a text, which must be below {rows}, the rows of"):
        within_rows(tokenizer, rows)


def test_a_slow_tokenizer_with_tokens_beyond_the_rows_is_refused():
    with pytest.raises(ValueError, match="tokens must be at most 100, the rows of the model's embedding"):
        within_rows(ByT5Tokenizer(), 100)
