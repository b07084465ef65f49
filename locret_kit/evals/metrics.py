"""Metrics: the benchmarks' normalisations around kept libraries.

``METRICS[name](output, answer, extra)`` gives a dict of figures, the main one first, each within [0, 1]. Libraries are
imported by the metric that needs them, so that a missing one is the error of that metric alone.

Sources: InfiniteBench (src/compute_scores.py), LongBench (LongBench/metrics.py, eval.py), L-Eval (Evaluation/),
RULER (scripts/eval/synthetic/constants.py), lm-evaluation-harness (tasks/gsm8k).
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..naming import check_name, install_line
from ..samples.overlap import UNSPACED

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Answer = Any
"""The reference as the data set has it: a string, a number, or a list of accepted or required ones."""
Extra = Mapping[str, Any]
"""Further needs of a metric, by name, such as a task's classes."""
Scores = dict[str, float]
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"  # noqa: RUF001
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)


def library(name: str) -> ModuleType:
    """A module of the `eval` extra. Raises ImportError where it is not installed; says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"this needs {name.split('.')[0]}: {install_line('eval')}") from error


def normalize(text: str) -> str:
    """Lower case, no punctuation, no English articles, single spaces (SQuAD's normalisation)."""
    return without_articles(text.lower())


def without_articles(text: str) -> str:
    """No punctuation, no English articles in lower case, single spaces."""
    kept = "".join(c for c in text if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def normalize_zh(text: str) -> str:
    """Lower case, no punctuation (Chinese included), no white space."""
    dropped = string.punctuation + CHINESE_PUNCTUATION
    return "".join("".join(c for c in text.lower() if c not in dropped).split())


def f1(output: Sequence[str], answer: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of words."""
    same = sum((Counter(output) & Counter(answer)).values())
    return 2 * same / (len(output) + len(answer)) if same else 0.0


def spaced(text: str, characters: str) -> str:
    """The text with each of the characters turned into a space."""
    return text.translate(dict.fromkeys(map(ord, characters), " "))


def as_list(answer: Answer) -> list:
    return list(answer) if isinstance(answer, (list, tuple)) else [answer]


def best(score: Callable[[str, str], float], output: str, answer: Answer) -> float:
    return max((float(score(output, str(a))) for a in as_list(answer)), default=0.0)


def jieba_words(text: str) -> list[str]:
    jieba = library("jieba")
    jieba.setLogLevel(logging.WARNING)
    jieba.dt.tmp_dir = _private_folder().name
    return jieba.lcut(text, cut_all=False)


@lru_cache(maxsize=1)
def _private_folder() -> TemporaryDirectory[str]:
    """A private cache folder for jieba's dictionary. jieba unpickles any file it finds there, and anybody can write to
    a shared /tmp."""
    return TemporaryDirectory(prefix="jieba.")


def leval_choice(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """Letters of the right options; a part of several right ones is worth 0.25 (L-Eval's QuALITY, TPO, Coursera).

    ``extra['several']``: more than one option may be right (Coursera).
    """
    given = _leval_letters(output, several=bool(extra.get("several")))
    return {"accuracy": best(lambda _, a: _exact(given, re.sub("[^A-D]", "", a.split()[0]) or "A"), output, answer)}


def _exact(given: str, wanted: str) -> float:
    """An answer of letters A to D: 1, or 0.25 for a part of them; else equal as numbers, or contained, spaces and case
    aside. An answer of punctuation alone (an empty list that code prints) counts as letters, as published."""
    letters, wanted_letters = map(without_articles, (given, wanted))
    if set(wanted_letters) <= set("ABCD"):
        return 1.0 if letters == wanted_letters else 0.25 * (set(letters) <= set(wanted_letters))
    try:
        return float(float(given) == float(wanted))
    except ValueError:
        return float(wanted.lower().replace(" ", "") in given.lower().replace(" ", ""))


def _leval_letters(output: str, several: bool) -> str:
    """The letters that an answer names; L-Eval's rules in their order."""
    if not output.strip():
        return "None"
    if output in "ABCD":
        return output
    if not several and (match := re.search("[ABCD]", output)):
        return match.group()
    run = re.match("[ABCD]*", output)
    head = run.group() if run else ""
    if len(head) > 1:
        return "".join(sorted(set(head)))
    rest = output[len(head) :].split("Question")[0]
    letters = set(head) | set(re.sub("[^A-D]", "", "".join(re.findall(r"\s*[A-Z](?=[\s.)])", rest))))
    if not letters and (match := re.search("[ABCD]+", rest)):
        return match.group()
    return "".join(sorted(letters)) or "A"


def leval_match(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """Equal as numbers, else the answer occurs in the output, spaces and case aside (L-Eval's topic retrieval)."""
    return {"match": _exact(output, str(answer))}


def leval_math(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """The number of "The answer is ...", else the first paragraph's last (L-Eval's GSM)."""
    return {"match": best(lambda o, a: _exact(_leval_number(o), _leval_number(a)), output, answer)}


def _leval_number(text: str) -> str:
    match = re.search(r"The answer is (\S+)", text)
    words = [match.group(1)] if match else text.split("\n\n")[0].split(" ")[::-1]
    word = next((word for word in words if any(map(str.isdigit, word))), "")
    return "".join(filter(str.isdigit, word.split(".")[0]))


def leval_code(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """The printed value stands among the output's last words, or after "the final output" (L-Eval's CodeU)."""
    wanted, text = _plain_code(str(answer)), _plain_code(output)
    for phrase in ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed"):
        text = text.replace(phrase, "")
    some = len(str(answer).split()) + 3
    behind = text.split("the final output")
    words = re.split(r"\s+", behind[-1])[:some] if len(behind) > 1 else re.split(r"\s+", text)[-some:]
    return leval_match(" ".join(words), wanted, extra)


def _plain_code(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    for old, new in ((",", ""), ("'", ""), ("\\", ""), (".0", ""), ("] [", "]["), ("[ [", "[["), ("] ]", "]]")):
        text = text.replace(old, new)
    return text


def leval_judge(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """Loyalty to the document: the first of true and false (L-Eval's SFcition; its second figure, the fact asked for
    without the document, does not depend on the cache and is not measured)."""
    wanted = str(answer).lower().split("[fact:")[0].strip()
    words = output.lower().split("[fact:")[0].split()
    given = next((name for word in words for name in ("true", "false") if name in word), "")
    return {"match": float(given == wanted)}


@lru_cache(maxsize=1)
def _rouge_scorer() -> RougeScorer:
    return library("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"])


def rouge(output: str, answer: Answer, extra: Extra) -> Scores:
    """ROUGE F1 of rouge-score, without stemming; of several references the best of each figure."""
    all_scores = [_rouge_scorer().score(str(a), output) for a in as_list(answer)]
    return {name: max(scores[name].fmeasure for scores in all_scores) for name in ("rougeL", "rouge1", "rouge2")}


def rouge_lsum(output: str, answer: Answer, extra: Extra) -> Scores:
    """Summary-level ROUGE-L, sentences separated by line breaks (InfiniteBench's En.Sum)."""
    return {"rougeLsum": max(_rouge_scorer().score(str(a), output)["rougeLsum"].fmeasure for a in as_list(answer))}


def rouge_pltrdy(output: str, answer: Answer, extra: Extra) -> Scores:
    """ROUGE-L of the package `rouge`, which LongBench's published figures were taken with."""
    scorer = library("rouge").Rouge(metrics=["rouge-l"])

    def score(output: str, answer: str) -> float:
        try:
            return scorer.get_scores([output], [answer], avg=True)["rouge-l"]["f"]
        except (ValueError, RecursionError):  # no word at all; a text too long for its recursion
            return 0.0

    return {"rougeL": best(score, output, answer)}


def rouge_jieba(output: str, answer: Answer, extra: Extra) -> Scores:
    """`rouge_pltrdy` over Chinese words (LongBench)."""
    return rouge_pltrdy(" ".join(jieba_words(output)), [" ".join(jieba_words(str(a))) for a in as_list(answer)], extra)


def distance(output: str, answer: Answer, extra: Extra) -> Scores:
    """Nearness to a text, of several to the nearest: ROUGE, BLEU, METEOR, and whether it is the same (RoCo, section 5.1)."""
    reference = max(map(str, as_list(answer)), key=lambda a: (a == output, rouge(output, a, extra)["rougeL"]))
    figures = {**reconstruction(output, reference, extra), **meteor(output, reference), "same": 0.0}
    # Equal texts are at no distance, also where they hold no word, or fewer words than BLEU's n-grams.
    return dict.fromkeys(figures, 1.0) if output == reference else figures


def reconstruction(output: str, answer: Answer, extra: Extra) -> Scores:
    """Share of the text itself that was repeated: ROUGE, and BLEU of the one example (RoCo, section 5.1.1)."""
    return {**rouge(output, answer, extra), "bleu": best(bleu, output, answer)}


def bleu(output: str, reference: str) -> float:
    """BLEU of one example; sacrebleu's own of equal texts is above 1 by a rounding."""
    return min(1.0, library("sacrebleu").sentence_bleu(output, [reference]).score / 100)


def meteor(output: str, reference: str) -> Scores:
    """METEOR by nltk; without WordNet's files it matches words and stems alone and is called 'meteor_stem'."""
    score = library("nltk.translate.meteor_score").meteor_score
    wordnet = _wordnet()
    name = "meteor_stem" if isinstance(wordnet, NoSynonyms) else "meteor"
    words = [re.findall(r"\w+|[^\w\s]", text) for text in (reference, output)]
    return {name: float(score([words[0]], words[1], wordnet=wordnet))}


class NoSynonyms:
    """Stands in for nltk's WordNet where its files are not installed."""

    def synsets(self, word: str) -> list:
        return []


@lru_cache(maxsize=1)
def _wordnet() -> object:
    wordnet = library("nltk.corpus").wordnet
    try:
        wordnet.ensure_loaded()
    except LookupError:
        return NoSynonyms()
    return wordnet


Metric = Callable[[str, Answer, Extra], Scores]


def get_metric(name: str) -> Metric:
    """The metric of a name. Raises ValueError for an unknown one; suggests the nearest."""
    check_name("metric", name, METRICS)
    return METRICS[name]


def qa_f1(output: str, answer: Answer, extra: Extra) -> Scores:
    """Best word F1 over the accepted answers."""
    return {"f1": best(lambda o, a: f1(normalize(o).split(), normalize(a).split()), output, answer)}


def contains(output: str, answer: Answer, extra: Extra) -> Scores:
    """Whether an accepted answer stands in the output, and the best word F1; whole words, after SQuAD's normalisation."""
    letter = rf"[^\W{UNSPACED}]"  # of scripts that put spaces between words

    def stands(output: str, answer: str) -> bool:
        if normalize(answer):  # else an article or a sign alone, such as the option A
            output, answer = normalize(output), normalize(answer)
        return bool(answer.strip() and re.search(f"(?<!{letter}){re.escape(answer.strip())}(?!{letter})", output))

    return {"contains": best(stands, output, answer), **qa_f1(output, answer, extra)}


def qa_f1_characters(output: str, answer: Answer, extra: Extra) -> Scores:
    """F1 over Chinese characters (InfiniteBench's Zh.QA)."""
    return {"f1": best(lambda o, a: f1(normalize_zh(o), normalize_zh(a)), output, answer)}


def qa_f1_jieba(output: str, answer: Answer, extra: Extra) -> Scores:
    """F1 over Chinese words (LongBench)."""

    def words(text: str) -> list[str]:
        return [word for word in map(normalize_zh, jieba_words(text)) if word]

    return {"f1": best(lambda o, a: f1(words(o), words(a)), output, answer)}


def of_first_line(metric: Metric) -> Metric:
    """The metric of the output's first line (LongBench's few-shot tasks)."""
    return lambda output, answer, extra: metric(output.lstrip("\n").split("\n")[0], answer, extra)


def first_number(output: str, answer: Answer, extra: Extra) -> Scores:
    """The first run of digits is the answer (InfiniteBench's pass keys and numbers)."""
    number = re.search("[0-9]+", output)
    return {"match": best(lambda _, a: number is not None and number.group() == a, output, answer)}


def has_word(output: str, answer: Answer, extra: Extra) -> Scores:
    """The answer is one of the words (InfiniteBench's key/value retrieval)."""
    return {"match": best(lambda o, a: a in spaced(o, "\n:\"'.,?!{}").split(), output, answer)}


def has_name(output: str, answer: Answer, extra: Extra) -> Scores:
    """The answer, an upper-case name, is one of the words in any case (InfiniteBench's dialogue)."""
    return {"match": float(str(as_list(answer)[0]) in spaced(output, "\n:\"'.,?!{}").upper().split())}


def has_all(output: str, answer: Answer, extra: Extra) -> Scores:
    """Share of the required strings that occur in the output, in any case (RULER)."""
    wanted = as_list(answer)
    return {"recall": sum(str(a).lower() in output.lower() for a in wanted) / len(wanted)}


def equal_number(output: str, answer: Answer, extra: Extra) -> Scores:
    """The first number equals the answer; an integer answer reads no further than the point (InfiniteBench's Math.Find)."""
    match = re.search(r"\d+\.\d+|\d+", output)
    number = match.group() if match else "nan"
    fitting = (a for a in as_list(answer) if not (isinstance(a, int) and "." in number))
    return {"match": float(any(float(number) == float(a) for a in fitting))}


def leading_numbers(output: str, answer: Answer, extra: Extra) -> Scores:
    """Share of the answer's numbers that are right before the first wrong one (InfiniteBench's Math.Calc)."""
    wanted = answer[0] if answer and isinstance(answer[0], list) else answer
    # Compared as texts: Python makes no integer of thousands of digits, which a model may write.
    given = [n.lstrip("0") or "0" for n in re.findall("[0-9]+", output)]
    right = takewhile(lambda pair: pair[0] == str(pair[1]), zip(given, wanted, strict=False))
    return {"share": len([*right]) / len(wanted)}


def last_integer(output: str, answer: Answer, extra: Extra) -> Scores:
    """The last word is the answer (InfiniteBench's Code.Run)."""
    words = spaced(output, "\n.`'\":").split()
    try:
        return {"match": best(lambda _, a: bool(words) and int(words[-1]) == int(a), output, answer)}
    except ValueError:
        return {"match": 0.0}


def gsm8k(output: str, answer: Answer, extra: Extra) -> Scores:
    """The number after ``####``, else the last number ('flexible'), equals the answer's."""

    def clean(text: str) -> str:
        return re.sub("[,$]", "", text).removesuffix(".")

    wanted = clean(str(answer).split("####")[-1].strip())
    output = re.split(r"Question:|</s>|<\|im_end\|>", output)[0]
    strict = re.search(r"#### (-?[0-9.,]+)", output)
    numbers = re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", output)
    flexible = bool(numbers) and clean(numbers[-1]) == wanted
    return {"flexible": float(flexible), "strict": float(strict is not None and clean(strict[1]) == wanted)}


def _after_prefix(text: str, prefixes: Iterable[str], accepted: Iterable[str]) -> bool | None:
    """Whether an accepted answer follows the first prefix that the text has; None without a prefix."""
    for prefix in prefixes:
        at = text.find(prefix)
        if at >= 0:
            return text[at + len(prefix) + 1 :].startswith(tuple(accepted))
    return None


def choice(output: str, answer: Answer, extra: Extra) -> Scores:
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


def bug_choice(output: str, answer: Answer, extra: Extra) -> Scores:
    """The option's letter or function (InfiniteBench's Code.Debug); ``answer`` is ``[function, letter]``."""
    text, (name, letter) = output.strip(), answer
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return {"accuracy": 1.0}
    text = re.sub("(?: |[Oo]ption)+", " ", spaced(text, "\n`'\"-*"))
    prefixes = ("answer is:", "is:", "answer:", "correct option is:")
    return {"accuracy": float(_after_prefix(text, prefixes, (letter, name)) or False)}


def classification(output: str, answer: Answer, extra: Extra) -> Scores:
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


def share_of_numbers(output: str, answer: Answer, extra: Extra) -> Scores:
    """Share of the output's numbers that are the answer's (LongBench's counts and paragraph retrieval)."""

    def score(output: str, answer: str) -> float:
        number, given = re.search(r"\d+", answer), re.findall(r"\d+", output)
        return given.count(number.group()) / len(given) if given and number else 0.0

    return {"share": best(score, output, answer)}


def code_similarity(output: str, answer: Answer, extra: Extra) -> Scores:
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
METRICS = {metric.__name__: metric for metric in _BY_NAME}
METRICS |= {f"{one.__name__}_first_line": of_first_line(one) for one in (qa_f1, classification, rouge_pltrdy)}
