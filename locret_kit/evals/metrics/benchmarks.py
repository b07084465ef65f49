"""Metrics: the benchmarks' normalisations around kept libraries.

``METRICS[name](output, answer, extra)`` gives a dict of figures, the main one first, each within [0, 1]. Libraries are
imported by the metric that needs them, so that a missing one is the error of that metric alone.

Sources: InfiniteBench (src/compute_scores.py), LongBench (LongBench/metrics.py, eval.py), L-Eval (Evaluation/),
RULER (scripts/eval/synthetic/constants.py), lm-evaluation-harness (tasks/gsm8k).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher

from ...naming import nearest
from . import Answer, Extra
from .leval import leval_choice, leval_code, leval_judge, leval_match, leval_math
from .normalisation import Figures, as_list, best, f1, jieba_words, normalize, normalize_zh, spaced
from .text_distance import distance, reconstruction, rouge, rouge_jieba, rouge_lsum, rouge_pltrdy

Metric = Callable[[str, Answer, Extra], Figures]


def get_metric(name: str) -> Metric:
    """The metric of a name.

    Raises:
        ValueError: an unknown name; suggests the nearest.
    """
    if name not in METRICS:
        raise ValueError(f"metric={name!r} is unknown.{nearest(name, METRICS)} Known: {', '.join(METRICS)}")
    return METRICS[name]


def qa_f1(output: str, answer: Answer, extra: Extra) -> Figures:
    """Best word F1 over the accepted answers."""
    return {"f1": best(lambda o, a: f1(normalize(o).split(), normalize(a).split()), output, answer)}


def contains(output: str, answer: Answer, extra: Extra) -> Figures:
    """Whether an accepted answer stands in the output, and the best word F1; whole words, after SQuAD's normalisation."""
    letter = r"[^\W\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]"  # of scripts that put spaces between words

    def stands(output: str, answer: str) -> bool:
        wanted = normalize(answer)
        return bool(wanted and re.search(f"(?<!{letter}){re.escape(wanted)}(?!{letter})", normalize(output)))

    return {"contains": best(stands, output, answer), **qa_f1(output, answer, extra)}


def qa_f1_characters(output: str, answer: Answer, extra: Extra) -> Figures:
    """F1 over Chinese characters (InfiniteBench's Zh.QA)."""
    return {"f1": best(lambda o, a: f1(normalize_zh(o), normalize_zh(a)), output, answer)}


def qa_f1_jieba(output: str, answer: Answer, extra: Extra) -> Figures:
    """F1 over Chinese words (LongBench)."""

    def words(text: str) -> list[str]:
        return [word for word in map(normalize_zh, jieba_words(text)) if word]

    return {"f1": best(lambda o, a: f1(words(o), words(a)), output, answer)}


def of_first_line(metric: Metric) -> Metric:
    """The metric of the output's first line (LongBench's few-shot tasks)."""
    return lambda output, answer, extra: metric(output.lstrip("\n").split("\n")[0], answer, extra)


def first_number(output: str, answer: Answer, extra: Extra) -> Figures:
    """The first run of digits is the answer (InfiniteBench's pass keys and numbers)."""
    number = re.search("[0-9]+", output)
    return {"match": float(number is not None and number.group() == str(as_list(answer)[0]))}


def has_word(output: str, answer: Answer, extra: Extra) -> Figures:
    """The answer is one of the words (InfiniteBench's key/value retrieval)."""
    return {"match": float(str(as_list(answer)[0]) in spaced(output, "\n:\"'.,?!{}").split())}


def has_name(output: str, answer: Answer, extra: Extra) -> Figures:
    """The answer, an upper-case name, is one of the words in any case (InfiniteBench's dialogue)."""
    return {"match": float(str(as_list(answer)[0]) in spaced(output, "\n:\"'.,?!{}").upper().split())}


def has_all(output: str, answer: Answer, extra: Extra) -> Figures:
    """Share of the required strings that occur in the output, in any case (RULER)."""
    wanted = as_list(answer)
    return {"recall": sum(str(a).lower() in output.lower() for a in wanted) / len(wanted)}


def equal_number(output: str, answer: Answer, extra: Extra) -> Figures:
    """The first number equals the answer; an integer answer reads no further than the point (InfiniteBench's Math.Find)."""
    number, wanted = re.search(r"\d+\.\d+|\d+", output), as_list(answer)[0]
    if number is None or (isinstance(wanted, int) and "." in number.group()):
        return {"match": 0.0}
    return {"match": float(float(number.group()) == float(wanted))}


def leading_numbers(output: str, answer: Answer, extra: Extra) -> Figures:
    """Share of the answer's numbers that are right before the first wrong one (InfiniteBench's Math.Calc)."""
    wanted = answer[0] if answer and isinstance(answer[0], list) else answer
    # Compared as texts: Python makes no integer of thousands of digits, which a model may write.
    given, right = [n.lstrip("0") or "0" for n in re.findall("[0-9]+", output)], 0
    while right < min(len(given), len(wanted)) and given[right] == str(wanted[right]):
        right += 1
    return {"share": right / len(wanted)}


def last_integer(output: str, answer: Answer, extra: Extra) -> Figures:
    """The last word is the answer (InfiniteBench's Code.Run)."""
    words = spaced(output, "\n.`'\":").split()
    try:
        return {"match": float(bool(words) and int(words[-1]) == int(as_list(answer)[0]))}
    except ValueError:
        return {"match": 0.0}


def gsm8k(output: str, answer: Answer, extra: Extra) -> Figures:
    """The number after ``####``, else the last number ('flexible'), equals the answer's."""

    def clean(text: str) -> str:
        return re.sub("[,$]", "", text).removesuffix(".")

    wanted = clean(str(answer).split("####")[-1].strip())
    output = re.split(r"Question:|</s>|<\|im_end\|>", output)[0]
    strict = re.search(r"#### (-?[0-9.,]+)", output)
    numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", output)
    return {
        "flexible": float(bool(numbers) and clean(numbers[-1]) == wanted),
        "strict": float(strict is not None and clean(strict.group(1)) == wanted),
    }


def _after_prefix(text: str, prefixes: Iterable[str], accepted: Iterable[str]) -> bool | None:
    """Whether an accepted answer follows the first prefix that the text has; None without a prefix."""
    for prefix in prefixes:
        at = text.find(prefix)
        if at >= 0:
            return text[at + len(prefix) + 1 :].startswith(tuple(accepted))
    return None


def choice(output: str, answer: Answer, extra: Extra) -> Figures:
    """The option's letter or text (InfiniteBench's En.MC); ``answer`` is ``[text, letter]``."""
    text, accepted = output.strip(), as_list(answer)
    if not text:
        return {"accuracy": 0.0}
    if text[0] in "ABCD":
        return {"accuracy": float(text[0] in accepted)}
    if text in accepted:
        return {"accuracy": 1.0}
    text = re.sub(" +", " ", spaced(text, "\n\"'.,?!{}"))
    right = _after_prefix(text, ("answer is:", "answer:", "answer is", "option is"), accepted)
    if right is None:
        right = next((word in accepted for word in text.split() if word in "ABCD"), False)
    return {"accuracy": float(right)}


def bug_choice(output: str, answer: Answer, extra: Extra) -> Figures:
    """The option's letter or function (InfiniteBench's Code.Debug); ``answer`` is ``[function, letter]``."""
    text, (name, letter) = output.strip(), answer
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return {"accuracy": 1.0}
    text = spaced(text, "\n`'\"-*").replace("Option", " ").replace("option", " ")
    text = re.sub(" +", " ", text)
    prefixes = ("answer is:", "is:", "answer:", "correct option is:")
    return {"accuracy": float(_after_prefix(text, prefixes, (letter, name)) or False)}


def classification(output: str, answer: Answer, extra: Extra) -> Figures:
    """One over the number of classes that the output names, if the right one is among them (LongBench)."""

    def score(output: str, answer: str) -> float:
        # The published code drops the names that are part of the answer while it walks the list, so the name after a
        # dropped one stays; kept as it is, for the sake of equal figures.
        named = [name for name in extra["classes"] if name in output]
        for name in named:
            if name in answer and name != answer:
                named.remove(name)
        return 1.0 / len(named) if answer in named else 0.0

    return {"accuracy": best(score, output, answer)}


def share_of_numbers(output: str, answer: Answer, extra: Extra) -> Figures:
    """Share of the output's numbers that are the answer's (LongBench's counts and paragraph retrieval)."""

    def score(output: str, answer: str) -> float:
        number, given = re.search(r"\d+", answer), re.findall(r"\d+", output)
        return given.count(number.group()) / len(given) if given and number else 0.0

    return {"share": best(score, output, answer)}


def code_similarity(output: str, answer: Answer, extra: Extra) -> Figures:
    """Similarity of the first line that is code, in whole hundredths (LongBench).

    The published requirements name fuzzywuzzy without python-Levenshtein, so its ratio is difflib's: on code about two
    points below the edit similarity that it gives where both are installed.
    """
    lines = output.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")

    def score(output: str, answer: str) -> float:
        return round(100 * SequenceMatcher(None, output, answer).ratio()) / 100

    return {"edit_similarity": best(score, line, answer)}


_BY_NAME: tuple[Metric, ...] = (
    contains, qa_f1, qa_f1_characters, qa_f1_jieba, first_number, has_word, has_name, has_all, equal_number, leading_numbers,
    last_integer, gsm8k, choice, bug_choice, leval_choice, leval_match, leval_math, leval_code, leval_judge, share_of_numbers,
    code_similarity, rouge, rouge_lsum, rouge_pltrdy, rouge_jieba, distance, reconstruction,
)  # fmt: skip
METRICS = {metric.__name__: metric for metric in _BY_NAME} | {
    f"{metric.__name__}_first_line": of_first_line(metric) for metric in (qa_f1, classification, rouge_pltrdy)
}
