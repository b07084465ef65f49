"""Texts of numbered words, a token each."""

from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word, so that a text can be without a repeated one (see ``tiny.prompts``)."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8192)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


def words(ids: Sequence[int]) -> str:
    """The text of token ids."""
    return " ".join(f"w{i}" for i in ids)
