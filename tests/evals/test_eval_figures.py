"""Figures of rows: what is drawn, and their files."""

from dataclasses import replace

import numpy as np
import pytest

from locret_kit.evals.engine import Row
from locret_kit.evals.report import FIGURES, draw, needle_grid, score_memory

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
def test_a_figure_has_units_and_is_as_wide_as_asked_for(name):
    function, _ = FIGURES[name]
    narrow = function(rows()[:5], 3.3)
    panels = [axis for axis in narrow.axes if axis.get_title()]
    assert panels and all(axis.get_xlabel() and axis.get_ylabel() for axis in panels)
    assert narrow.get_figwidth() == 3.3 and all(axis.get_subplotspec().colspan.start == 0 for axis in panels)
    with pytest.raises(ValueError, match=r"no row"):
        function([replace(ROW, score=None, error="X: y")])


def test_a_figure_goes_to_three_files(tmp_path):
    pdf, png, svg = (path.read_bytes() for path in draw("score-memory", rows()[:1], tmp_path))
    assert pdf.startswith(b"%PDF") and png.startswith(b"\x89PNG") and b"<svg" in svg
    assert b"CreationDate" not in pdf and b"<dc:date>" not in svg, "the same rows give the same bytes"


def test_score_against_memory_shows_the_means_and_wilson_s_intervals():
    figure = score_memory(rows())
    drawn = {bar.get_label(): bar.lines[0].get_xydata().tolist() for bar in figure.axes[0].containers}
    assert drawn == {"full": [[1, 1]], "h2o": [[256, 0.5], [512, 0.5]], "$tova": [[256, 0.5], [512, 0.5]]}
    full = next(bar for bar in figure.axes[0].containers if bar.get_label() == "full")
    of_three_right = full.lines[2][0].get_segments()[0]
    assert of_three_right[:, 1] == pytest.approx([0.4385, 1], abs=1e-4)
    failed = replace(ROW, sample=9, score=None, error="X: y", device="")  # which has no device
    on_gpu = score_memory([*(replace(row, device="cuda:0") for row in rows()), failed])
    assert on_gpu.axes[0].get_xlabel() == "peak memory (MiB)", "on a CPU it is the process's"


def test_the_grid_has_a_row_for_each_tenth_and_a_panel_its_own_lengths():
    """Where the needle really stands differs by length; that once gave every prompt a row of its own."""
    moved = [
        replace(ROW, sample=n, length=length, depth=depth + 0.001 * n + length / 1e7)
        for n, depth in enumerate((0.5, 0.25, 0.75))
        for length in (4096, 8192)
    ]
    one, other, _ = needle_grid([*moved, replace(ROW, length=16384, budget=1024)]).axes
    assert [label.get_text() for label in one.get_yticklabels()] == ["20", "50", "80"]
    assert np.isfinite(one.images[0].get_array()).all()
    assert [[label.get_text() for label in axis.get_xticklabels()] for axis in (one, other)] == [["4K", "8K"], ["16K"]]
