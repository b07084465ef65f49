"""Chat templates of six families in small: their control tokens and what stands where, on tokenizers trained on the spot."""

from functools import lru_cache

from tiny_text import PROSE
from tiny_tokenizer import byte_level, controlled
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set text = m.content %}{%- set why = '' %}"
    "{%- if m.reasoning_content is string %}{%- set why = m.reasoning_content %}"
    "{%- elif '</think>' in text %}{%- set why = text.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.last %}{{- '<think>\n' + why.strip('\n') + '\n</think>\n\n' }}{%- endif %}"
    "{{- text }}"
    '{%- for call in m.tool_calls or [] %}{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
GEMMA = (
    "{{ bos_token }}{% set ns = namespace(first='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.first = m['content'] + '\n\n' %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + ns.first + m['content'] | trim"
    " + '<end_of_turn>\n' }}{% set ns.first = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- for m in messages %}{%- if m['role'] == 'assistant' %}{{- ' ' + m['content'] + eos_token }}"
    "{%- else %}{{- '[INST] ' + m['content'] + '[/INST]' }}{%- endif %}{%- endfor %}"
)
FAMILIES = {
    "smollm2": (CHATML, ("<|im_start|>", "<|im_end|>"), (), False),
    "qwen3": (
        QWEN3, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|fim_prefix|>"), False,
    ),
    "llama3": (
        LLAMA3, ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"), (), False,
    ),
    "gemma": (GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), (), True),
    "phi3": (PHI3, ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), (), True),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), (), True),
}  # fmt: skip
"""Template, special tokens, added tokens that are not special, and whether blanks are written as in SentencePiece."""
PLAIN = ("\n\n", "<b>", "</b>")
"""Added tokens that control nothing, as Gemma has them."""


@lru_cache(maxsize=8)
def real_tokenizer(family: str):
    """A tokenizer of some 600 tokens with a family's template and control tokens."""
    template, special, others, sentencepiece = FAMILIES[family]
    alphabet = sorted({c for c in PROSE} | {chr(i) for i in range(33, 127)} | {"\n"})
    if sentencepiece:
        bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        bpe.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        first = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
        # The control tokens are frequent words of the text too: merges alone would form them.
        bpe.train_from_iterator(
            [PROSE * 3, *(f"▁{text}" for text in special for _ in range(50))],
            trainers.BpeTrainer(vocab_size=700, special_tokens=first, initial_alphabet=alphabet, show_progress=False),
        )
    else:
        bpe = byte_level([PROSE * 3], 400, ())
    # Phi-3's tokens swallow the blanks behind them.
    return controlled(bpe, special, (*others, *PLAIN), template, rstrip=family == "phi3")


def control_ids(family: str) -> set[int]:
    """Ids of the family's control tokens."""
    _, special, others, _ = FAMILIES[family]
    return set(real_tokenizer(family).convert_tokens_to_ids([*special, *others]))
