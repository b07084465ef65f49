"""The tokenizer and chat template of a GGUF file.

A file says its tokens, merges and special tokens; of how a text is split before the merges it has but a name (``pre``). Names
that are not in ``SPLITS`` are refused: other splits give other tokens than the model was trained on. Sources:
``llama-vocab.cpp`` of llama.cpp for the names; the models' own ``tokenizer.json`` for what stands there under them.
"""

from __future__ import annotations

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .gguf_file import GgufFile

NORMAL, CONTROL, USER = 1, 3, 4
"""``token_type`` of words, of special tokens, and of others that are found whole in a text."""
ENDINGS = r"'s|'t|'re|'ve|'m|'ll|'d"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{0}}"
LLAMA3 = rf"(?i:{ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"(?i:{ENDINGS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
MARKS = r"[\p{L}\p{M}]"
QWEN35 = QWEN2.replace(r"\p{L}+", MARKS + "+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
SLASHED = REST.replace(r"[\r\n]*|", r"[\r\n/]*|", 1)
TEKKEN = rf"{CASED.replace('{0}', '')}|\p{{N}}|{SLASHED}"
GPT4O = rf"{CASED.replace('{0}', f'(?i:{ENDINGS})?')}|\p{{N}}{{1,3}}|{SLASHED}"
SPLITS: dict[str, str | None] = {
    "gpt-2": None, "smollm": None, "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "smaug-bpe": LLAMA3, "dbrx": LLAMA3,
    "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "tekken": TEKKEN, "gpt-4o": GPT4O,
    "qwen35": QWEN35, "lfm2": LLAMA3,
}  # fmt: skip
"""``tokenizer.ggml.pre`` of byte-level vocabularies -> the pattern of a piece; None is GPT-2's own."""
DIGITS_APART = ("smollm",)
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken", "lfm2")
"""Names under which a piece that is a token is not merged anew, and a text begins with a token unless the file says otherwise."""
COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35")
"""Names under which a text is normalised (NFC)."""
UNPREFIXED = ("gemma3",)
"""Architectures whose texts get no space before them, whose spaces end a piece, and whose scores say nothing."""

SWALLOWING, UNSWALLOWING = ("phi3",), ("<unk>", "<s>", "<|endoftext|>")
"""Architectures whose tokens that are found whole swallow the blanks behind them, where the vocabulary is SentencePiece's, and
the tokens that do not. A file does not say it."""


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerBase:
    """The tokenizer with the file's special tokens and chat template.

    Raises:
        ValueError: it has none, or one of a kind that is not known; it is named.
    """
    kind, tokens = file.fields.get("tokenizer.ggml.model"), file.tokens
    if not tokens:
        raise ValueError("it holds no tokenizer")
    if len(set(tokens)) < len(tokens):
        raise ValueError("tokenizer.ggml.tokens: a token is there twice")
    types = file.fields.get("tokenizer.ggml.token_type")
    kinds = [NORMAL] * len(tokens) if types is None else _numbers("token_type", types, len(tokens)).tolist()
    if kind == "gpt2":
        made = _byte_level(file, tokens, kinds)
    elif kind == "llama":
        made = _sentencepiece(file, tokens, kinds)
    else:
        raise ValueError(f"tokenizer.ggml.model={kind!r:.60} must be 'gpt2' or 'llama'")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.token_id(key) for name, key in names.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    # Files of before that field, such as those of Llama 3: a vocabulary of SentencePiece begins a text by the token for it.
    begun = kind == "llama" or file.fields.get("tokenizer.ggml.pre") in WHOLE_WORDS
    begins, ends = (
        file.fields.get(f"tokenizer.ggml.add_{name}_token", default)
        for name, default in (("bos", begun), ("eos", False))
    )
    context = file.fields.get(f"{file.architecture}.context_length")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, add_bos_token=begins, add_eos_token=ends, clean_up_tokenization_spaces=False,
        model_max_length=context if type(context) is int else None, **special,
    )  # fmt: skip
    template = file.fields.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    return tokenizer


def _numbers(name: str, values: object, count: int) -> np.ndarray:
    """The numbers of ``count`` tokens. Raises ValueError unless there are as many."""
    if not isinstance(values, np.ndarray) or len(values) < count:
        raise ValueError(f"tokenizer.ggml.{name} must be numbers of {count} tokens")
    return values[:count]


def _byte_level(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    pre = file.fields.get("tokenizer.ggml.pre")
    if pre not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre={pre!r:.60} is not known; these are: {', '.join(SPLITS)}")
    merges = [(a, b) for a, _, b in (merge.partition(" ") for merge in file.words("tokenizer.ggml.merges"))]
    spelled = bytes_to_unicode()
    alphabet = set(spelled.values())
    vocabulary = {
        token
        if kind in (CONTROL, USER) or set(token) <= alphabet
        else "".join(spelled[byte] for byte in token.encode()): i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    }
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in WHOLE_WORDS))
    split = SPLITS[str(pre)]
    pieces: list[pre_tokenizers.PreTokenizer] = (
        [pre_tokenizers.Digits(individual_digits=True)] if pre in DIGITS_APART else []
    )
    if split is not None:
        pieces.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
    pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    made.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        made.normalizer = normalizers.NFC()
    _add(made, tokens, kinds)
    return made


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Byte-pair merges by SentencePiece: a pair is merged the earlier, the higher the score of what it makes, then the lower its
    id."""
    tokens = ["▁" * len(token) if token.strip(" ") == "" else token for token in tokens]  # Gemma's runs of spaces
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges, scores = list[tuple[str, str]](), file.fields.get("tokenizer.ggml.scores")
    if scores is None or file.architecture in UNPREFIXED:
        scores = np.zeros(len(tokens))
    for i in np.argsort(-_numbers("scores", scores, len(tokens)).astype(np.float64), kind="stable").tolist():
        token = tokens[i]
        if kinds[i] in (NORMAL, USER):
            pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [(vocabulary[a], vocabulary[b], a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
            merges += [(a, b) for *_, a, b in sorted(known)]
    unknown = file.token_id("unknown") or 0
    made = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefixed = file.fields.get("tokenizer.ggml.add_space_prefix", True) and file.architecture not in UNPREFIXED
    replaced, back = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced]) if prefixed else replaced
    if file.architecture in UNPREFIXED:
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    made.decoder = decoders.Sequence([back, decoders.ByteFallback(), decoders.Fuse(), *strip])
    _add(made, tokens, kinds, swallow=file.architecture in SWALLOWING)
    return made


def _add(made: Tokenizer, tokens: list[str], kinds: list[int], *, swallow: bool = False) -> None:
    """The tokens that are found whole in a text. They ``swallow`` the blanks behind them but for ``UNSWALLOWING``."""
    known = made.get_vocab(with_added_tokens=False)
    pairs = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if token in known and token.strip("▁")]
    for add, special, wanted in ((made.add_special_tokens, True, CONTROL), (made.add_tokens, False, USER)):
        found = [(token, swallow and token not in UNSWALLOWING) for token, kind in pairs if kind == wanted]
        add([AddedToken(token, normalized=False, special=special, rstrip=blanks) for token, blanks in found])
