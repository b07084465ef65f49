"""The tokenizer and chat template of a GGUF file: transformers' conversion, completed.

A file has its tokens, merges and special tokens. It has only a name (``pre``) for the split of a text before the merges. Names
that transformers does not know are refused: other splits give other tokens than the model was trained on. Sources:
``llama-vocab.cpp`` of llama.cpp for the names; the models' own ``tokenizer.json`` for what stands there under them.

It needs transformers 5.18, which first had these tables; everything else runs with older releases.
"""

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf import convert_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_SENTENCEPIECE_BUILDERS as BUILDERS

from .gguf_file import GgufFile

CONTROL, USER = 3, 4
"""``token_type`` of special tokens, and of others that are found whole in a text."""
PLAIN = ("gpt-2", "smollm")
"""``tokenizer.ggml.pre`` of texts that are split as GPT-2's; digits are apart in SmolLM's."""
WHOLE_WORDS = {name for name in SPLITS if SPLITS[name] == SPLITS["llama-bpe"]} - {"dbrx", "smaug-bpe"} | {"tekken"}
"""Names under which a piece that is a token is not merged anew, and a text begins with a token unless the file says otherwise."""
COMPOSED = {name for name in SPLITS if SPLITS[name] in (SPLITS["qwen2"], SPLITS["qwen35"])}
"""Names under which a text is normalised (NFC)."""
TEMPLATE = "tokenizer.chat_template"
"""Field of the chat template; others have a name after it, such as ``.tool_use`` for conversations with tools."""
UNSWALLOWING = ("<unk>", "<s>", "<|endoftext|>")
"""Tokens of Phi-3 that do not swallow the blanks behind them, as its others do. A file does not say it."""


def tokenizer_of(file: GgufFile) -> PreTrainedTokenizerBase:
    """The tokenizer with the file's special tokens and chat templates.

    Raises:
        ValueError: it has none, or one of a kind that is not known; it is named.
    """
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in file.fields.items()}
    tokens, kind, pre = file.tokens, fields.get("model"), fields.get("pre")
    if not tokens:
        raise ValueError("it holds no tokenizer")
    if len(set(tokens)) < len(tokens):
        raise ValueError("tokenizer.ggml.tokens: a token occurs twice")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model={kind!r:.60} must be 'gpt2' or 'llama'")
    if kind == "gpt2" and pre not in (known := [*PLAIN, *SPLITS]):
        raise ValueError(f"tokenizer.ggml.pre={pre!r:.60} is not known; these are: {', '.join(known)}")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.token_id(key) for name, key in names.items()}
    context = file.fields.get(f"{file.architecture}.context_length")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(file, fields, tokens),
        # Files of before that field, such as those of Llama 3: a vocabulary of SentencePiece begins a text by the token for it.
        add_bos_token=fields.get("add_bos_token", kind == "llama" or pre in WHOLE_WORDS),
        add_eos_token=fields.get("add_eos_token", False),
        clean_up_tokenization_spaces=False,
        model_max_length=context if type(context) is int else None,
        **{name: tokens[i] for name, i in ids.items() if i is not None},
    )
    templates = {
        name.removeprefix(TEMPLATE).removeprefix(".") or "default": text
        for name, text in file.fields.items()
        if name.startswith(TEMPLATE) and isinstance(text, str) and text.strip()
    }
    if "default" in templates:
        tokenizer.chat_template = templates if len(templates) > 1 else templates["default"]
    return tokenizer


def _backend(file: GgufFile, fields: dict[str, object], tokens: list[str]) -> Tokenizer:
    def numbers(name: str) -> np.ndarray:
        values = fields.get(name, np.ones(len(tokens)))
        if not isinstance(values, np.ndarray) or len(values) < len(tokens):
            raise ValueError(f"tokenizer.ggml.{name} must be numbers of {len(tokens)} tokens")
        return values[: len(tokens)]

    kind, pre, kinds = fields["model"], fields.get("pre"), numbers("token_type").tolist()
    given = {"tokenizer_type": kind, "pre_tokenizer_type": pre, "tokens": tokens}
    if kind == "gpt2":
        spelled = bytes_to_unicode()
        whole = {  # DeepSeek's special tokens are not spelled in bytes
            "".join(spelled[byte] for byte in token.encode()): token
            for token, one in zip(tokens, kinds, strict=True)
            if one in (CONTROL, USER)
        }
        merges = [(a, b) for a, _, b in (merge.partition(" ") for merge in file.words("tokenizer.ggml.merges"))]
        theirs, _ = convert_gguf_tokenizer(file.architecture, {**given, "merges": []})
        vocabulary = {whole.get(word, word): i for word, i in theirs.get_vocab(with_added_tokens=False).items()}
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in WHOLE_WORDS)
    else:
        # A word begins after a special token too, which transformers does for Phi-3 alone.
        architecture = file.architecture if file.architecture in BUILDERS else "phi3"
        theirs, _ = convert_gguf_tokenizer(architecture, {**given, "scores": numbers("scores").tolist()})
        model = theirs.model
        model.unk_token = tokens[file.token_id("unknown") or 0]
        if architecture == "phi3" and not fields.get("add_space_prefix", True):
            theirs.normalizer = normalizers.Replace(" ", "▁")
            theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made = Tokenizer(model)  # without the tokens that transformers' classes add
    made.pre_tokenizer, made.decoder, made.normalizer = theirs.pre_tokenizer, theirs.decoder, theirs.normalizer
    if pre == "smollm":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), theirs.pre_tokenizer])
    if pre in COMPOSED:
        made.normalizer = normalizers.NFC()
    swallow = kind == "llama" and file.architecture == "phi3"
    vocabulary = made.get_vocab()
    for add, special, wanted in ((made.add_special_tokens, True, CONTROL), (made.add_tokens, False, USER)):
        found = [token for token, one in zip(tokens, kinds, strict=True) if one == wanted and token in vocabulary]
        add([
            AddedToken(token, normalized=False, special=special, rstrip=swallow and token not in UNSWALLOWING)
            for token in found if token.strip("▁")
        ])  # fmt: skip
    return made
