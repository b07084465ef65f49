"""Figures of the README come from rows: the tables of docs/results are generated of them (tests/evals/test_eval_summary.py checks
those), and a figure in a sentence is found again here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from locret_kit.backbones import demo
from locret_kit.evals.engine import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]


@cache
def rows() -> list[Row]:
    return read_rows((ROOT / "checkpoints" / "smollm2-135m-locret").glob("results*.jsonl"))


def right(task: str, text: str, length: int, budget: int, policy: str) -> str:
    """``19 of 20`` for the heads that ship, or a policy without heads."""
    own = [
        row.score for row in rows()
        if (row.task, row.haystack, row.length, row.slots, row.policy) == (task, text, length, budget, policy)
        and row.heads in ("smollm2-135m-locret", "-") and row.score is not None
    ]  # fmt: skip
    return f"{sum(own):.0f} of {len(own)}"


def cache_mib(length: int, budget: int) -> str:
    """Bytes of the 128K rows' caches in bfloat16."""
    (size,) = {
        row.cache_bytes for row in rows()
        if (row.length, row.slots, row.policy, row.dtype) == (length, budget, "rereading-locret", "bfloat16")
    }  # fmt: skip
    return f"{size / 2**20:.0f} MiB"


def full_gib(tokens: int) -> str:
    """Keys and values of every token in bfloat16, by the backbone's sizes: 30 layers of 3 heads of 64 channels."""
    return f"{tokens * 30 * 3 * 64 * 2 * 2 / 2**30:.1f} GiB"


FIGURES: dict[str, list[tuple[str, Callable[[], str]]]] = {
    "README.md": [
        ("take 36 MiB of", lambda: f"take {cache_mib(131072, 1024)} of"),
        ("take 2.8 GiB", lambda: f"take {full_gib(131072)}"),
        ("19 of 20 are found", lambda: f"{right('R.PassKey', 'jargon', 16384, 4096, 'rereading-locret')} are found"),
        ("picks answer 19 of 20", lambda: f"picks answer {right('R.PassKey', 'jargon', 16384, 512, 'bm25')}"),
        ("11 of 20 where", lambda: f"{right('R.PassKey', 'jargon', 16384, 4096, 'locret')} where"),
        ("270 MB", lambda: f"{demo.HUB_MB} MB"),
        ("95 MB", lambda: f"{demo.WHEEL_MB} MB"),
    ],
}
"""By page: words as they stand, and the same made of rows."""


@pytest.mark.parametrize("page", FIGURES)
def test_a_figure_in_a_sentence_has_its_rows(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for words, made in FIGURES[page]:
        assert words in text and made() == words, f"{page}: {words!r} is {made()!r} by the rows"
