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
    return f"{dict(lines['locret_kit, 1,024 slots'])[16384] / dict(lines['llama.cpp'])[16384]:.0f}"


def coder(column: str, prompt: str = "16,384") -> str:
    """A figure of the 1.5B over llama.cpp's, with AVX2."""
    (value,) = (
        row[column]
        for row in PICTURE.table(ROOT, "coder-avx2")
        if row["prompt"] == prompt and "llama.cpp" not in row["way"]
    )
    return f"{float(value):g}"


def numbers(budget: int, policy: str) -> str:
    """Numbers that the 1.5B finds, of four in each of eight texts."""
    return f"{4 * sum(scores('ruler.niah_multiquery', 'jargon', 4096, budget, policy, CODER)):.0f}"


def card(model: str) -> str:
    """Prefill against full attention on a card, in the newest run."""
    with (ROOT / "kernels" / "benchmarks" / "results" / "nvidia-h200.csv").open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if (row["model"], row["context"]) == (model, "131072")]
    return f"{float([row['value'] for row in found if row['measurement'] == 'prefill against full attention'][-1]):.3g}"


def printed(name: str, first: str, column: int) -> str:
    """A cell of a table that a script printed: of the line that begins so."""
    (row,) = (row for row in PICTURE.table(ROOT, name) if next(iter(row.values())) == first)
    return [*row.values()][column]


def clients(measure: str, column: int = 1) -> float:
    return float(printed("clients", measure, column))


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


def peak_gib(*cell: str | int) -> str:
    """Memory of the process, at most, in a cell of the 1.5B."""
    own = [row for row in rows(CODER) if (row.task, row.haystack, row.length, row.slots, row.policy) == cell]
    return f"{max(row.peak_bytes for row in own) / 2**30:.1f} GiB"


def own_code(task: str, heads: str = "own") -> str:
    """Right answers about files of one's own folder, by heads that were trained on its other files, or by others."""
    return f"{sum(row.score for row in rows(CODER) if (row.task, row.heads) == (task, heads)):.0f}"


UNSEEN, NEXT = ("R.PassKey", "unseen", 4096), ("agreement:fidelity.continue", "later", 2048, 512)
SHORT, LONG = ("R.PassKey", "jargon", 4096, 512), ("R.PassKey", "jargon", 16384, 4096)
ALIKE = ("ruler.niah_multikey", "jargon", 2048)
CODER, LONG_CODER = "qwen2.5-coder-1.5b-locret", ("keys-16k.jsonl", "-", 16640)
GEMMA, WORDS = ("R.PassKey", "later", 4096), ("ruler.fwe", "-", 2048, 256)
FIGURES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "take {} of": lambda: cache_mib(131072, 1024),
        "take {}": lambda: full_gib(131072),
        "{} are found": lambda: right(*LONG_CODER, 1024, "locret", CODER),
        "process takes {}": lambda: peak_gib(*LONG_CODER, 1024, "locret"),
        "attention finds {}": lambda: right(*LONG_CODER, 0, "full", CODER),
        "in {} |": lambda: peak_gib(*LONG_CODER, 0, "full"),
        "model and heads | {}": lambda: right("code.jsonl", "-", 4096, 512, "locret", CODER),
        "study) | {} of 48": lambda: own_code("own.jsonl"),
        "of 48, before {};": lambda: own_code("own.jsonl", CODER),
        "other kinds {} of 46": lambda: own_code("own-held.jsonl"),
        "full attention 25; {} |": lambda: own_code("own-held.jsonl", "-"),
        "{} from the Hub": lambda: f"{demo.HUB_MB} MB",
        "or {} from the Python package index": lambda: f"{demo.WHEEL_MB} MB",
    },
    "docs/results/index.md": {
        "trial heads finds [{}]": lambda: right(*LONG_CODER, 1024, "locret", CODER),
        "it finds [{}](facts.md#keys-32k": lambda: right("keys-32k.jsonl", "-", 32640, 4096, "locret", CODER),
        "and with full attention {}.": lambda: str(int(sum(scores("keys-32k.jsonl", "-", 32640, 0, "full", CODER)))),
        "they find all {} with": lambda: numbers(128, "locret"),
        "all {} with a thirty-second, like full": lambda: numbers(0, "full"),
        "`compactor` finds {} with an eighth": lambda: numbers(512, "compactor"),
        "these heads answer [{}]": lambda: right("code.jsonl", "-", 4096, 512, "locret", CODER),
        "4K a second reading answers [{}]": lambda: right("code.jsonl", "-", 4096, 512, "rereading-locret", CODER),
        "were trained on {} (`locret`": lambda: right("held.jsonl", "-", 4096, 512, "rereading-locret", CODER),
        "In 8K {} are": lambda: right("code-8k.jsonl", "-", 8448, 1024, "locret", CODER),
        "in 16K [{}](facts.md#code": lambda: right("code-16k.jsonl", "-", 16640, 2048, "locret", CODER),
        "they answer {} of 48": lambda: own_code("own.jsonl"),
        "like full attention; before {}.": lambda: own_code("own.jsonl", CODER),
        "Of other kinds {} of 46": lambda: own_code("own-held.jsonl"),
        "before 17, full attention {}.": lambda: own_code("own-held.jsonl", "-"),
        "they answer {}, as": lambda: right("leval.tpo", "-", 8192, 512, "locret", CODER),
        "4K tokens [{}]": lambda: right(*UNSEEN, 512, "lookahead-locret"),
        "{} with full attention. BM25": lambda: right(*UNSEEN, 0, "full"),
        "{} with a thirty-second": lambda: right(*UNSEEN, 128, "lookahead-locret"),
        "many alike [{}]": lambda: right(*ALIKE, 256, "locret"),
        "with an eighth, {} with": lambda: right(*ALIKE, 0, "full"),
        "one reading finds [{}]": lambda: right(*LONG, "locret"),
        "second reading {}": lambda: right(*LONG, "rereading-locret"),
        "[at most {}]": lambda: right(*SHORT, "compactor"),
        "`locret` {}.": lambda: right(*SHORT, "locret"),
        "It finds [{}]": lambda: right(*SHORT, "snapkv", DEMO, "one-shot.jsonl"),
        "own heads finds [{}]": lambda: right(*GEMMA, 512, "locret", "gemma3-270m-locret"),
        "with full attention {}": lambda: right(*GEMMA, 0, "full", "gemma3-270m-locret"),
        "take {} with": lambda: cache_mib(131072, 1024),
        "and {} with full": lambda: full_gib(131072),
        "reads [{} times]": lambda: coder("prefill, of llama.cpp's"),
        "decodes {} times": lambda: coder("decoding, of llama.cpp's"),
        "of the 1.5B, it is [{}]": lambda: coder("prefill, of llama.cpp's", "32,640"),
        "and {} times. - With 512": lambda: coder("decoding, of llama.cpp's", "32,640"),
        "model it is {} and": lambda: faster("prefill"),
        "and {} times. - At 32K": lambda: faster("decoding"),
        "[{} times](speed.md#on-a-gpu)": lambda: card("phi3-mini"),
        "Phi-3-mini, {} times": lambda: card("llama3.1-8b"),
        "get [{} tokens]": lambda: f"{clients('new tokens per second')}",
        "gives {}": lambda: f"{clients('new tokens per second', 2)}",
        "wait [{} seconds]": lambda: f"{clients('seconds to the first token (median)'):.0f}",
        "[{} above the plan]": lambda: f"{clients('largest memory, MiB') / clients('memory planned, MiB') - 1:.0%}",
        "take [{}](speed.md#cost)": lambda: printed("cost", "a pass key in 131,070 tokens, 512 slots", 1),
        "the process {}.": lambda: printed("cost", "a pass key in 131,070 tokens, 512 slots", 2),
        "holds [{} requests]": lambda: printed("fit", "requests of 32,768 tokens in 400 MiB", 3),
        "of 20 keys in 128K tokens [{}]": lambda: printed("twenty", "128K", 3).removesuffix(" of 20"),
        "they answer [{}]": lambda: printed("vectors", "1K", 3),
        "{} of 20 answers are right": lambda: printed("turns", "1", 2),
        "one turn, [{}]": lambda: printed("turns", "12", 2),
        "13 and {} |": lambda: printed("turns", "12", 3),
        "BM25 answers [{}]": lambda: right("R.PassKey", "unseen", 16384, 1024, "bm25"),
        "in 16K tokens, `lookahead-locret` {}": lambda: right("R.PassKey", "unseen", 16384, 1024, "lookahead-locret"),
        "chooses [{}]": lambda: percent(*NEXT, "streaming"),
        "tokens, `lookahead-locret` {};": lambda: percent(*NEXT, "lookahead-locret"),
        "the cache answers [{}]": lambda: right("paraphrase", "jargon", 1024, 256, "lookahead-locret"),
        ", BM25 {}": lambda: right("paraphrase", "jargon", 1024, 256, "bm25"),
        "names [{}]": lambda: percent(*WORDS, "bm25"),
        "words, the cache {}": lambda: percent(*WORDS, "lookahead-locret"),
    },
    "docs/tutorials/train.md": {
        "new heads answer {} of 48": lambda: own_code("own.jsonl"),
        "the shipped ones {}, full": lambda: own_code("own.jsonl", CODER),
        "full attention {}; of kinds": lambda: own_code("own.jsonl", "-"),
        "trained on {} of 46": lambda: own_code("own-held.jsonl"),
        "of 46, before {}, full": lambda: own_code("own-held.jsonl", CODER),
        "before 17, full attention {}.": lambda: own_code("own-held.jsonl", "-"),
    },
}
"""By page: words around a figure, and the figure made of rows."""


@pytest.mark.parametrize("page", FIGURES)
def test_a_figure_in_a_sentence_has_its_rows(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for words, made in FIGURES[page].items():
        assert words.format(made()) in text, f"{page}: no {words.format(made())!r}"
