"""Figures of the README and of "What we know" come from rows: tables and pictures are generated from them
(tests/evals/test_eval_summary.py checks those), and a figure in a sentence is found again here."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from scripts_loaded import load_script

from locret_kit.backbones import demo
from locret_kit.evals.engine import Row, read_rows

ROOT = Path(__file__).resolve().parents[2]


DEMO = "smollm2-135m-locret"
PICTURE = load_script("scripts/picture.py")


@cache
def rows(heads: str = DEMO, files: str = "results*.jsonl") -> list[Row]:
    return read_rows((ROOT / "checkpoints" / heads).glob(files))


def scores(task: str, text: str, length: int, budget: int, policy: str, *place: str) -> list[float]:
    """Scores of the heads that ship, or of a policy without heads."""
    return [
        row.score for row in rows(*place)
        if (row.task, row.haystack, row.length, row.slots, row.policy) == (task, text, length, budget, policy)
        and row.heads in (*place[:1], DEMO, "-") and row.score is not None
    ]  # fmt: skip


def right(*place: str | int) -> str:
    """``19 of 20``."""
    own = scores(*place)
    return f"{sum(own):.0f} of {len(own)}"


def percent(*place: str | int) -> str:
    own = scores(*place)
    return f"{sum(own) / len(own):.0%}"


def faster(what: str) -> str:
    """The kit's rate at 16K tokens over llama.cpp's."""
    lines = PICTURE.rates(ROOT, what, 1).lines
    ours, theirs = (dict(lines[name])[16384] for name in ("locret_kit, 1,024 slots", "llama.cpp"))
    return f"{ours / theirs:.0f} times"


def card(model: str) -> str:
    """Prefill against full attention on a card, in the newest run."""
    with (ROOT / "kernels" / "benchmarks" / "results" / "nvidia-h200.csv").open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["measurement"] == "prefill against full attention"]
    return [
        f"{float(row['value']):.3g} times" for row in found if row["model"] == model and row["context"] == "131072"
    ][-1]


def clients(measure: str, column: int = 1) -> float:
    (row,) = (row for row in PICTURE.table(ROOT, "clients") if row[""] == measure)
    return float([*row.values()][column])


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


UNSEEN, NEXT = ("R.PassKey", "unseen", 4096), ("agreement:fidelity.continue", "later", 2048, 512)
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
    "docs/results/index.md": [
        ("answers [30 of 35]", lambda: f"answers [{right(*UNSEEN, 512, 'lookahead-locret')}]"),
        ("attention answers 25 of 35", lambda: f"attention answers {right(*UNSEEN, 0, 'full')}"),
        ("[22 of 35]", lambda: f"[{right(*UNSEEN, 128, 'lookahead-locret')}]"),
        ("[11 of 20]", lambda: f"[{right('R.PassKey', 'jargon', 16384, 4096, 'locret')}]"),
        (
            "matter answers 19 of 20",
            lambda: f"matter answers {right('R.PassKey', 'jargon', 16384, 4096, 'rereading-locret')}",
        ),
        ("[at most 3 of 20]", lambda: f"[at most {right('R.PassKey', 'jargon', 4096, 512, 'compactor')}]"),
        ("answers 18 of 20", lambda: f"answers {right('R.PassKey', 'jargon', 4096, 512, 'locret')}"),
        ("[6 of 10]", lambda: f"[{right('R.PassKey', 'jargon', 4096, 512, 'snapkv', DEMO, 'one-shot.jsonl')}]"),
        ("[35 of 40]", lambda: f"[{right('R.PassKey', 'later', 4096, 512, 'locret', 'gemma3-270m-locret')}]"),
        (
            "attention 33 of 40",
            lambda: f"attention {right('R.PassKey', 'later', 4096, 0, 'full', 'gemma3-270m-locret')}",
        ),
        ("[57 of 60]", lambda: f"[{right('R.Number', 'repeated', 32768, 512, 'compactor')}]"),
        ("take 36 MiB with", lambda: f"take {cache_mib(131072, 1024)} with"),
        ("and 2.8 GiB with full", lambda: f"and {full_gib(131072)} with full"),
        ("reads [7 times]", lambda: f"reads [{faster('prefill')}]"),
        ("decodes 15 times", lambda: f"decodes {faster('decoding')}"),
        ("[3.14 times]", lambda: f"[{card('phi3-mini')}]"),
        ("Phi-3-mini, 1.43 times", lambda: f"Phi-3-mini, {card('llama3.1-8b')}"),
        ("[4.06 tokens]", lambda: f"[{clients('new tokens per second')} tokens]"),
        ("gives 3.21", lambda: f"gives {clients('new tokens per second', 2)}"),
        ("[96 seconds]", lambda: f"[{clients('seconds to the first token (median)'):.0f} seconds]"),
        (
            "[3% above the plan]",
            lambda: f"[{clients('largest memory, MiB') / clients('memory planned, MiB') - 1:.0%} above the plan]",
        ),
        (
            "[3.1 times]",
            lambda: f"[{clients('new tokens per second', 4) / clients('new tokens per second', 3):.1f} times]",
        ),
        ("[8 of 8]", lambda: f"[{right('R.PassKey', 'unseen', 16384, 1024, 'bm25')}]"),
        (
            "`lookahead-locret` 3 of 7",
            lambda: f"`lookahead-locret` {right('R.PassKey', 'unseen', 16384, 1024, 'lookahead-locret')}",
        ),
        ("[89%]", lambda: f"[{percent(*NEXT, 'streaming')}]"),
        ("`lookahead-locret` 86%", lambda: f"`lookahead-locret` {percent(*NEXT, 'lookahead-locret')}"),
        ("[9 of 20]", lambda: f"[{right('paraphrase', 'jargon', 1024, 256, 'lookahead-locret')}]"),
        ("BM25 2 of 20", lambda: f"BM25 {right('paraphrase', 'jargon', 1024, 256, 'bm25')}"),
        ("[52%]", lambda: f"[{percent('ruler.fwe', '-', 2048, 256, 'bm25')}]"),
        ("the cache 31%", lambda: f"the cache {percent('ruler.fwe', '-', 2048, 256, 'lookahead-locret')}"),
    ],
}
"""By page: words as they stand, and the same made of rows."""


@pytest.mark.parametrize("page", FIGURES)
def test_a_figure_in_a_sentence_has_its_rows(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for words, made in FIGURES[page]:
        assert words in text and made() == words, f"{page}: {words!r} is {made()!r} by the rows"
