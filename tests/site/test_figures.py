"""Figures of the README and of docs/results come from rows: tables are generated of them (tests/evals/test_eval_summary.py checks
those), and a figure in a sentence is found again here."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
from transformers import AutoTokenizer

from locret_kit.backbones import demo
from locret_kit.evals.engine.bm25 import shortened
from locret_kit.evals.engine.result_rows import Row, read_rows
from locret_kit.evals.tasks import Example, find_tasks

ROOT = Path(__file__).resolve().parents[2]


@cache
def rows() -> list[Row]:
    return read_rows((ROOT / "checkpoints" / "smollm2-135m-locret").glob("results*.jsonl"))


@cache
def plain_rows() -> list[Row]:
    """Rows of plain questions through the chat template."""
    return read_rows(ROOT / "scripts" / "research" / "logs" / "open-chat.jsonl")


@cache
def once_rows() -> list[Row]:
    """Rows of policies that evict once, after the question."""
    return read_rows(ROOT / "checkpoints" / "smollm2-135m-locret" / "one-shot.jsonl")


def right(task: str, text: str, length: int, budget: int, policy: str, among: Callable[[], list[Row]] = rows) -> str:
    """``19 of 20`` for the heads that ship, or a policy without heads."""
    own = [
        row.score for row in among()
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


@cache
def of_vllm() -> list[dict]:
    log = (ROOT / "scripts" / "research" / "logs" / "vllm.md").read_text(encoding="utf-8")
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def served(clients: int) -> str:
    """The cells of three servers: new tokens a second, and a CPU second."""
    kinds = [one for one in of_vllm() if one["what"] == "serve" and one["clients"] == clients]
    return " | ".join(f"{one['tokens_per_s']:.1f} ({one['tokens_per_cpu_s']:.1f})" for one in kinds)


def decoding(prompt: int) -> str:
    """CPU seconds after prompts of so many tokens."""
    own = [one for one in of_vllm() if one["what"] == "decode" and one["prompt"] == prompt]
    mean = {
        kind: fmean(one["cpu_s"] for one in own if one["kind"] == kind)
        for kind in ("vllm", "bounded, streaming", "bounded, lookahead-locret")
    }
    return "{:.2f} | {:.2f} (`streaming`), {:.2f} (`lookahead-locret`)".format(*mean.values())


def above_full(policy: str) -> str:
    """Nats a token above full attention's, of 1,000 tokens that it wrote, read in 256 slots."""
    log = (ROOT / "scripts" / "research" / "logs" / "decoding.jsonl").read_text(encoding="utf-8")
    nats = {(row["policy"], row["slots"], row["sample"]): row["nats"] for row in map(json.loads, log.splitlines())}
    return (
        f"{fmean(x - nats['full', 0, n] for (name, slots, n), x in nats.items() if (name, slots) == (policy, 256)):.3f}"
    )


def with_slots(*slots: int) -> str:
    """Right answers in 4K of the texts that nothing was chosen on: ``9, 8 and 9 of 12``."""
    *first, last = (right(*UNSEEN, number, LOOKAHEAD) for number in slots)
    return f"{', '.join(one.split(' of ')[0] for one in first)} and {last}"


def once(*policies: str) -> str:
    """Right answers in 4K of the Jargon File with an eighth, after one eviction; the same for every policy that is named."""
    (found,) = {right("R.PassKey", "jargon", 4096, 512, policy, once_rows) for policy in policies}
    return found


def named(policy: str, slots: int) -> str:
    """Share of RULER's three most frequent words."""
    scores = [row.score or 0.0 for row in rows() if (row.task, row.policy, row.slots) == ("ruler.fwe", policy, slots)]
    return f"{fmean(scores):.2f}"


LOOKAHEAD, UNSEEN = "lookahead-locret", ("R.PassKey", "unseen", 4096)
PARAPHRASE, MULTIKEY = ("paraphrase", "jargon", 1024), ("ruler.niah_multikey", "jargon", 2048)
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
    "docs/results/facts.md": [
        ("answer 30, 28 and 22 of 35", lambda: f"answer {with_slots(512, 256, 128)}"),
        ("attention 25 of 35", lambda: f"attention {right(*UNSEEN, 0, 'full')}"),
        (
            "template 22 of 26 and 20 of 26",
            lambda: "template {} and {}".format(
                *(right(*UNSEEN, slots, LOOKAHEAD, plain_rows) for slots in (512, 256))
            ),
        ),
        ("attention 7 of 26", lambda: f"attention {right(*UNSEEN, 0, 'full', plain_rows)}"),
        ("answer 3 of 7", lambda: f"answer {right('R.PassKey', 'unseen', 16384, 1024, LOOKAHEAD)}"),
        ("`bm25` has 19 of 20 with", lambda: f"`bm25` has {right('R.PassKey', 'jargon', 16384, 512, 'bm25')} with"),
        (
            "has 19 of 20 with 4,096",
            lambda: f"has {right('R.PassKey', 'jargon', 16384, 4096, 'rereading-locret')} with 4,096",
        ),
        ("it has 14 of 20", lambda: f"it has {right('R.PassKey', 'jargon', 16384, 4096, 'bm25')}"),
        ("it has 19 of 20 with 256", lambda: f"it has {right('R.PassKey', 'jargon', 4096, 256, 'bm25')} with 256"),
        ("locret` 17 of 20", lambda: f"locret` {right('R.PassKey', 'jargon', 4096, 256, 'rereading-locret')}"),
        ("4K 16 of 20", lambda: f"4K {right('R.PassKey', 'jargon', 4096, 512, 'bm25')}"),
        (
            "locret` has 19 of 20.",
            lambda: f"locret` has {right('R.PassKey', 'jargon', 4096, 512, 'rereading-locret')}.",
        ),
        ("finds 13 of 20", lambda: f"finds {right(*MULTIKEY, 256, 'bm25')}"),
        ("(`rereading-locret` 7 of 20)", lambda: f"(`rereading-locret` {right(*MULTIKEY, 256, 'rereading-locret')})"),
        (
            "12 of 20 with 512 (16 of 20)",
            lambda: f"{right(*MULTIKEY, 512, 'bm25')} with 512 ({right(*MULTIKEY, 512, 'rereading-locret')})",
        ),
        ("answers 2 of 20", lambda: f"answers {right(*PARAPHRASE, 256, 'bm25')}"),
        ("locret` 9 of 20", lambda: f"locret` {right(*PARAPHRASE, 256, 'lookahead-locret')}"),
        ("locret`\n  7 of 20", lambda: f"locret`\n  {right(*PARAPHRASE, 256, 'rereading-locret')}"),
        ("attention 3 of 20", lambda: f"attention {right(*PARAPHRASE, 0, 'full')}"),
        (
            "`snapkv` and `ada-snapkv` answer 6 of 10",
            lambda: f"`snapkv` and `ada-snapkv` answer {once('snapkv', 'ada-snapkv')}",
        ),
        ("names 0.52", lambda: f"names {named('bm25', 256)}"),
        ("slots 0.31", lambda: f"slots {named(LOOKAHEAD, 256)}"),
        ("attention 0.25", lambda: f"attention {named('full', 0)}"),
        ("`roco` 5 of 10", lambda: f"`roco` {once('roco')}"),
        ("`pyramidkv` 4 of 10", lambda: f"`pyramidkv` {once('pyramidkv')}"),
    ],
    "docs/results/questions.md": [
        (
            "`rkv` lose 0.013 and 0.018 nats a token, the heads\n  0.026 to 0.036, a random choice 0.086",
            lambda: "`rkv` lose {} and {} nats a token, the heads\n  {} to {}, a random choice {}".format(
                *map(above_full, ("streaming", "rkv", LOOKAHEAD, "locret", "random"))
            ),
        ),
    ],
    "docs/results/serving.md": [
        ("3.7 (5.0) | 4.3 (6.5) | 4.4 (10.7)", lambda: served(1)),
        ("7.3 (11.9) | 12.1 (11.6) | 9.9 (13.0)", lambda: served(8)),
        ("5.94 | 6.34 (`streaming`), 6.86 (`lookahead-locret`)", lambda: decoding(200)),
    ],
}
"""By page: words as they stand, and the same made of rows."""


@pytest.mark.parametrize("page", FIGURES)
def test_a_figure_in_a_sentence_has_its_rows(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for words, made in FIGURES[page]:
        assert words in text and made() == words, f"{page}: {words!r} is {made()!r} by the rows"


@pytest.mark.backbone
def test_passages_with_and_without_the_questions_words():
    """Texts whose needle is among the passages of `bm25`, as docs/results/facts.md has it: all, and 4 of 20."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "SmolLM2-135M-Instruct")
    for name, length, budget, expected in (("R.PassKey", 4096, 512, 20), ("paraphrase", 1024, 256, 4)):
        (task,) = find_tasks([name], haystacks=["jargon"])
        examples = [task.make(Example(task, tokenizer, length, number)) for number in range(20)]
        texts = [tokenizer.decode(shortened(tokenizer, example, budget)) for example in examples]
        assert sum(example.answer in text for example, text in zip(examples, texts, strict=True)) == expected
