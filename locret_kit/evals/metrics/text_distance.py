"""Summaries, and the distance of two texts: ROUGE, BLEU and METEOR by the libraries that papers use."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from . import Answer, Extra
from .normalisation import Figures, as_list, best, jieba_words, library

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


@lru_cache(maxsize=1)
def _rouge_scorer() -> RougeScorer:
    return library("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"])


def rouge(output: str, answer: Answer, extra: Extra) -> Figures:
    """ROUGE F1 of rouge-score, without stemming; of several references the best of each figure."""
    all_scores = [_rouge_scorer().score(str(a), output) for a in as_list(answer)]
    return {name: max(scores[name].fmeasure for scores in all_scores) for name in ("rougeL", "rouge1", "rouge2")}


def rouge_lsum(output: str, answer: Answer, extra: Extra) -> Figures:
    """Summary-level ROUGE-L, sentences separated by line breaks (InfiniteBench's En.Sum)."""
    return {"rougeLsum": max(_rouge_scorer().score(str(a), output)["rougeLsum"].fmeasure for a in as_list(answer))}


def rouge_pltrdy(output: str, answer: Answer, extra: Extra) -> Figures:
    """ROUGE-L of the package `rouge`, which LongBench's published figures were taken with."""
    scorer = library("rouge").Rouge(metrics=["rouge-l"])

    def score(output: str, answer: str) -> float:
        try:
            return scorer.get_scores([output], [answer], avg=True)["rouge-l"]["f"]
        except (ValueError, RecursionError):  # no word at all; a text too long for its recursion
            return 0.0

    return {"rougeL": best(score, output, answer)}


def rouge_jieba(output: str, answer: Answer, extra: Extra) -> Figures:
    """`rouge_pltrdy` over Chinese words (LongBench)."""
    return rouge_pltrdy(" ".join(jieba_words(output)), [" ".join(jieba_words(str(a))) for a in as_list(answer)], extra)


def distance(output: str, answer: Answer, extra: Extra) -> Figures:
    """Nearness of two texts: ROUGE, BLEU, METEOR, and whether they are the same (RoCo, section 5.1)."""
    reference = str(as_list(answer)[0])
    figures = {
        **rouge(output, reference, extra),
        "bleu": bleu(output, reference),
        **meteor(output, reference),
        "same": float(output == reference),
    }
    # Equal texts are at no distance, also where they hold no word, or fewer words than BLEU's n-grams.
    return dict.fromkeys(figures, 1.0) if output == reference else figures


def reconstruction(output: str, answer: Answer, extra: Extra) -> Figures:
    """Share of the text itself that was repeated: ROUGE, and BLEU of the one example (RoCo, section 5.1.1)."""
    return {**rouge(output, answer, extra), "bleu": bleu(output, str(answer))}


def bleu(output: str, reference: str) -> float:
    """BLEU of one example; sacrebleu's own of equal texts is above 1 by a rounding."""
    return min(1.0, library("sacrebleu").sentence_bleu(output, [reference]).score / 100)


def meteor(output: str, reference: str) -> Figures:
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
