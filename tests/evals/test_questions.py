"""Questions about a document in ten wordings, over texts of one's own."""

from __future__ import annotations

from itertools import takewhile

from tiny_text import tiny_tokenizer

from locret_kit.evals.tasks import find_tasks
from locret_kit.evals.tasks.task import Example
from locret_kit.samples import overlap
from locret_kit.samples.haystack import load_text
from locret_kit.samples.needles import WORDINGS
from locret_kit.samples.synthetic import FACTS, HELD_FACTS, WORDS


def test_questions_about_a_document_begin_alike(tmp_path):
    (tmp_path / "text.txt").write_text(load_text("pydoc")[:60_000])
    (task,) = find_tasks(["questions"], haystacks=[str(tmp_path)])
    made = [task.make(Example(task, tiny_tokenizer(), 1500, i)) for i in range(5)]
    first, other = made[:4], made[4]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*(one.prompt for one in first), strict=False))
    document = "".join(letters[0] for letters in same)
    assert len({one.answer for one in first}) == 4 and not document.startswith(other.prompt[:200])
    for i, one in enumerate(first):
        said, question = next(
            (w.needle.format(key=one.answer), w.question) for w in WORDINGS if w.question in one.prompt
        )
        assert document.count(said) == 1 and one.prompt.count(question) == 1
        assert abs(document.index(said) / len(document) - (i + 0.5) / 4) < 0.1
        assert len(tiny_tokenizer()(one.prompt).input_ids) <= 1500


def test_wordings_are_not_those_of_training():
    trained = [part for fact in (*FACTS, *HELD_FACTS) for part in fact[1:]] + [
        *WORDS["prompts"],
        *WORDS["held_prompts"],
    ]
    known = overlap.union([overlap.grams(text) for text in trained])
    for words in WORDINGS[1:]:
        assert not overlap.among(overlap.grams(words.needle), known).any()
        assert words.question not in {fact[2] for fact in FACTS}
    assert len(WORDINGS) == 10 and len({words.question for words in WORDINGS}) == 10


def test_a_folder_of_texts_is_one_haystack(tmp_path):
    (tmp_path / "b.txt").write_text("Second.\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.md").write_text("First.\n")
    assert load_text(tmp_path) == "First.\n\nSecond."
