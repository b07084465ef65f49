"""Streamed token ids equal one call on the whole text; wrong bytes are named by their offset."""

import io
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import PROSE, tiny_tokenizer
from tiny_tokenizer import byte_level, chatting
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from locret_kit.files import read_utf8
from locret_kit.text import tokens
from locret_kit.text.tokens import BYTES, IdStream, TextStream, TooManyTokens, stream_ids, token_bytes, token_texts

BACKBONE = Path(__file__).resolve().parents[2] / "checkpoints" / "SmolLM2-135M-Instruct"
CODE = "def f(x, y=None):\n    # a comment\n    return {'a': [x ** 2 for _ in range(10)]}\n\n\n\tif x:\n\t\tpass\n"
EMOJI = "👩‍👩‍👧‍👦 naïve café — “quotes” … ½ № Ωmega ﷽ e\u0301 \u200d"
CHINESE = "今天天气很好\uff0c我们去海边散步。第二天下雨了\uff0c他没有来\uff01" * 40
TEXTS = {
    "prose": PROSE * 12,
    "code": CODE * 25,
    "newlines": ("a\n\n\n\nb \n \n  c\r\n\r\n" + "\n" * 90) * 12,
    "unicode": (EMOJI + " and then ") * 30,
    "emoji-unbroken": "👩‍👩‍👧‍👦🙂🙃" * 200,
    "chinese": CHINESE,
    "long-word": "start " + "a" * 2500 + " end " + PROSE * 5,
    "base64": "aGVsbG8gd29ybGQ+/" * 150,
    "digits": "0123456789" * 250,
    "threes": "123" * 1300,
    "spaces": "x" + " " * 1500 + "y" + " " * 900,
    "mixed": PROSE + CODE * 3 + EMOJI * 10 + "z" * 700 + CHINESE[:600] + " " * 80 + PROSE * 3,
    "empty": "",
    "one": "x",
}


@lru_cache(maxsize=1)
def real_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BACKBONE)


def pieces(text: str, sizes: list[int]):
    at, i = 0, 0
    while at < len(text):
        size = sizes[i % len(sizes)]
        yield text[at : at + size]
        at, i = at + size, i + 1


def check(tokenizer, text: str, sizes: list[int], block: int) -> None:
    want = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    with mock.patch.object(tokens, "BLOCK", block):
        assert stream_ids(tokenizer, pieces(text, sizes)).tolist() == want


absent = not (BACKBONE / "tokenizer.json").exists()
DEMO = [pytest.mark.backbone, pytest.mark.skipif(absent, reason="python scripts/fetch_backbone.py")]


def by_threes():
    """A tokenizer that cuts digits by threes from the left, as Llama 3's."""
    return chatting(byte_level([PROSE + "123" * 99], 400, words=pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("tokenizer", [tiny_tokenizer, by_threes, pytest.param(real_tokenizer, marks=DEMO)])
def test_equals_one_call(tokenizer, name):
    for block, sizes in ((600, [1, 50, 333]), (1100, [1100, 217, 5])):
        check(tokenizer(), TEXTS[name], sizes, block)


WORDS = st.sampled_from(
    ["harbour ", "boats came", "\n", "\n\n", "   ", "\t", "12345", "é", "👩‍👧", "中文", "。", "it's", "x" * 300, ", ", "a b c d ",
     PROSE, "\r\n", "\u00a0", "def f(x):\n    "]
)  # fmt: skip


@given(st.lists(WORDS, max_size=60), st.lists(st.integers(1, 500), min_size=1, max_size=4), st.integers(600, 1500))
def test_any_text_any_pieces(words, sizes, block):
    check(tiny_tokenizer(), "".join(words) * 3, sizes, block)


@given(st.lists(WORDS, max_size=40), st.lists(WORDS, max_size=5), st.lists(WORDS, max_size=5))
def test_what_was_settled_is_what_one_call_reads(words, more, question):
    """Tokens up to the last words are final: whatever follows, one call on the whole text reads them alike."""
    tokenizer = tiny_tokenizer()
    text, after = "".join(words) * 2 + PROSE, "".join(question)
    stream = IdStream(tokenizer)
    stream.feed(text)
    stream.settle()
    assert len(tokenizer(text).input_ids) - len(stream.ids) < 60, "few tokens wait"
    for end in (after, "\n\n" + after, after[:1]):
        assert stream.finish(end).tolist() == tokenizer(text + end, verbose=False).input_ids
    stream.feed("".join(more))
    stream.settle()
    assert stream.finish(after).tolist() == tokenizer(text + "".join(more) + after, verbose=False).input_ids


def test_a_text_with_too_many_tokens_is_not_read_to_its_end(monkeypatch):
    tokenizer, text = tiny_tokenizer(), PROSE * 12
    want = tokenizer(text, verbose=False).input_ids
    for block in (1 << 16, 600):
        monkeypatch.setattr(tokens, "BLOCK", block)
        assert IdStream(tokenizer, max_tokens=len(want)).finish(text).tolist() == want
        with pytest.raises(TooManyTokens, match=f"more than {len(want) - 1} tokens"):
            IdStream(tokenizer, max_tokens=len(want) - 1).finish(text)
    stream, begun = IdStream(tokenizer, max_tokens=100), []
    with pytest.raises(TooManyTokens):
        for piece in pieces(text * 100, [500]):
            begun.append(piece)
            stream.feed(piece)
    assert len(begun) < 20


# ---- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 3, 5, 1000])
def test_characters_split_across_blocks(block):
    text = EMOJI * 5 + CHINESE[:50]
    assert "".join(read_utf8(io.BytesIO(text.encode()), block)) == text
    marked = "\ufeff" + text + "\ufeff"
    assert "".join(read_utf8(io.BytesIO(marked.encode()), block)) == text + "\ufeff"  # only the first is a mark


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("data", "offset", "byte"),
    [
        (b"\xff", 0, "0xff"),
        (b"abc\x80def", 3, "0x80"),
        ("é中".encode() + b"x\xfe", 6, "0xfe"),
        (b"caf\xe9 au lait", 3, "0xe9"),
        ("中".encode() * 9 + b"\xe4\xb8x", 27, "0xe4"),
        ("中".encode() + b"\xed\xa0\x80", 3, "0xed"),
        ("abcd👩".encode()[:7], 4, "0xf0"),  # it ends inside a character
    ],
)
def test_wrong_bytes_are_named(block, data, offset, byte):
    with pytest.raises(ValueError, match=f"not UTF-8: byte {offset} is {byte}"):
        list(read_utf8(io.BytesIO(data), block))


@pytest.mark.parametrize("text", ["unicode", "emoji-unbroken", "chinese", "newlines"])
def test_the_bytes_of_tokens_make_the_text(text):
    """Every byte of it, those of characters that are several tokens too."""
    tokenizer = tiny_tokenizer()
    made = [token_bytes(tokenizer, token) for token in tokenizer(TEXTS[text], add_special_tokens=False).input_ids]
    assert b"".join(made) == TEXTS[text].encode()


def test_the_bytes_of_a_vocabulary_that_falls_back_to_bytes():
    words = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "a": 257}
    bpe = Tokenizer(models.BPE(words, [], byte_fallback=True, unk_token="<unk>"))
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe)
    ids = tokenizer("a\u00e9\U0001f600a").input_ids
    assert len(ids) == 8 and b"".join(token_bytes(tokenizer, token) for token in ids).decode() == "a\u00e9\U0001f600a"


FALLBACK = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b"]
DECODED = {
    "bytes": (sorted(pre_tokenizers.ByteLevel.alphabet()), decoders.ByteLevel()),
    "sentencepiece": (FALLBACK, decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )),
    "metaspace": (FALLBACK, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "wordpiece": (["<unk>", "a", "##b", "c", ".", "'", "s", "n't", "\u200d"], decoders.WordPiece(cleanup=True)),
    "suffixes": (["<unk>", "a", "b</w>", "c", "</w>"], decoders.BPEDecoder()),
    "slow": None,
}  # fmt: skip
"""Vocabularies, and how their tokens become text."""


@lru_cache
def decoding_tokenizer(kind: str):
    if kind == "slow":
        return ByT5Tokenizer()
    words, decoder = DECODED[kind]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], byte_fallback=words is FALLBACK))
    made.decoder = decoder
    made.add_special_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>")])
    made.add_tokens([AddedToken("<tool>"), AddedToken("<wide>", lstrip=True, rstrip=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_a_token_has_its_blank(kind):
    """At the beginning of a text these tokenizers leave it out."""
    tokenizer = decoding_tokenizer(kind)
    ids = tokenizer.convert_tokens_to_ids(["▁a", "▁", "b", "<s>"])
    assert [token_bytes(tokenizer, token) for token in ids] == [b" a", b" ", b"b", b"<s>"]


def streamed(tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.add, ids), stream.end()]


@pytest.mark.parametrize("kind", DECODED)
@given(data=st.data())
def test_streamed_text_is_one_decode_of_all(kind, data):
    tokenizer = decoding_tokenizer(kind)
    last = len(tokenizer) - 1
    token = st.integers(0, last) | st.integers(max(0, last - 9), last)  # words and added tokens as often as bytes
    text = st.text("é👩\u200dשa ", max_size=40).map(lambda text: bytes(text, "utf-8"))
    shift = {"bytes": None, "sentencepiece": 1, "metaspace": 1, "slow": 3}.get(kind)
    whole = st.just([]) if shift is None else text.map(lambda coded: [byte + shift for byte in coded])
    ids = data.draw(st.lists(token, max_size=40)) + data.draw(whole)
    want = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    rows = "".join("b" if tokenizer.convert_ids_to_tokens(id)[:3] == "<0x" else "." for id in ids)
    pieces = streamed(tokenizer, ids)
    if max(map(len, rows.split("."))) < 32:
        assert "".join(pieces) == want
    assert len(pieces) == len(ids) + 1 and len(token_texts(tokenizer, ids)) == len(ids)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "metaspace", "slow"])
@pytest.mark.parametrize(
    "text", ["é👩\u200d👩\u200d👧 שלום عربي " * 40, "\u1781\u17d2\u1789\u17bb\u17c6" * 60, "\ufffd" * 80]
)
def test_long_text_in_bytes_comes_as_it_is_written(kind, text):
    tokenizer = decoding_tokenizer(kind)
    shift = {"sentencepiece": 1, "metaspace": 1, "slow": 3}.get(kind)
    names = {word: at for word, at in tokenizer.get_vocab().items()}
    letters = {byte: letter for letter, byte in BYTES.items()}
    ids = [names[letters[byte]] if shift is None else byte + shift for byte in text.encode()]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == text and (max(map(len, pieces)) < 60 or "\ufffd" in text)


@settings(max_examples=30)
@given(st.text(max_size=30))
def test_token_texts_are_the_text(text):
    ids = tiny_tokenizer()(text, add_special_tokens=False).input_ids
    texts = token_texts(tiny_tokenizer(), ids)
    assert len(texts) == len(ids) and "".join(texts) == tiny_tokenizer().decode(ids)
