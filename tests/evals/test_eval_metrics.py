"""Metrics against hand-computed figures, where no case of ``test_eval_published`` stands for the rule."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locret_kit.evals import metrics
from locret_kit.evals.metrics import NoSynonyms, get_metric

CASES = [
    ("first_number", "none", "12345", 0),
    ("has_name", "it was jane.", ["JANE"], 1),
    ("has_all", "Alpha and BETA", ["alpha", "beta", "gamma", "delta"], 0.5),
    ("equal_number", "7.0", 7, 0),  # an integer answer is compared with an integer
    ("equal_number", "", 7, 0),
    ("leading_numbers", "x", [[1, 2]], 0),
    ("leading_numbers", "007 0 " + 5000 * "1", [7, 0, 1], 2 / 3),
    ("gsm8k", " 2+3=5\n#### 1,005\n\nQuestion: 7", "so\n#### 1005", 1),
    ("gsm8k", "the answer is $18.", "#### 18", 1),
    ("gsm8k", "the answer is $18.$", "#### 18", 1),  # the harness strips marks one kind after the other
    ("gsm8k", "18 or 19", "#### 18", 0),
    ("contains", "The caretaker's telephone number is 4471-208.", ["4471-208"], 1),
    ("contains", "It is git-shortlog, which groups by author.", ["git shortlog", "git-shortlog"], 1),
    ("contains", 'It groups by the format string "git-".', ["git shortlog"], 0),
    ("contains", "In 2014.", ["14", "201"], 0),
    ("contains", "A HOUSE\nby the lake", ["the house by a lake"], 1),
    ("contains", "Das Häuschen.", ["Haus", "chen"], 0),
    ("contains", "答案是北京。", ["北京"], 1),
    ("contains", "အဖြေမှာရန်ကုန်ဖြစ်သည်", ["ရန်ကုန်"], 1),
    ("contains", "Это который?", ["кот"], 0),
    ("contains", "anything", ["the", "?", ""], 0),
    ("contains", "The answer is (A).", ["A"], 1),  # an article and a sign are all that there is of an answer
    ("contains", "B, an answer", ["A"], 0),
    ("contains", "It is a >= b.", [">="], 1),
    ("contains", "", ["x"], 0),
    ("choice", "I think D", ["x", "D"], 1),
    ("choice", "Answers differ: B", ["x", "A"], 1),  # a first letter A to D decides, whatever word it begins
    ("choice", "", ["x", "A"], 0),
    ("bug_choice", "B. foo", ["bar", "B"], 1),
    ("leval_choice", "(C) They", "(C) They were", 1),
    ("leval_code", "the final output is 'a' , b", "a b", 1),
    ("leval_judge", "I say false. [fact: True]", "False [fact: True]", 1),
    ("distance", "a b c d e", "a b c d e", 1),
    ("distance", "...", "...", 1),  # no word in it: still the same text
]


@pytest.mark.parametrize(("name", "output", "answer", "wanted"), CASES)
def test_hand_computed(name, output, answer, wanted):
    figures = get_metric(name)(output, answer, {})
    assert math.isclose(next(iter(figures.values())), wanted, abs_tol=1e-6)


def test_what_a_task_says_beside_the_answer():
    assert get_metric("leval_choice")("AC", "ACD", {"several": True}) == {"accuracy": 0.25}
    assert get_metric("classification_first_line")("nothing", ["Group"], {"classes": ["Food"]}) == {"accuracy": 0.0}


def test_jieba_reads_no_cache_that_another_user_left(monkeypatch, tmp_path):
    """It loads ``$TMPDIR/jieba.cache`` by marshal, whoever wrote it."""
    import jieba

    monkeypatch.setattr(jieba, "dt", jieba.Tokenizer())
    monkeypatch.setattr(jieba, "lcut", jieba.dt.lcut)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "jieba.cache").write_bytes(b"left by somebody else")
    metrics._private_folder.cache_clear()
    assert get_metric("qa_f1_jieba")("我来到北京", ["北京。"], {})["f1"] > 0
    folder = Path(jieba.dt.tmp_dir)
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o077 == 0
    assert (tmp_path / "jieba.cache").read_bytes() == b"left by somebody else"


@given(st.lists(st.sampled_from("abcdefg"), max_size=9), st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=9))
def test_f1_is_the_overlap_of_bags(output, answer):
    """Against the definition by precision and recall, matches counted by removing them one by one."""
    left, same = list(answer), 0
    for word in output:
        if word in left:
            left.remove(word)
            same += 1
    precision, recall = same / max(1, len(output)), same / len(answer)
    wanted = 2 * precision * recall / (precision + recall) if same else 0
    assert math.isclose(metrics.f1(output, answer), wanted)


def test_bleu_and_meteor_are_the_libraries():
    import sacrebleu
    from nltk.translate.meteor_score import meteor_score

    one, two = "the quick brown fox jumps over it", "the quick brown dogs jumped over it"
    figures = get_metric("distance")(one, two, {})
    assert math.isclose(figures["bleu"], sacrebleu.sentence_bleu(one, [two]).score / 100)
    stem = meteor_score([two.split()], one.split(), wordnet=NoSynonyms())
    assert figures.get("meteor_stem", stem) == pytest.approx(stem) and 0 < stem < 1 and figures["same"] == 0


@pytest.mark.parametrize(
    ("name", "output", "answers"),
    [
        *(("rouge", "b c", ["x y", "b c"]), ("rouge_lsum", "b c", ["x y", "b c"])),
        *(("distance", "a b c d e", ["x y", "a b c d e"]), ("distance", "...", ["x y", "..."])),
        *(("reconstruction", "a b c d e", answers) for answers in (["a b c d e"], ["x y", "a b c d e"])),
        *((name, "43", ["42", "43"]) for name in ("first_number", "has_word", "equal_number", "last_integer")),
        *(("leval_math", number, ["42", "43"]) for number in ("42", "43")),
        ("leval_choice", "B", ["A", "B"]),
    ],
)  # fmt: skip
def test_several_accepted_answers_count_the_best(name, output, answers):
    assert set(get_metric(name)(output, answers, {}).values()) == {1.0}


def test_unknown_metric_and_missing_library(monkeypatch):
    with pytest.raises(ValueError, match=r"metric='rogue' is unknown. Did you mean 'rouge'"):
        get_metric("rogue")
    monkeypatch.setattr(metrics, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(ImportError, match=r"needs sacrebleu: in the clone, pip install -e '.\[eval\]'"):
        get_metric("reconstruction")("x", "y", {})
