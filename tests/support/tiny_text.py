"""A byte-level BPE tokenizer trained on the spot, for tests that need text."""

from functools import lru_cache

from tiny_tokenizer import TEMPLATE, byte_level, chatting
from tokenizers.processors import TemplateProcessing

PROSE = (
    "The harbour was quiet when the first boats came in. Nobody had expected them before noon, and the market was "
    "still closed. A man in a grey coat counted the crates: 12, 34, 567, 890. He asked for the pass key.\n"
)


@lru_cache(maxsize=2)
def tiny_tokenizer(template: str | None = TEMPLATE, bos: bool = False):
    """About 500 tokens; with ``bos`` it puts a BOS before every text of its own accord."""
    code, chinese = "def f(x):\n    return x + 1\n" * 5, "中文文本没有空格。" * 5
    bpe = byte_level([PROSE * 3, code, chinese, "aaaaaaaaaaaaaaaa " * 9], 500)
    if bos:
        start = ("<|im_start|>", bpe.token_to_id("<|im_start|>"))
        bpe.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[start])
    return chatting(bpe, template)
