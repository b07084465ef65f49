"""A byte-level BPE with a chat template, trained in milliseconds; and a tiny backbone saved beside it."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The harbour was quiet when the boats came in. The pass key is 12345. What is it? Remember it. " * 3


SPECIAL = ("<|im_start|>", "<|im_end|>")


def byte_level(
    texts: list[str], size: int, special: tuple[str, ...] = SPECIAL, words: pre_tokenizers.PreTokenizer | None = None
) -> Tokenizer:
    """A byte-level BPE of ``size`` tokens, trained on texts, which `words` splits in place of GPT-2's pattern."""
    bpe, plain = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    bpe.pre_tokenizer = plain if words is None else pre_tokenizers.Sequence([words, plain])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    given = dict(special_tokens=[*special], show_progress=False, initial_alphabet=alphabet)
    trainer = trainers.BpeTrainer(vocab_size=size, **given)
    bpe.train_from_iterator(texts, trainer)
    return bpe


def chatting(
    bpe: Tokenizer, template: str | None = TEMPLATE, ends: tuple[str, ...] = SPECIAL
) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it, with a chat template, and tokens that begin and end a text."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=ends[0], eos_token=ends[1])
    tokenizer.chat_template = template
    return tokenizer


def controlled(
    bpe: Tokenizer, special: tuple[str, ...], others: tuple[str, ...], template: str, rstrip: bool = False
) -> PreTrainedTokenizerFast:
    """The same with special tokens, the first of which begin and end a text, and with other tokens."""
    bpe.add_special_tokens([AddedToken(text, special=True, rstrip=rstrip, normalized=False) for text in special])
    bpe.add_tokens([AddedToken(text, normalized=False) for text in others])
    return chatting(bpe, template, special)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return chatting(byte_level([TEXT], 400))


def save_tiny_backbone(folder: Path, **changes) -> Path:
    """A random Llama (3 layers, 4 query and 2 key/value heads) and its tokenizer, as ``from_pretrained`` reads them."""
    import torch  # the tokenizer alone is there without it
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = dict(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**settings, **changes}))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
