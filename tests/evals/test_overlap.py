"""13-grams of words, against an oracle of tuples written from GPT-3's definition."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from word_grams import grams, words

from locret_kit.samples import overlap

WORDS = st.lists(st.sampled_from(["The", "the,", "river", "River.", "--", "don't", "runs", "é", "2,000"]), max_size=60)


def hashed(text: str) -> overlap.Grams:
    """The module's grams, of 13 words only."""
    ids = overlap.words(text)
    return overlap.grams_of(ids[ids > 0])


@given(WORDS, WORDS)
def test_grams_are_equal_where_13_words_are(some, others):
    text, other = " ".join(some), "\n".join(others)
    mine = hashed(text)
    assert len(set(mine.tolist())) == len(grams(text)) and len(mine) == max(0, len(words(text)) - 12)
    theirs = overlap.union([hashed(other)])
    assert len(set(mine[overlap.among(mine, theirs)].tolist())) == len(grams(text) & grams(other))


@given(st.lists(st.integers(0, 30), max_size=120), st.integers(0, 100), st.integers(1, 40))
def test_a_text_without_grams_has_none_of_them_and_every_other_word(numbers, start, length):
    text = "  ".join(f"Word{n}," for n in numbers)
    held = " ".join(f"word{n}" for n in numbers[start : start + length])
    left = overlap.without(text, overlap.union([hashed(held)]))
    assert not grams(left) & grams(held)
    if len(set(numbers)) == len(numbers):  # nothing else can be covered
        gone = numbers[start : start + length] if len(numbers[start : start + length]) > 12 else []
        assert words(left) == [f"word{n}" for n in numbers if n not in gone]


def test_copies_share_more_than_half():
    book = " ".join(f"page{i} says{i} that{i}" for i in range(3000))
    known = overlap.union([overlap.grams(book + " What is on the first page?")])
    assert overlap.is_copy(book + " Who wrote all of this?", known)
    other = " ".join(f"leaf{i} tells{i} this{i}" for i in range(3000))
    assert overlap.is_copy(book[: len(book) * 6 // 10] + other[: len(other) * 4 // 10], known)
    assert not overlap.is_copy(book[: len(book) * 4 // 10] + other[: len(other) * 6 // 10], known)
    assert not overlap.is_copy(other, known) and not overlap.is_copy(other, overlap.union([]))
    short = overlap.union([overlap.grams("What is it?")])
    assert overlap.is_copy("what is IT", short) and not overlap.is_copy("What is he?", short)
    assert not overlap.is_copy(" -- ", short)


@pytest.mark.parametrize("length", [60, 3000, 20_000])
@pytest.mark.parametrize("first", [0x4E00, 0x0E01, 0x1000, 0x30A1], ids=["Chinese", "Thai", "Burmese", "Japanese"])
def test_copies_in_scripts_without_blanks_between_words(first, length):
    """The same document under another question is a copy, and another document is none; what is left has no gram of it."""

    def document(seed: int) -> str:
        draw = random.Random(seed)
        return "".join(chr(first + draw.randrange(40)) + "。" * (i % 20 == 19) for i in range(length))

    book, other = document(0), document(1)
    known = overlap.union([overlap.grams(f"{book}\n谁来了。")])
    assert overlap.is_copy(f"{book}\n什么时候。", known)
    assert not overlap.is_copy(f"{other}\n谁来了。", known)
    assert overlap.without(f"{other}\n{book}", overlap.union([overlap.grams(book)])).startswith(other)
    assert not overlap.among(overlap.grams(overlap.without(f"{other}\n{book}", known)), known).any()


def test_punctuation_is_no_word_and_hides_none():
    one = "one two three four five six seven eight nine ten eleven twelve thirteen"
    other = one.replace(" ", " -- ").upper().replace("FIVE", "(fi-ve)") + "!"
    assert (overlap.grams(one) == overlap.grams(other)).all() and len(overlap.grams(one)) == 1
    assert len(overlap.words(other)) == len(other.split()) == 25 and (overlap.words(other) > 0).sum() == 13
