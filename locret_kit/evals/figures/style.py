"""The look of every figure: lines that differ in dash and marker as well as in colour, and one way to save them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...files import write_beside
from ..cells import LIKELIHOOD, size

S = TypeVar("S")
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2, 2, 2)))
MARKERS = "osD^vPX*<>h"
LEGEND_ROW = 0.17
"""Height of a line of a legend, inches."""
MAP = "cividis"
"""Brightness rises along it, so it reads in grey."""
RC: Any = {
    "font.size": 9, "axes.titlesize": 9, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.5,
    "axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 8, "legend.frameon": False,
    "lines.linewidth": 1.4, "lines.markersize": 4.5, "text.parse_math": False, "figure.dpi": 100,
}  # fmt: skip


def line(i: int, *, marker: bool = True) -> dict[str, Any]:
    """Colour, dash and marker of the ``i``-th line; the first 56 differ in colour and dash, any 8 in dash alone."""
    style = {"color": COLORS[i % len(COLORS)], "linestyle": DASHES[i % len(DASHES)]}
    return {**style, "marker": MARKERS[i % len(MARKERS)]} if marker else style


def panels(
    count: int, title: str, *, columns: int = 3, width: float = 3.6, height: float = 2.9
) -> tuple[Figure, list[Axes]]:
    """A titled figure of ``count`` panels, row by row; sizes in inches a panel."""
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(4.2, columns * width), rows * height + 0.7), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    figure.suptitle(title, fontsize=mpl.rcParams["font.size"] + 2)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def shared_legend(figure: Figure, columns: int = 4) -> None:
    """One legend below the panels, each name once; the figure grows by its height."""
    handles: dict[str, Artist] = {}
    for axis in figure.axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if not handles:
        return
    longest = max(len(name) for name in handles)
    columns = max(1, min(columns, len(handles), int(figure.get_figwidth() * 13 // (longest + 10))))
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(handles) / columns))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=columns,
        handlelength=3.6,
        frameon=False,
    )


def score_axis(axis: Axes, metric: str) -> None:
    """A vertical axis of a metric's scores: from 0 to 1, or open for likelihoods."""
    axis.set_ylabel("nats a token (lower is better)" if metric in LIKELIHOOD else f"{metric} (0 to 1)")
    if metric not in LIKELIHOOD:
        axis.set_ylim(-0.03, 1.06)


def token_axis(axis: Axes, values: Iterable[float], label: str) -> None:
    """A logarithmic axis of token or slot counts with a tick at each value."""
    ticks = sorted(set(values))
    if min(ticks) > 0:
        axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [size(tick) for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(label)


def draw(function: Callable[[S], Figure], source: S, folder: Path, name: str) -> list[Path]:
    """Write ``name.png`` and ``name.svg`` of what a function draws; the same source gives the same bytes.

    Raises:
        OSError: names the file and the reason.
    """
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    with mpl.rc_context({**RC, "svg.hashsalt": name}):
        figure = function(source)
        write_beside(png, lambda beside: figure.savefig(beside, format="png", dpi=150))
        write_beside(svg, lambda beside: figure.savefig(beside, format="svg", metadata={"Date": None}))
    return [png, svg]
