"""Draw the README's picture from the committed rows: ``python scripts/picture.py`` writes ``docs/results/memory-and-score.png``.

Left, keys and values in bfloat16: full attention's by arithmetic, the bounded cache's as rows of evaluations measured them.
Right, the share of pass keys that were answered, with Wilson's 95% intervals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from locret_kit.evals.engine import Row, read_rows
from locret_kit.evals.figures import COLORS, RC
from locret_kit.evals.tables import size, wilson
from locret_kit.files import write_beside

ROOT = Path(__file__).resolve().parents[1]
HEADS = ROOT / "checkpoints" / "smollm2-135m-locret"
TARGET = ROOT / "docs" / "results" / "memory-and-score.png"
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
REPEATED = {4096: 512, 8192: 512, 16384: 512, 32768: 512, 131072: 1024}
"""Tokens and slots of texts that repeat five sentences."""
REAL = {2048: 256, 4096: 512, 8192: 2048, 16384: 4096}
"""Tokens and slots of real text: an eighth, and a quarter from 8K on."""
LINES = (
    ("full attention, real text", "full", "jargon", dict.fromkeys(REAL, 0), "-"),
    ("locret, real text, an eighth of it (from 8K a quarter)", "locret", "jargon", REAL, "-"),
    ("rereading-locret, real text, the same", "rereading-locret", "jargon", REAL, "--"),
    ("locret, repeated sentences, 512 slots (128K: 1,024)", "locret", "repeated", REPEATED, ":"),
    ("rereading-locret, repeated sentences, 1,024 slots", "rereading-locret", "repeated", {131072: 1024}, ""),
)  # fmt: skip
"""Name, policy, text, slots by length, and dash."""
MIB = 2**20


def chosen(rows: Iterable[Row], policy: str, haystack: str, length: int, slots: int) -> list[Row]:
    """Rows of one point: pass keys, with the heads that ship or none."""
    return [
        row for row in rows
        if (row.task, row.policy, row.haystack, row.length, row.budget) == ("R.PassKey", policy, haystack, length, slots)
        and row.heads in (HEADS.name, "-") and row.score is not None and row.kv_bits is None
    ]  # fmt: skip


def token_axis(axis: Axes) -> None:
    """A logarithmic axis of the prompt's tokens with a tick at each of `LENGTHS`."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(LENGTHS, [size(tick) for tick in LENGTHS])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("prompt, tokens")


def draw_memory(axis: Axes, rows: Sequence[Row], sizes_of: dict[str, int]) -> None:
    """Keys and values against prompt length."""
    token = 4 * sizes_of["n_layers"] * sizes_of["n_kv_heads"] * sizes_of["head_dim"]  # keys and values, 2 bytes each
    axis.plot(LENGTHS, [n * token / MIB for n in LENGTHS], color=COLORS[0], label="full attention")
    for slots, mark, color in ((1024, "D", COLORS[2]), (512, "s", COLORS[1])):
        sizes: dict[int, float] = {}
        for row in rows:
            same = (row.budget, row.dtype, row.kv_bits, row.heads) == (slots, "bfloat16", None, HEADS.name)
            if same and row.policy in ("locret", "rereading-locret") and row.length >= 4096 and row.cache_bytes:
                sizes[row.length] = max(sizes.get(row.length, 0.0), row.cache_bytes / MIB)
        points = sorted(sizes.items())
        axis.plot(*zip(*points, strict=True), marker=mark, color=color, label=f"{slots:,} slots")
    axis.set_yscale("log")
    axis.set_yticks([16, 64, 256, 1024, 4096], ["16 MiB", "64 MiB", "256 MiB", "1 GiB", "4 GiB"])
    axis.set_yticks([], minor=True)
    axis.set_ylim(12, 4096)
    token_axis(axis)
    axis.set_title("Keys and values (bfloat16)")
    axis.legend(loc="upper left")


def draw_scores(axis: Axes, rows: Sequence[Row]) -> None:
    """The share of texts that were answered, against prompt length."""
    for i, (name, policy, haystack, slots, dash) in enumerate(LINES):
        points = []
        for length, budget in slots.items():
            scores = [row.score or 0.0 for row in chosen(rows, policy, haystack, length, budget)]
            if scores:
                share = sum(scores) / len(scores)
                low, high = wilson(share, len(scores))
                points.append((length, share, max(0.0, share - low), max(0.0, high - share)))
        x = [length * 2 ** (0.06 * (i - 2)) for length, *_ in points]
        y, below, above = ([point[k] for point in points] for k in (1, 2, 3))
        axis.errorbar(
            x,
            y,
            [below, above],
            label=name,
            color=COLORS[i],
            marker="osD^v"[i],
            linestyle=dash,
            elinewidth=0.8,
            capsize=2,
        )
    axis.set_ylim(-0.03, 1.06)
    token_axis(axis)
    axis.axvline(8192, color="#999999", linewidth=0.8)
    axis.text(8192 * 1.06, 0.02, "the model's window", fontsize=8, color="#555555")
    axis.set_title("Pass keys answered (share, 95% interval)")


def main() -> int:
    """Write the picture."""
    rows = list(read_rows(HEADS / "results.jsonl"))
    with rc_context(RC):
        figure = Figure(figsize=(8.4, 4.0), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_memory(left, rows, json.loads((HEADS / "config.json").read_text(encoding="utf-8")))
        draw_scores(right, rows)
        figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        write_beside(TARGET, lambda beside: figure.savefig(beside, format="png", dpi=130))
    print(TARGET.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
