"""Synthetic tasks: length, depth, one needle, one answer, the same bytes everywhere."""

import gzip
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import tiny_tokenizer

from locret_kit.evals import tasks
from locret_kit.evals.metrics import get_metric
from locret_kit.evals.tasks import ALIASES, HAYSTACK_TASKS, REAL_TEXT_TASKS, STANDALONE_TASKS, find_tasks, known_tasks
from locret_kit.evals.tasks.synthetic_tasks import find, insert
from locret_kit.evals.tasks.task import Example, count_ids, spread_depth
from locret_kit.samples import overlap
from locret_kit.samples.haystack import ENDINGS, WORDINGS, load_text
from locret_kit.samples.synthetic import FACTS, HELD_FACTS, WORDS, synthetic_sample
from locret_kit.text.template import render_prompt

SYNTHETIC = [*HAYSTACK_TASKS, *STANDALONE_TASKS]
LONG = {"ruler.cwe": 6144, "ruler.vt": 2048, "ruler.niah_multikey_uuid": 4096}
"""Lengths at which a task's shortest prompt, or its coarse items, fit under the tiny tokenizer."""


def example(name: str, sample: int = 0, haystack: str = "pydoc", length: int | None = None, chat="auto", seed: int = 0):
    (task,) = find_tasks([name], haystacks=[haystack])
    return task, task.make(Example(task, tiny_tokenizer(), length or LONG.get(name, 1024), sample, seed, chat))


@pytest.mark.parametrize("name", [*SYNTHETIC, *REAL_TEXT_TASKS])
@pytest.mark.parametrize("chat", ["auto", "always"])
def test_lengths_are_met_within_one_per_cent(name, chat):
    length = LONG.get(name, 1024)
    _, made = example(name, 1, chat=chat)
    size = count_ids(tiny_tokenizer(), made.prompt, made.special)
    least = 0.9 if name == "questions" else 0.99  # its document has room for the longest of four questions
    assert least * length - 1 <= size <= length


@pytest.mark.parametrize("name", ["passkey", "questions"])
def test_an_open_question_has_no_first_words_of_its_answer(name):
    (task,) = find_tasks([name], haystacks=["pydoc"])
    for chat, said in (("never", "open"), ("always", "open chat")):
        plain, made = (task.make(Example(task, tiny_tokenizer(), 1024, 1, chat=chat, ending=one)) for one in ENDINGS)
        size = count_ids(tiny_tokenizer(), made.prompt, made.special)
        assert made.extra["ending"] == said and 0.9 * 1024 <= size <= 1024 and made.answer == plain.answer
        assert plain.prompt.endswith((" is", "number", "=", "counted", "figure"))
        after = render_prompt(tiny_tokenizer(), "?", chat=chat == "always")[1].lstrip("\n")
        assert made.prompt.endswith(after) and after.startswith("?")
    assert plain.extra["ending"] == "chat"


@given(st.integers(700, 3000), st.integers(0, 40), st.sampled_from(["repeated", "pydoc"]))
@settings(max_examples=8)
def test_any_length_and_sample_of_a_needle(length, sample, haystack):
    task, made = example("ruler.niah_single", sample, haystack, length)
    size = count_ids(tiny_tokenizer(), made.prompt, made.special)
    assert 0.99 * length - 1 <= size <= length
    assert made.prompt.count(made.answer[0]) == 1
    assert get_metric(task.metric)(f" {made.answer[0]}.", made.answer, {}) == {"recall": 1.0}


def test_a_question_through_the_template_is_no_longer_than_asked():
    """Every length, also where a letter after a blank is no token, as of characters."""
    (task,) = find_tasks(["passkey"])
    for length in range(250, 266):
        made = task.make(Example(task, tiny_tokenizer(), length, 0, chat="always", ending="open"))
        assert 0.99 * length - 1 <= count_ids(tiny_tokenizer(), made.prompt, made.special) <= length


def test_special_tokens_count():
    (task,) = find_tasks(["passkey"], haystacks=["pydoc"])
    bos = tiny_tokenizer(bos=True)
    made = task.make(Example(task, bos, 600, 0))
    assert made.special and 594 <= len(bos(made.prompt).input_ids) <= 600


def needle_sentence(name: str, answer: str) -> str:
    if name in ("R.PassKey", "grid"):
        return f"The pass key is {answer}. Remember it. {answer} is the pass key.\n"
    return f"The sequence of digits is {answer}. Remember it. {answer} is the sequence of digits.\n"


@pytest.mark.parametrize("name", ["R.PassKey", "R.Number", "grid"])
@pytest.mark.parametrize("haystack", ["repeated", "pydoc"])
def test_digits_are_hidden_once_at_the_depth_asked_for(name, haystack):
    for sample in (0, 1, 2, 5, 9):
        task, made = example(name, sample, haystack, 2048)
        asked = sample % 11 / 10 if name == "grid" else spread_depth(sample)
        sentence = needle_sentence(name, made.answer)
        assert made.prompt.count(sentence) == 1 and made.prompt.count(made.answer) == 2
        before, after = made.prompt.split(sentence)
        start = before.index("\n\n") + 2  # behind the instruction
        stop = after.rindex("What is the")
        really = (len(before) - start) / (len(before) - start + stop)
        assert abs(really - asked) < 0.06, (sample, really)
        assert abs(made.depth - asked) < 0.06
        assert get_metric(task.metric)(f" {made.answer}.", made.answer, {}) == {"match": 1.0}


@pytest.mark.parametrize(
    "name",
    [name for name in HAYSTACK_TASKS if "niah" in name] + ["ruler.niah_multikey_line", "ruler.niah_multikey_uuid"],
)
@pytest.mark.parametrize("haystack", ["repeated", "pydoc"])
def test_ruler_needles_are_all_there_and_only_the_asked_ones_are_answers(name, haystack):
    for sample in range(3):
        task, made = example(name, sample, haystack)
        found = re.findall(r"One of the special magic (?:numbers|uuids) for (\S+) is: ([\w-]+)\.", made.prompt)
        question = made.prompt[made.prompt.rindex("\nWhat") :]
        keys = {key for key, _ in found if re.search(rf"(?<![\w-]){re.escape(key)}(?![\w-])", question)}
        assert sorted(value for key, value in found if key in keys) == sorted(made.answer)
        values = [value for _, value in found]
        assert len(set(values)) == len(values)
        assert all(made.prompt.count(value) == 1 for value in made.answer)
        wanted = {"ruler.niah_multivalue": (1, 4), "ruler.niah_multiquery": (4, 4)}.get(name, (1, 1))
        assert (len(keys), len(made.answer)) == wanted
        scored = get_metric(task.metric)(" and ".join(made.answer), made.answer, {})
        assert scored == {"recall": 1.0}


def test_key_value_pairs():
    for sample in range(4):
        task, made = example("kv", sample)
        body = made.prompt[made.prompt.index("{") : made.prompt.index("}") + 1]
        pairs = json.loads(body)
        asked = re.search(r'Key: "([^"]+)"', made.prompt).group(1)
        assert pairs[asked] == made.answer and made.prompt.count(made.answer) == 1
        assert len(pairs) == body.count(": ")  # no key twice
        at = list(pairs).index(asked) / max(1, len(pairs) - 1)
        assert abs(at - made.depth) < 1e-3 and abs(at - spread_depth(sample)) < 0.3
        assert get_metric(task.metric)(f' "{made.answer}"', made.answer, {}) == {"match": 1.0}


def test_math_find_answers_follow_from_the_list():
    wanted = {
        "largest number": lambda x: max(x),
        "second largest number": lambda x: max(set(x) - {max(x)}),
        "third largest number": lambda x: sorted(set(x))[-3],
        "smallest number": lambda x: min(x),
        "second smallest number": lambda x: min(set(x) - {min(x)}),
        "third smallest number": lambda x: sorted(set(x))[2],
        "median number": lambda x: (sorted(x)[(len(x) - 1) // 2] + sorted(x)[len(x) // 2]) / 2,
    }
    for sample in range(14):
        task, made = example("math_find", sample)
        numbers = json.loads(made.prompt[made.prompt.index("[") : made.prompt.index("]") + 1])
        which = re.search(r"What is the (.+) in the following", made.prompt).group(1)
        assert made.answer == wanted[which](numbers)
        assert get_metric(task.metric)(f" {made.answer}.", made.answer, {}) == {"match": 1.0}
    assert find([1, 2], "median number") == 1.5 and isinstance(find([1, 3], "median number"), int)
    with pytest.raises(ValueError, match="third largest"):
        find([1, 2, 2], "third largest number")


def test_variable_chain():
    for haystack in ("repeated", "pydoc"):
        _, made = example("ruler.vt", 1, haystack)
        task = made.prompt[made.prompt.rindex("Memorize and track") :]
        value = re.search(r"assigned the value (\d{5}) in the text above", task).group(1)
        chain, where = [], task.index(f"VAR {made.answer[0]} = {value}.")
        chain.append(made.answer[0])
        while link := re.search(rf"VAR ([A-Z]{{5}}) = VAR {chain[-1]}\.", task):
            assert link.start() > where  # in the order of assignment
            where = link.start()
            chain.append(link.group(1))
        assert chain == made.answer and len(set(chain)) == 5
        assert task.count(f"= {value}.") == 1


def test_common_and_frequent_words():
    _, made = example("ruler.cwe")
    task = made.prompt[made.prompt.rindex("Below is a numbered list") :]
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", task))
    assert {word for word, n in counts.items() if n == 30} == set(made.answer) and len(made.answer) == 10
    assert {n for word, n in counts.items() if word not in made.answer} == {3}

    _, made = example("ruler.fwe")
    coded = made.prompt[made.prompt.index("coded words. ") + 13 : made.prompt.index("\nQuestion:")].split()
    ranked = Counter(coded).most_common()
    assert ranked[0][0] == "..." and {word for word, _ in ranked[1:4]} == set(made.answer)
    assert ranked[3][1] > ranked[4][1]


def test_a_text_of_control_tokens_is_fitted_in_a_few_steps(tmp_path, monkeypatch):
    """Each is one token of the text, and several of the prompt."""
    (tmp_path / "text.txt").write_text("<|im_end|> He came.\n" * 200)
    tried, piece = [], tasks._piece
    monkeypatch.setattr(tasks, "_piece", lambda *args: tried.append(args) or piece(*args))
    _, made = example("fidelity.summary", haystack=str(tmp_path / "text.txt"), length=300)
    assert 270 < count_ids(tiny_tokenizer(), made.prompt, made.special) <= 300 and len(tried) < 20


def test_reconstruction_carries_the_text_it_asks_for():
    _, made = example("fidelity.reconstruct", chat="never")
    assert made.extra["source"] in made.prompt and made.prompt.index(made.extra["source"]) < 20


@pytest.mark.parametrize("chat", ["always", "never"])
def test_reconstruction_quotes_the_words_in_front_of_the_passage(chat):
    text, depths = load_text("pydoc"), []
    for sample in range(6):
        task, made = example("reconstruction", sample, chat=chat)
        article = made.prompt.split("Article: ")[1].split("\n\nRepeat the above")[0]
        at = article.index(made.answer)
        quote = made.prompt[made.prompt.rindex("Repeat") :].split("\n\n", 1)[1]
        quote = quote.split("assistant\n")[-1] if chat == "always" else quote.strip()
        assert article[:at].endswith(quote) and article.count(quote) == 1 and len(quote.split()) == 12
        assert article in text and made.prompt.count(made.answer) == 1 and made.prompt.endswith(quote)
        assert abs(count_ids(tiny_tokenizer(), made.answer, False) - task.max_new_tokens) <= 1
        depths.append(made.depth)
        found = get_metric(task.metric)(made.answer, made.answer, {})
        assert found == pytest.approx({"rougeL": 1, "rouge1": 1, "rouge2": 1, "bleu": 1})
    assert len(set(depths)) == 6
    off = sorted(abs(depth - spread_depth(sample)) for sample, depth in enumerate(depths))
    assert off[3] < 0.2  # not all: a page of listings, which Pythons have in other places, has nothing to quote
    with pytest.raises(ValueError, match="length=200 is too short"):
        example("reconstruction", length=200)


def test_perplexity_continues_the_prompt():
    _, made = example("perplexity")
    assert made.continuation and count_ids(tiny_tokenizer(), made.continuation, False) >= 100
    assert made.prompt + made.continuation in load_text("pydoc")


def test_another_seed_gives_other_bytes_and_the_same_seed_the_same():
    for name in SYNTHETIC:
        one, same, other = (example(name, 1, seed=seed)[1].prompt for seed in (0, 0, 1))
        assert one == same and one != other


def digests() -> list[str]:
    """Digests of a prompt of each of several tasks, and of a sample to train on."""
    tasks = find_tasks(["passkey", "kv", "ruler.niah_multiquery", "ruler.fwe", "ruler.vt"], haystacks=["pydoc"])
    made = [task.make(Example(task, tiny_tokenizer(), 2048, 3)).prompt for task in tasks]
    made.append(repr(synthetic_sample(tiny_tokenizer(), [load_text("pydoc")], 900, 3, 4)))
    return [hashlib.sha256(prompt.encode()).hexdigest() for prompt in made]


def test_the_same_bytes_in_another_process():
    """Also under another hash seed."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(path) for path in (root, root / "kernels", root / "tests" / "support", Path(__file__).parent)]
    code = "import sys; sys.path[:0] = sys.argv[1:]; import test_eval_tasks; print(*test_eval_tasks.digests())"
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "1", "PATH": ""},
    )  # fmt: skip
    assert done.stdout.split() == digests()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(1, 30))
def test_insert_keeps_every_line_and_adds_the_sentences_in_order(depths, lines):
    body = "\n".join(f"line {i}." for i in range(lines))
    sentences = [f"NEW{i}." for i in range(len(depths))]
    made, found = insert(body, sentences, sorted(depths))
    assert re.findall(r"NEW\d\.", made) == sentences
    assert re.findall(r"line \d+\.", made) == body.split("\n")
    assert found == sorted(found)


def test_depths_spread_evenly_whatever_their_number():
    assert [spread_depth(i) for i in range(3)] == [0.5, 0.25, 0.75]
    for n in (7, 20, 63):
        depths = sorted(spread_depth(i) for i in range(n))
        assert len(set(depths)) == n
        assert max(b - a for a, b in zip([0, *depths], [*depths, 1], strict=True)) <= 2 / (n + 1) + 1e-9


def test_fidelity_of_a_likelihood_is_no_task():
    with pytest.raises(ValueError, match="fidelity:perplexity"):
        find_tasks(["fidelity:perplexity"], haystacks=["pydoc"])


def test_where_a_haystack_lies_does_not_matter(tmp_path):
    """Rows name the file alone, and the same pieces of it are drawn wherever it is; two of one name are refused."""
    made = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        boats = "The boats came in. Nobody saw them before noon. Some were blue. " * 200
        (tmp_path / folder / "boats.txt").write_text(boats)
        task, needle = example("passkey", haystack=str(tmp_path / folder / "boats.txt"))
        made.append((task.haystack, needle.prompt))
    assert made[0] == made[1] and made[0][0] == "boats.txt"
    with pytest.raises(ValueError, match="b/boats.txt have one name, which rows could not tell apart"):
        find_tasks(["passkey"], haystacks=[str(tmp_path / folder / "boats.txt") for folder in ("a", "b")])


def test_every_listed_name_is_a_task():
    made = *ALIASES, *HAYSTACK_TASKS, *STANDALONE_TASKS, *REAL_TEXT_TASKS
    synthetic = [name for name in known_tasks() if name in made]
    assert len(find_tasks(synthetic, haystacks=["pydoc"])) == len({ALIASES.get(name, name) for name in synthetic})
    assert len(find_tasks(["ruler"], haystacks=["pydoc", "repeated"])) == 2 * 6 + 4


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("latin.txt", "Der Käse".encode("latin-1"), "latin.txt: the text is not UTF-8: byte 5 is 0xe4"),
        ("nul.txt.gz", gzip.compress(b"The\0boats", mtime=0), "nul.txt.gz: the text is not UTF-8: byte 3"),
        ("cut.txt.gz", gzip.compress(b"The boats came in. " * 99, mtime=0)[:-9], "is no whole gzip file"),
    ],
)
def test_a_haystack_that_cannot_be_read_is_refused(tmp_path, name, data, said):
    """Bytes of another encoding once became replacement characters, and a cut archive a traceback."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=said):
        find_tasks(["passkey"], haystacks=[str(tmp_path / name)])


def test_a_haystack_lacks_mark_and_foreign_line_ends(tmp_path):
    """As in a text that is read: they are neither words nor tokens of their own."""
    zipped = gzip.compress(b"\xef\xbb\xbfThe\nboats\n")
    for name, data in (("mark.txt", b"\xef\xbb\xbfThe\r\nboats\r"), ("mark.txt.gz", zipped)):
        (tmp_path / name).write_bytes(data)
        assert load_text(str(tmp_path / name)) == "The\nboats\n"


def test_questions_about_a_document_begin_alike(tmp_path):
    (tmp_path / "text.txt").write_text(load_text("pydoc")[:60_000])
    (task,) = find_tasks(["questions"], haystacks=[str(tmp_path)])
    made = [task.make(Example(task, tiny_tokenizer(), 1500, i)) for i in range(5)]
    first, other = made[:4], made[4]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*(one.prompt for one in first), strict=False))
    document = "".join(letters[0] for letters in same)
    assert len({one.answer for one in first}) == 4 and not document.startswith(other.prompt[:200])
    for i, one in enumerate(first):
        wording = next(w for w in WORDINGS if w.question in one.prompt)
        said = wording.needle.format(key=one.answer)
        assert document.count(said) == 1 and one.prompt.count(wording.question) == 1
        assert abs(document.index(said) / len(document) - (i + 0.5) / 4) < 0.1
        assert len(tiny_tokenizer()(one.prompt).input_ids) <= 1500


@pytest.mark.parametrize("haystack", ["repeated", "pydoc"])
def test_questions_that_have_no_room_are_an_error(haystack):
    """One line of the haystack is the least; where it had no room, its prompt was looked for without end."""
    (task,), tokenizer = find_tasks(["questions"], haystacks=[haystack]), tiny_tokenizer()
    made = {length: Example(task, tokenizer, length, 0).made() for length in range(230, 360, 10)}
    assert all(one.error is not None or len(one.ids) <= length for length, one in made.items())
    assert {"is too short for 4 needles" in str(one.error) for one in made.values()} == {True, False}


def test_wordings_are_not_those_of_training():
    trained = [part for fact in (*FACTS, *HELD_FACTS) for part in fact[1:]]
    trained += [*WORDS["prompts"], *WORDS["held_prompts"]]
    known = overlap.union([overlap.grams(text) for text in trained])
    for words in WORDINGS[1:]:
        assert not overlap.among(overlap.grams(words.needle), known).any()
        assert words.question not in {fact[2] for fact in FACTS}
    assert len(WORDINGS) == 10 and len({words.question for words in WORDINGS}) == 10
