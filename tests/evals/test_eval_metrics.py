"""Metrics against hand-computed figures; each case says which rule of the benchmark it stands for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from locret_kit.evals import metrics
from locret_kit.evals.metrics import NoSynonyms, get_metric

CASES = [
    ("first_number", " 12345. Remember it", "12345", 1),
    ("first_number", "It is 1234567", "12345", 0),  # the whole run of digits counts
    ("first_number", "7, then 12345", "12345", 0),  # the first number counts
    ("first_number", "none", "12345", 0),
    ("has_word", '"ab-cd".', "ab-cd", 1),
    ("has_word", "xab-cd", "ab-cd", 0),
    ("has_name", "it was jane.", ["JANE"], 1),
    ("has_name", "JANET", ["JANE"], 0),
    ("has_all", "Alpha and BETA", ["alpha", "beta", "gamma", "delta"], 0.5),
    ("equal_number", "The answer is 7 of 9", 7, 1),
    ("equal_number", "7.5", 7.5, 1),
    ("equal_number", "7.0", 7, 0),  # an integer answer is compared with an integer
    ("equal_number", "", 7, 0),
    ("leading_numbers", "4, 8, 9", [4, 8, 10, 12], 0.5),
    ("leading_numbers", "x", [[1, 2]], 0),
    ("leading_numbers", "007 0 " + 5000 * "1", [7, 0, 1], 2 / 3),
    ("last_integer", "it returns: `-3`.", -3, 1),
    ("last_integer", "-3 of them", -3, 0),
    ("gsm8k", " 2+3=5\n#### 1,005\n\nQuestion: 7", "so\n#### 1005", 1),
    ("gsm8k", "the answer is $18.", "#### 18", 1),
    ("gsm8k", "the answer is $18.$", "#### 18", 1),  # the harness strips marks one kind after the other
    ("gsm8k", "18 or 19", "#### 18", 0),
    ("qa_f1", "The cat sat", ["a cat", "dog"], 2 / 3),
    ("qa_f1", "", ["a cat"], 0),
    ("contains", "The caretaker's telephone number is 4471-208.", ["4471-208"], 1),
    ("contains", "It is git-shortlog, which groups by author.", ["git shortlog", "git-shortlog"], 1),
    ("contains", 'It groups by the format string "git-".', ["git shortlog"], 0),
    ("contains", "In 2014.", ["14", "201"], 0),
    ("contains", "A HOUSE\nby the lake", ["the house by a lake"], 1),
    ("contains", "Das Häuschen.", ["Haus", "chen"], 0),
    ("contains", "答案是北京。", ["北京"], 1),
    ("contains", "Это который?", ["кот"], 0),
    ("contains", "anything", ["the", "?", ""], 0),
    ("contains", "", ["x"], 0),
    ("qa_f1_first_line", "\ncat\nQuestion: dog", ["cat"], 1),
    ("qa_f1_characters", "北京市。", ["北京"], 0.8),
    ("choice", "B. because", ["x", "B"], 1),
    ("choice", "the answer is: C.", ["x", "C"], 1),
    ("choice", "I think D", ["x", "D"], 1),
    ("choice", "Answers differ: B", ["x", "A"], 1),  # a first letter A to D decides, whatever word it begins
    ("choice", "", ["x", "A"], 0),
    ("bug_choice", "B. foo", ["bar", "B"], 1),
    ("bug_choice", "the correct option is: bar", ["bar", "B"], 1),
    ("bug_choice", "bar", ["bar", "B"], 0),
    ("leval_match", "About Space Tourism!", "space tourism", 1),
    ("leval_match", "3.0", "3", 1),
    ("leval_math", "so The answer is 1,200.", "1200", 1),
    ("leval_math", "he has 4 and 7 left\n\nnext 9", "7", 1),
    ("leval_code", "the final output is 'a' , b", "a b", 1),
    ("leval_judge", "I say false. [fact: True]", "False [fact: True]", 1),
    ("leval_judge", "maybe", "True [fact: True]", 0),
    ("share_of_numbers", "Paragraph 3 or 4", ["Paragraph 3"], 0.5),
    ("share_of_numbers", "none", ["3"], 0),
    ("code_similarity", "\n# note\nx = 1\ny", ["x = 1"], 1),
    ("code_similarity", "# only", ["x = 1"], 0),
    ("rouge", "the cat sat", ["the cat ran"], 2 / 3),
    ("rouge_pltrdy", "", ["the cat"], 0),
    ("rouge_pltrdy", "the cat sat", ["the cat sat"], 1),
    ("rouge_pltrdy_first_line", "the cat\nsat", ["the cat"], 1),
    ("distance", "a b c d e", "a b c d e", 1),
    ("distance", "...", "...", 1),  # no word in it: still the same text
]


@pytest.mark.parametrize(("name", "output", "answer", "wanted"), CASES)
def test_hand_computed(name, output, answer, wanted):
    figures = get_metric(name)(output, answer, {})
    assert math.isclose(next(iter(figures.values())), wanted, abs_tol=1e-6)


@pytest.mark.parametrize(
    ("output", "answer", "several", "wanted"),
    [
        ("B", "B", False, 1),
        ("(C) They", "(C) They were", False, 1),
        ("the answer: A or B", "A", False, 1),  # one option: the first letter in the text
        ("AC", "ACD", True, 0.25),  # a part of several right ones
        ("A. x\nC. y", "AC", True, 1),
        ("AB", "AC", True, 0),
        ("", "A", True, 0),
        ("no idea", "A", True, 1),  # L-Eval takes A where nothing is named
    ],
)
def test_leval_options(output, answer, several, wanted):
    assert get_metric("leval_choice")(output, answer, {"several": several}) == {"accuracy": wanted}


def test_classes_of_longbench():
    score = get_metric("classification_first_line")
    classes = ["Food", "Food and drink", "Group"]
    assert score("\nGroup\nFood", ["Group"], {"classes": classes}) == {"accuracy": 1.0}
    assert score("Group or Food", ["Group"], {"classes": classes}) == {"accuracy": 0.5}
    assert score("Food and drink", ["Food and drink"], {"classes": classes}) == {"accuracy": 1.0}  # a part is no rival
    assert score("nothing", ["Group"], {"classes": classes}) == {"accuracy": 0.0}


def test_chinese_words():
    assert get_metric("qa_f1_jieba")("我来到北京", ["北京。"], {})["f1"] > 0
    assert math.isclose(get_metric("rouge_jieba")("今天天气很好", ["今天天气很好"], {})["rougeL"], 1, abs_tol=1e-6)


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


def test_several_references_count_the_best():
    assert get_metric("rouge")("b c", ["x y", "b c"], {})["rougeL"] == 1
    assert get_metric("rouge_lsum")("b c", ["x y", "b c"], {}) == {"rougeLsum": 1.0}


def test_unknown_metric_and_missing_library(monkeypatch):
    with pytest.raises(ValueError, match=r"metric='rogue' is unknown. Did you mean 'rouge'"):
        get_metric("rogue")
    monkeypatch.setattr(metrics, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(ImportError, match=r"needs sacrebleu: in the clone, pip install -e '.\[eval\]'"):
        get_metric("reconstruction")("x", "y", {})
