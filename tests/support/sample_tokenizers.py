"""Pieces that several tests of samples share."""

import itertools

from tiny_tokenizer import byte_level, chatting

from locret_kit.samples.synthetic import WORDS

CHAT = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


TRIMMED = (  # like Llama 2: content trimmed, a blank before the end token; like Qwen 3: a block before the last answer
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %}{% if loop.last %}<think></think>{% endif %} {{ m['content'] | trim }} <|im_end|>{% endif %}{% endfor %}"
)


PARAGRAPH = (
    "The harbour was quiet when the first boats came in. Nobody had expected them before noon, and the market was "
    "still closed. A man in a grey coat counted the crates: 12, 34, 567, 890. He asked for the pass key and the "
    "sequence of digits. What is it? Remember it. The grass is green. The sky is blue. The sun is yellow. "
    "Here we go. There and back again. The question is simple, the answer is not.\n"
)


HAYSTACK = "\n".join(
    f"Line {i} tells of {n} and the {w}. They met at {p}, and it rained."
    for i, (n, w, p) in enumerate(
        list(itertools.product(*(WORDS[kind] for kind in ("names", "things", "places"))))[:9000:13]
    )
)


def make_tokenizer(template=CHAT):
    return chatting(byte_level([PARAGRAPH, HAYSTACK[:20000]], 600), template)


TOK, BARE, TRIM = make_tokenizer(), make_tokenizer(None), make_tokenizer(TRIMMED)
