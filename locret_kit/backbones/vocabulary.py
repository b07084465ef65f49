"""Tokens of a tokenizer within the rows of a model's embedding. Many tokenizers have more: a pad token that was added after
training, an image token of a model that is exported for text. A row beyond the last would end a GPU's context for everybody.
"""

import json

from transformers import PreTrainedTokenizerBase


def within_rows(tokenizer: PreTrainedTokenizerBase, rows: int | None) -> PreTrainedTokenizerBase:
    """The tokenizer, changed so that texts become tokens from 0 to ``rows - 1`` only: a token beyond an embedding's rows is spelt
    by others. None is no bound.

    Raises:
        ValueError: the tokenizer adds such a token to each text, or is a slow one with such tokens.
    """
    if rows is None or max([*tokenizer.added_tokens_decoder, tokenizer.vocab_size - 1]) < rows:
        return tokenizer
    if not tokenizer.is_fast:
        raise ValueError(f"{len(tokenizer)} tokens must be at most {rows}, the rows of the model's embedding")
    made = json.loads(tokenizer.backend_tokenizer.to_str())  # type: ignore[attr-defined]  # of fast tokenizers
    made["added_tokens"] = [token for token in made["added_tokens"] if token["id"] < rows]
    model = made["model"]
    if isinstance(model["vocab"], list):  # Unigram
        model["vocab"] = model["vocab"][:rows]
    else:
        model["vocab"] = {text: token for text, token in model["vocab"].items() if token < rows}
        if "merges" in model:
            prefix = model.get("continuing_subword_prefix") or ""
            merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
            model["merges"] = [[a, b] for a, b in merges if {a, b, a + b.removeprefix(prefix)} <= model["vocab"].keys()]
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(made))  # type: ignore[attr-defined]
    known = tokenizer.get_vocab()
    for name, text in tokenizer.special_tokens_map.items():
        if str(text) not in known:
            setattr(tokenizer, name, None)
    tokenizer.extra_special_tokens = [text for text in tokenizer.extra_special_tokens if str(text) in known]
    if beyond := [token for token in tokenizer("a").input_ids if token >= rows]:
        said = f"which must be below {rows}, the rows of the model's embedding"
        raise ValueError(f"it adds token {beyond[0]} to a text, {said}")
    return tokenizer
