"""Texts as metrics compare them: words without case, articles and punctuation."""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from tempfile import TemporaryDirectory
from types import ModuleType

from ...naming import install_line
from . import Answer

Figures = dict[str, float]
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"  # noqa: RUF001
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)


def library(name: str) -> ModuleType:
    """A module of the `eval` extra.

    Raises:
        ImportError: it is not installed; says how to install it.
    """
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
    """Cache folder of jieba's dictionary: it unpickles what it finds there, and in a shared /tmp anybody can leave a file."""
    return TemporaryDirectory(prefix="jieba.")
