"""Pictures of docs/results from the committed rows; `scripts/results.py` draws and checks them. A picture's file holds its points
as text, so that the check needs no pixels. Intervals are of 95%: Wilson's of a share, 1.96 standard errors of other means."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from locret_kit.evals.engine import Row
from locret_kit.evals.report import COLORS, RC
from locret_kit.evals.tables import size, summarize
from locret_kit.files import write_beside

HEADS = "smollm2-135m-locret"
TABLES = "scripts/research/logs/tables"
Point = tuple[float, ...]
"""x and y, and the ends of y's interval where there is one. Of bars: the value, and the ends of its interval."""
LOOKS = {name: (COLORS[i], "oD^sv*P"[i]) for i, names in enumerate((
    ("full attention", "transformers serve", "vLLM"), ("locret_kit", "lookahead-locret", "locret-serve", "1,024 slots"),
    ("bm25", "llama.cpp"), ("rereading-locret", "locret-vllm"), ("locret",), ("streaming", "512 slots"),
)) for name in names}  # fmt: skip
"""Colour and marker by a line's name up to the first comma."""
STYLE = {
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 10,
    "legend.fontsize": 9,
    "svg.fonttype": "none",
}
SHARE = 1.06
"""End of an axis of shares."""


@dataclass(frozen=True)
class Panel:
    """Lines over a logarithmic axis of numbers of tokens or slots, or, without ticks, bars with a line's name each."""

    title: str
    lines: Mapping[str, Sequence[Point]]
    ticks: Sequence[int] = ()
    x_label: str = "prompt, tokens"
    top: float | None = SHARE
    """End of the axis of values; None for a logarithmic axis of MiB."""


def score(rows: Sequence[Row], policy: str, task: str, text: str, length: int, slots: int) -> list[Point]:
    """The mean score of a policy without heads or with those that ship, with its interval; empty if nobody measured it."""
    place = task, text, length, 0 if policy == "full" else slots, policy
    own = [row for row in rows if (row.task, row.haystack, row.length, row.budget, row.policy) == place]
    own = [row for row in own if row.heads in (HEADS, "-") and row.score is not None and row.kv_bits is None]
    found = []
    for cell in summarize(own):
        low, high = cell.bounds
        found.append((round(cell.mean or 0.0, 4), round(max(0.0, low), 4), round(min(1.0, high), 4)))
    return found


def finding(rows: Sequence[Row]) -> list[Panel]:
    """Pass keys by slots, in texts that nothing was chosen on, and by length."""
    lengths = {2048: 256, 4096: 512, 8192: 2048, 16384: 4096}
    slots = (128, 256, 512)
    by_slots = {"full attention, all 4,096": "full", "lookahead-locret": "lookahead-locret", "bm25": "bm25"}
    by_length = {
        "full attention": ("full", lengths), "rereading-locret, 1/8 (8K, 16K: 1/4)": ("rereading-locret", lengths),
        "locret, the same": ("locret", lengths), "bm25, 512 tokens": ("bm25", {4096: 512, 16384: 512}),
    }  # fmt: skip
    return [
        Panel("Pass keys answered in 4K tokens, by slots", {
            name: [(n, *point) for n in slots for point in score(rows, policy, "R.PassKey", "unseen", 4096, n)]
            for name, policy in by_slots.items()
        }, slots, "slots, or tokens that bm25 picks"),
        Panel("Pass keys answered, by length", {
            name: [(n, *point) for n in budgets for point in score(rows, policy, "R.PassKey", "jargon", n, budgets[n])]
            for name, (policy, budgets) in by_length.items()
        }, [*lengths]),
    ]  # fmt: skip


def memory(rows: Sequence[Row], root: Path) -> Panel:
    """Keys and values: of full attention by arithmetic, of a bounded cache the largest that was measured."""
    lengths = (2048, 8192, 32768, 131072)
    sizes = json.loads((root / "checkpoints" / HEADS / "config.json").read_text(encoding="utf-8"))
    token = 4 * sizes["n_layers"] * sizes["n_kv_heads"] * sizes["head_dim"] / 2**20  # keys and values, 2 bytes each
    lines: dict[str, list[Point]] = {"full attention, also llama.cpp": [(n, n * token) for n in lengths]}
    for slots in (1024, 512):
        found: dict[int, int] = {}
        for row in rows:
            same = (row.budget, row.dtype, row.kv_bits, row.heads) == (slots, "bfloat16", None, HEADS)
            if same and row.policy in ("locret", "rereading-locret") and row.length >= 4096 and row.cache_bytes:
                found[row.length] = max(found.get(row.length, 0), row.cache_bytes)
        lines[f"{slots:,} slots"] = [(length, round(found[length] / 2**20, 1)) for length in sorted(found)]
    return Panel("Keys and values, in 16 bits", lines, lengths, top=None)


def table(root: Path, name: str) -> list[dict[str, str]]:
    """The lines of a committed table by its head."""
    with (root / TABLES / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rates(root: Path, what: str, top: float) -> Panel:
    """The fastest of each program's ways, by the prompt's length; the kit and llama.cpp with the same file, Q8_0."""
    names = {"`model.": "full attention, transformers", "llama.c": "llama.cpp", "`--mode": "locret_kit, 1,024 slots"}
    best: dict[str, dict[int, float]] = {name: {} for name in names.values()}
    for row in (row for row in table(root, "llamacpp") if "Q8_0" in row["way"] or "generate" in row["way"]):
        own, length = best[names[row["way"][:7]]], int(row["prompt"].replace(",", ""))
        own[length] = max(own.get(length, 0.0), float(row[f"{what}, tokens per second"]))
    lines = {name: list(own.items()) for name, own in best.items()}
    return Panel(f"{what.capitalize()}, tokens per second", lines, [1024, 4096, 16384], top=top)


def serving(root: Path) -> list[Panel]:
    """Rates and memory of servers."""
    clients = {row[""]: row for row in table(root, "clients")}
    lines = {
        ("New tokens per CPU second", 30): {
            f"{row['server']}, {row['clients']} client{'s' * (row['clients'] != '1')}": row["new tokens per CPU second"]
            for row in table(root, "vllm")
        },
        **{(title, top): {name: clients[measure][f"{name}, 16 clients"] for name in ("transformers serve", "locret-serve")}
           for title, measure, top in (
               ("New tokens per second, 16 clients", "new tokens per second", 5),
               ("Largest memory, 16 clients, MiB", "largest memory, MiB", 2600),
           )},
    }  # fmt: skip
    return [Panel(title, {name: [(float(value),)] for name, value in bars.items()}, top=top)
            for (title, top), bars in lines.items()]  # fmt: skip


def losses(rows: Sequence[Row]) -> list[Panel]:
    """Panels of the cases in which another method is better."""
    places = {
        "One question about 16K tokens, 1,024 slots": (("R.PassKey", "unseen", 16384, 1024), ("bm25", "lookahead-locret")),
        "Four facts of 4K tokens, 512 slots":
            (("ruler.niah_multiquery", "unseen", 4096, 512), ("bm25", "lookahead-locret", "full")),
        "Next words, 2K tokens, 512 slots":
            (("agreement:fidelity.continue", "later", 2048, 512), ("streaming", "lookahead-locret", "locret")),
    }  # fmt: skip
    return [Panel(title, {"full attention" if name == "full" else name: score(rows, name, *place) for name in policies})
            for title, (place, policies) in places.items()]  # fmt: skip


def pictures(rows: Sequence[Row], root: Path) -> dict[Path, list[Panel]]:
    """The panels of each file, from the rows of the heads that ship and the committed tables."""
    kept, found = memory(rows, root), finding(rows)
    made = {
        "memory-and-score.svg": [kept, found[1]], "found.svg": found, "serving.svg": serving(root), "losses.svg": losses(rows),
        "cost.svg": [kept, rates(root, "prefill", 600), rates(root, "decoding", 105)],
    }  # fmt: skip
    return {root / "docs" / "results" / name: panels for name, panels in made.items()}


def points(panels: Sequence[Panel]) -> str:
    """The points of a picture as one line of text, without characters that a file would escape."""
    return json.dumps([asdict(panel) for panel in panels])


def is_drawn(path: Path, panels: Sequence[Panel]) -> bool:
    """Whether the file is there and holds these points."""
    return path.exists() and points(panels).encode() in path.read_bytes()


def write(path: Path, panels: Sequence[Panel]) -> None:
    """Draw the panels one above the other, as wide as a phone."""
    heights = [2.6 if panel.ticks else 0.75 + 0.27 * len(panel.lines) for panel in panels]
    metadata = {"Description": points(panels), "Date": None}
    with rc_context({**RC, **STYLE, "svg.hashsalt": path.stem}):
        figure = Figure(figsize=(4.6, sum(heights)), layout="constrained")
        grid = figure.subplots(len(panels), height_ratios=heights)
        for panel, axis in zip(panels, grid, strict=True):
            axis.set_title(panel.title)
            (draw_lines if panel.ticks else draw_bars)(panel, axis)
        write_beside(path, lambda beside: figure.savefig(beside, format="svg", metadata=metadata))


def draw_lines(panel: Panel, axis: Axes) -> None:
    """Lines with their intervals, slightly apart."""
    for i, (name, found) in enumerate(panel.lines.items()):
        color, marker = LOOKS[name.partition(", ")[0]]
        x, y, *ends = zip(*found, strict=True)
        apart = [[abs(a - b) for a, b in zip(y, end, strict=True)] for end in ends] or None
        look = {"color": color, "marker": marker, "elinewidth": 0.8, "capsize": 2}
        axis.errorbar([n * 2 ** (0.05 * (i - 1.5)) for n in x], y, apart, label=name, **look)
    axis.set_xscale("log", base=2)
    axis.set_xticks(panel.ticks, [size(tick) if tick >= 1024 else f"{tick}" for tick in panel.ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(panel.x_label)
    if panel.top is None:
        axis.set_yscale("log")
        axis.set_yticks([16, 64, 256, 1024, 4096], ["16 MiB", "64 MiB", "256 MiB", "1 GiB", "4 GiB"])
        axis.set_yticks([], minor=True)
    elif panel.top == SHARE:
        axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    axis.set_ylim(12 if panel.top is None else -0.03 * panel.top, panel.top)
    axis.legend(loc="upper center", bbox_to_anchor=(0.45, -0.33), ncols=2 if max(map(len, panel.lines)) < 30 else 1)


def draw_bars(panel: Panel, axis: Axes) -> None:
    """A bar with its value for each name, the first on top."""
    for i, (name, ((value, *ends),)) in enumerate(panel.lines.items()):
        text = f"{value:.0%}" if panel.top == SHARE else f"{value:,.{0 if value > 100 else 1}f}"
        apart = [[abs(value - end)] for end in ends] or None
        look = {"color": LOOKS[name.partition(", ")[0]][0], "error_kw": {"elinewidth": 0.8, "capsize": 2}}
        axis.barh(i, value, 0.7, xerr=apart, **look)
        axis.annotate(text, (max(value, *ends, 0), i), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_yticks(range(len(panel.lines)), [*panel.lines])
    axis.invert_yaxis()
    axis.set_xlim(0, (panel.top or 0.0) * 1.1)
    axis.set_xticks([])
