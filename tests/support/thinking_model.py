"""A tiny float64 model with Qwen 3's tokenizer and heads, whose chat template always opens a thought."""

from functools import cache

from real_templates import QWEN3, real_tokenizer
from tiny_heads import tiny_heads
from tiny_models import tiny_model

OPENED = QWEN3.replace("<|im_start|>assistant\n' }}{%- endif %}", "<|im_start|>assistant\n<think>\n' }}{%- endif %}")
"""Qwen 3's template of models that always think: earlier thoughts are dropped, and the prompt begins the next."""
QUESTIONS = ("What is it that came in with nets and ropes?", "Who was there when nobody spoke?", "And when?", "Why so?")


@cache
def parts():
    """Model, tokenizer and heads."""
    tokenizer = real_tokenizer("qwen3")
    model = tiny_model("llama", vocab_size=len(tokenizer)).double()
    return model, tokenizer, tiny_heads(model, 32, seed=3)
