"""A byte-level BPE tokenizer trained on the spot, for tests that need text."""

from __future__ import annotations

from functools import lru_cache

PROSE = (
    "The harbour was quiet when the first boats came in. Nobody had expected them before noon, and the market was "
    "still closed. A man in a grey coat counted the crates: 12, 34, 567, 890. He asked for the pass key.\n"
)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@lru_cache(maxsize=2)
def tiny_tokenizer(template: str | None = CHAT, bos: bool = False):
    """About 500 tokens; with ``bos`` it puts a BOS before every text of its own accord."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(
        [PROSE * 3, "def f(x):\n    return x + 1\n" * 5, "中文文本没有空格。" * 5, "aaaaaaaaaaaaaaaa " * 9], trainer
    )
    if bos:
        start = bpe.token_to_id("<|im_start|>")
        bpe.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", start)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer.chat_template = template
    return tokenizer
