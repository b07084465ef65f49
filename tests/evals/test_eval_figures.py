"""Figures of rows: what is drawn, and their files."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from locret_kit.evals import figures
from locret_kit.evals.engine import Row
from locret_kit.evals.figures import FIGURES, draw

ROW = Row(
    task="R.PassKey", haystack="jargon", length=4096, budget=512, policy="locret", heads="h", sample=0, score=1.0, depth=0.25,
    tokens=4090, new_tokens=8, prefill_s=2.0, decode_s=0.5, peak_bytes=2**30, cache_bytes=2**20, device="cpu", dtype="float32",
)  # fmt: skip


def rows() -> list[Row]:
    made = []
    for sample, depth in enumerate((0.0, 0.5, 1.0)):
        for length in (4096, 8192):
            full = replace(ROW, sample=sample, depth=depth, length=length, policy="full", heads="-", budget=0)
            every = ((p, b) for p in ("h2o", "$tova") for b in (256, 512))
            made += [full, *(replace(full, policy=p, budget=b, score=0.5, cache_bytes=b * 2**20) for p, b in every)]
    return made


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_title_and_units_and_goes_to_two_files(name, tmp_path):
    function = getattr(figures, name.replace("-", "_"))
    figure = function(rows())
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert figure.get_suptitle() and panels and all(axis.get_xlabel() and axis.get_ylabel() for axis in panels)
    png, svg = draw(name, rows(), tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG") and b"<svg" in svg.read_bytes()
    with pytest.raises(ValueError, match=r"no row"):
        function([replace(ROW, score=None, error="X: y")])


def test_score_against_memory_shows_the_means():
    figure = figures.score_memory(rows())
    drawn = {bar.get_label(): bar.lines[0].get_xydata().tolist() for bar in figure.axes[0].containers}
    assert drawn == {"full": [[1, 1]], "h2o": [[256, 0.5], [512, 0.5]], "$tova": [[256, 0.5], [512, 0.5]]}
    on_gpu = figures.score_memory([replace(row, device="cuda:0") for row in rows()])
    assert on_gpu.axes[0].get_xlabel() == "peak memory (MiB)", "on a CPU it is the process's"


def test_the_grid_has_a_row_for_each_depth_asked_for():
    """Where the needle really stands differs by length; that once gave every prompt a row of its own."""
    moved = [
        replace(ROW, sample=n, length=length, depth=depth + 0.001 * n + length / 1e7)
        for n, depth in enumerate((0.5, 0.25, 0.75))
        for length in (4096, 8192)
    ]
    axis = figures.needle_grid(moved).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["25", "50", "75"]
    assert np.isfinite(axis.images[0].get_array()).all()


def test_a_panel_of_the_grid_has_its_own_lengths_alone():
    """Those of other panels once stood empty in it."""
    two = [replace(ROW, length=length, budget=budget) for length, budget in ((4096, 256), (16384, 512))]
    shown = [axis for axis in figures.needle_grid(two).axes if axis.get_title()]
    assert [[label.get_text() for label in axis.get_xticklabels()] for axis in shown] == [["4K"], ["16K"]]
