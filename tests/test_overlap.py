"""13-grams of words, against an oracle of tuples written from GPT-3's definition."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts_loaded import load_script
from tiny_tokenizer import save_tiny_backbone

from locret_kit.samples import overlap
from locret_kit.samples.text import load_text

WORDS = st.lists(st.sampled_from(["The", "the,", "river", "River.", "--", "don't", "runs", "é", "2,000"]), max_size=60)


def words(text: str) -> list[str]:
    """Lower-cased words between white space without punctuation."""
    bare = (word.lower().translate(str.maketrans("", "", string.punctuation)) for word in text.split())
    return [word for word in bare if word]


def grams(text: str) -> set[tuple[str, ...]]:
    """Every 13 words in a row."""
    found = words(text)
    return {tuple(found[i : i + 13]) for i in range(len(found) - 12)}


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


def test_punctuation_is_no_word_and_hides_none():
    one = "one two three four five six seven eight nine ten eleven twelve thirteen"
    other = one.replace(" ", " -- ").upper().replace("FIVE", "(fi-ve)") + "!"
    assert (overlap.grams(one) == overlap.grams(other)).all() and len(overlap.grams(one)) == 1
    assert len(overlap.words(other)) == len(other.split()) == 25 and (overlap.words(other) > 0).sum() == 13


# ---- the script -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    return load_script("scripts/overlap.py")


def rows_of(out: str) -> dict[str, list[str]]:
    """Cells of each row after its name, header and ruler aside."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    return {name: rest for name, *rest in cells[2:]}


def test_shared_grams_are_counted_by_source(script, tmp_path, capsys):
    """Two records to train on; an evaluation folder whose first file has 20 words of each, and its second none."""
    first, second = (" ".join(f"{word}{i}" for i in range(60)) for word in ("apple", "pear"))
    other = " ".join(f"plum{i}" for i in range(30))
    for name, inputs in (("a.jsonl", [first]), ("b.jsonl", [second, other])):
        (tmp_path / name).write_text("".join(json.dumps({"input": text}) + "\n" for text in inputs))
    evaluation = tmp_path / "evaluation"
    evaluation.mkdir()
    both = " ".join([*first.split()[5:25], *second.upper().split()[30:50]])
    (evaluation / "both.txt").write_text(both + "\n\n" + both)
    (evaluation / "none.txt").write_text(other.replace("7", "eight"))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- overlap:begin -->\nold\n<!-- overlap:end -->\nAfter.\n")
    training = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert script.main([*training, "--against", str(evaluation), "--write", str(page)]) == 0
    out = capsys.readouterr().out
    found = rows_of(out)
    n, a, b = len(grams(both + " " + both)), len(grams(both) & grams(first)), len(grams(both) & grams(second))
    assert (n, a, b) == (40, 8, 8)
    assert found["both.txt"] == ["40", "8 (20.00%)", "8 (20.00%)", "16 (40.00%)", "20"]
    assert found["none.txt"][1:] == ["0 (0.00%)"] * 3 + ["0"]
    assert page.read_text() == f"Before.\n<!-- overlap:begin -->\n{out}<!-- overlap:end -->\nAfter.\n"


def test_recipes_heads_and_tasks_are_read_as_they_are_run(script, tmp_path, capsys):
    """Needles' instructions are also a training prompt's; what a run's training.json names is what it trained on."""
    backbone, heads = save_tiny_backbone(tmp_path / "backbone"), tmp_path / "heads"
    heads.mkdir()
    (tmp_path / "records.jsonl").write_text(json.dumps({"instruction": load_text("pydoc"), "output": "Yes."}) + "\n")
    data = {"sources": [str(tmp_path / "records.jsonl")], "texts": ["pydoc"], "split": "train"}
    (heads / "training.json").write_text(json.dumps({"data": data}))
    argv = ["tiny", str(heads), "--against", "R.PassKey", "pydoc", "repeated", "--tokenizer", str(backbone)]
    assert script.main(argv) == 0
    found = rows_of(capsys.readouterr().out)
    trained = set().union(*map(grams, script.training_texts("tiny")))
    ((name, text),) = script.evaluation_texts("R.PassKey", str(backbone))
    assert name == "R.PassKey" and "pass key is" in text
    shared = len(grams(text) & trained)
    assert shared > 0 and found[name][0] == f"{len(grams(text)):,}"
    assert [cell.split(" ")[0] for cell in found[name][1:4]] == [str(shared), "0", str(shared)]
    assert all("(100.00%)" in cell for cell in found["pydoc"][1:4]) and found["repeated"][3] == "0 (0.00%)"


def test_errors_are_one_line(script, tmp_path, capsys):
    assert script.main(["nowhere", "--against", "pydoc"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("overlap.py: source=nowhere must be")
