"""Rows, their summary, and the README's tables made of them."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripts_loaded import load_script

from locret_kit.cli.eval import main
from locret_kit.evals.engine import Row, read_rows
from locret_kit.evals.report import overview, score_table
from locret_kit.evals.tables import Cell, summarize, to_csv
from locret_kit.evals.tasks import known_tasks
from locret_kit.evals.tasks.document_tasks import averages

ROW = Row(task="R.PassKey", haystack="jargon", length=4096, budget=512, policy="locret", heads="h", sample=0, score=1.0)


RESULTS = load_script("scripts/results.py")


def table(cells: Sequence[Cell]) -> str:
    return score_table(cells).markdown()


def test_a_share_has_an_interval_and_other_scores_have_none():
    shares = [replace(ROW, sample=i, score=float(i > 0)) for i in range(4)]
    (cell,) = summarize(shares)
    assert (cell.low, cell.high) == pytest.approx((0.3006, 0.9544), abs=1e-4)
    for rows in ([*shares, replace(ROW, sample=9, score=0.25)], [replace(row, metric="nll") for row in shares]):
        (cell,) = summarize(rows)
        assert cell.low is None


def test_the_command_prints_the_rows_that_are_asked_for(tmp_path, capsys):
    rows = (replace(ROW, policy=p, heads="-", sample=i) for p in ("x&y", "h2o") for i in range(10))
    write(tmp_path / "rows.0.jsonl", *rows)
    assert main(["table", f"out={tmp_path}", "policies=[h2o]"]) == 0
    said = capsys.readouterr().out
    assert "| h2o | 1.00 [0.72, 1.00] (n=10) |" in said and "x" not in said
    assert main(["table", f"out={tmp_path}", "format=latex"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("% R.PassKey, haystack: jargon (match; mean [95% interval]")
    assert "x\\&y & 1.00 [0.72, 1.00] (n=10) \\\\\n" in said and said.endswith("\\bottomrule\n\\end{tabular}\n")


@given(st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rng):
    rows = [replace(ROW, sample=i, budget=b, score=i / 3, prefill_s=0.1 * i) for i in range(4) for b in (256, 512)]
    shuffled = rng.sample(rows, len(rows))
    assert to_csv(summarize(rows)) == to_csv(summarize(shuffled))


def test_errors_are_counted_and_left_out_of_the_mean():
    rows = [ROW, replace(ROW, sample=1, score=0.0), replace(ROW, sample=2, score=None, error="X: y")]
    (cell,) = summarize(rows)
    assert (cell.n, cell.errors, cell.mean, cell.stderr) == (2, 1, 0.5, 0.5)
    (only,) = summarize([rows[2]])
    assert overview([*rows, replace(rows[2], task="other")]).head[-1] == "other, haystack: jargon (-)"
    assert (only.n, only.mean, only.stderr) == (0, None, None)
    assert str(cell) == "0.50 [0.09, 0.91] (n=2, 1 failed)" and str(only) == "- (n=0, 1 failed)"
    assert str(replace(cell, low=None, high=None)) == "0.50 ± 0.50 (n=2, 1 failed)"


def test_a_table_puts_full_attention_into_every_column_of_its_length():
    rows = [
        *(replace(ROW, budget=b, length=n) for b in (256, 512) for n in (4096, 8192)),
        replace(ROW, policy="full", heads="-", budget=0),
        replace(ROW, policy="h2o", heads="-", budget=256, score=0.0),
    ]
    lines = table(summarize(rows)).splitlines()
    assert lines[0] == "**R.PassKey, haystack: jargon** (match; mean [95% interval] or ± standard error)"
    assert lines[2] == "| policy | 4K, budget 256 | 4K, budget 512 | 8K, budget 256 | 8K, budget 512 |"
    one = "1.00 [0.21, 1.00] (n=1)"
    assert lines[4] == f"| full | {one} | {one} | - | - |"
    assert lines[5].startswith("| locret (h) | 1.00") and lines[6] == "| h2o | 0.00 [0.00, 0.79] (n=1) | - | - | - |"
    alone = table(summarize([replace(ROW, budget=0, policy="full", heads="-", metric="nll", length=1000)]))
    assert "| policy | 1000 |" in alone and "(nll: nats a token, lower is better" in alone


def cells_of(**samples: Sequence[int]) -> list[Cell]:
    """Cells of policies with the examples of these numbers; `full` has no budget."""
    return summarize(
        replace(ROW, policy=name, heads="-", budget=0 if name == "full" else 512, sample=i, score=0.5)
        for name, numbers in samples.items()
        for i in numbers
    )


def test_cells_of_other_texts_than_most_of_their_column_are_marked():
    cells = cells_of(full=range(4), h2o=range(4), streaming=range(3), tova=(0, 1, 2, 9))
    assert [cell.samples for cell in cells] == ["0-3", "0-3", "0-2", "0-2 9"]
    marked = table(cells)
    shown = {line.split(" | ")[0][2:]: line.split(" | ")[1][:-2] for line in marked.splitlines()[4:8]}
    even = "0.50 ± 0.00 (n=4)"
    assert shown == {"full": even, "h2o": even, "streaming": "0.50 ± 0.00 (n=3)†", "tova": f"{even}†"}
    assert marked.endswith("|\n\n† on other texts than most of its column\n") and marked.count("†") == 3
    elsewhere = [replace(cell, length=8192, samples="0") for cell in cells[:1]]  # another column
    assert table([*cells[:2], *elsewhere]).count("†") == 0
    marked = table(cells_of(full=range(4), h2o=range(6)))  # of two sets the larger is the column's
    assert "(n=4)†" in marked and "(n=6)†" not in marked


def test_full_attention_is_marked_in_the_columns_of_other_texts_alone():
    rows = [replace(ROW, policy=p, heads="-", budget=b, sample=i) for p in ("a", "b") for b, n in ((256, 2), (512, 3))
            for i in range(n)]  # fmt: skip
    rows += [replace(ROW, policy="full", heads="-", budget=0, sample=i) for i in range(3)]
    line = table(summarize(rows)).splitlines()[4]
    assert line == "| full | 1.00 [0.44, 1.00] (n=3)† | 1.00 [0.44, 1.00] (n=3) |"
    failed = [replace(ROW, policy=p, heads="-", score=None, error="X: y") for p in ("a", "b")]
    shown = table(summarize([ROW, *failed]))
    assert "†" not in shown and shown.count("- (n=0, 1 failed)") == 2


def test_a_paper_s_average_stands_where_all_its_tasks_do():
    """Each task counts the same, however many examples it has; no mean without one of them."""
    names = averages()["locret-leval"]
    rows = [
        replace(ROW, task=name, haystack="-", policy=policy, heads="-", sample=i, score=float(t == 0), scores={})
        for t, name in enumerate(names)
        for policy in ("a", "b")
        for i in range(3 if t == 0 else 2)
        if (policy, t) != ("b", 5)
    ]
    head, _, *lines = [line for line in overview(rows).markdown().splitlines() if line.startswith("|")]
    assert head.split(" | ")[-1] == "mean of locret-leval |"
    assert [line.split(" | ")[-1] for line in lines] == ["0.17 ± 0.00 (n=13) |", "- |"]
    assert set().union(*averages().values()) <= set(known_tasks())


def test_names_cannot_break_a_table():
    """A haystack may be any file's name, and a policy any expression."""
    text = table(summarize([replace(ROW, policy="x|<b>y", heads="-", haystack="a|b<img>\n.txt", score=0.5)]))
    assert "| x\\|&lt;b&gt;y | 0.50 (n=1) |" in text and "a\\|b&lt;img&gt; .txt" in text
    assert "<" not in text and all(row.count("|") - row.count("\\|") == 3 for row in text.splitlines()[2:])


def test_rows_of_two_texts_by_one_name_are_refused(tmp_path):
    """Another policy's and another budget's too: they stand in one column. Rows whose text is not known go with any."""
    unknown, one = replace(ROW, policy="h2o", heads="-"), replace(ROW, text_hash="a" * 16)
    for change in ({"sample": 1}, {"policy": "h2o", "heads": "-"}, {"budget": 256}):
        write(tmp_path / "rows.0.jsonl", unknown, one, replace(one, **change, text_hash="b" * 16))
        with pytest.raises(ValueError, match=rf"R\.PassKey, jargon, length=4096.* text_hash={'a' * 16} and text_"):
            read_rows(tmp_path)
    write(tmp_path / "rows.0.jsonl", unknown, one, replace(one, task="other", text_hash="b" * 16))
    assert len(read_rows(tmp_path)) == 3


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_share_of_the_prompt_comes_to_other_settings_in_each_prompt(tmp_path, share):
    write(tmp_path / "rows.0.jsonl", *(replace(ROW, budget=share, sample=i, stabilizers=6 + i) for i in range(2)))
    assert len(read_rows(tmp_path)) == 2


def test_rows_survive_the_file_and_those_without_later_fields_are_read(tmp_path):
    """U+2028 and its kind end lines for `str.splitlines`, not for JSON."""
    row = replace(ROW, output="a\nb\u2028\u2029c\x85\x0c\r", scores={"match": 1.0}, answer=["x", 2], depth=0.25)
    (tmp_path / "rows.0.jsonl").write_text(row.to_json() + "\n", encoding="utf-8")
    first = dict(task="R.Number", haystack="repeated", length=1, budget=2, policy="p", heads="-", sample=3)
    more = {"score": 0.0, "output": " x", "answer": "1", "samples": 20, "dtype": "float32", "date": "2026-11-21"}
    (tmp_path / "rows.1.jsonl").write_text(json.dumps(first | more) + '\n{"task": "half')
    (number, passkey) = read_rows(tmp_path)
    assert passkey == row and number.score == 0 and number.metric == "match"
    with pytest.raises(ValueError, match="Out of range float"):
        replace(ROW, score=math.nan).to_json()


def write(path: Path, *rows: Row) -> None:
    path.write_text("".join(row.to_json() + "\n" for row in rows))


def test_of_two_alike_the_score_counts_and_then_the_date(tmp_path):
    """Whatever file or line they stand in."""
    failed = replace(ROW, score=None, error="X: y", date="2026-11-23T00:00:00+00:00")
    older, newer = (replace(ROW, score=s, date=f"2026-11-{d}T00:00:00+00:00") for s, d in ((0.25, 21), (0.75, 22)))
    for order in ((failed, older, newer), (newer, older, failed), (newer, failed, older), (older, failed, newer)):
        for number, row in enumerate(order):
            write(tmp_path / f"rows.{number}.jsonl", row)
        assert read_rows(tmp_path) == [newer]
        write(tmp_path / "all.jsonl", *order)
        assert read_rows(tmp_path / "all.jsonl") == [newer]


def test_the_documented_results_are_those_of_the_committed_rows(capsys, monkeypatch):
    read = cache(RESULTS.read_rows)
    monkeypatch.setattr(RESULTS, "read_rows", lambda files: read(tuple(files)))
    assert RESULTS.main(["--check"]) == 0, capsys.readouterr().err
    monkeypatch.setattr(RESULTS, "score_tables", lambda cells: [])
    monkeypatch.setattr(RESULTS, "answers", lambda rows, places: "another table")
    monkeypatch.setattr(RESULTS.picture, "memory", lambda rows, root: RESULTS.picture.Panel("other", {}))
    assert RESULTS.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "facts.md and docs/results/questions.md and" in said and "cost.svg differ from the rows" in said


def test_a_picture_holds_its_points_and_its_names(tmp_path):
    """Titles and names are in the text of the SVG, as the page's readers search it."""
    picture, drawn = RESULTS.picture, tmp_path / "drawn.svg"
    panels = [
        picture.Panel("Two lines", {"locret": [(1024, 0.5, 0.25, 0.75), (2048, 1.0, 0.5, 1.0)]}, [1024, 2048]),
        picture.Panel("Bars", {"vLLM, 1 client": [(3.5,)]}, top=5),
    ]
    picture.write(drawn, panels)
    assert picture.is_drawn(drawn, panels) and not picture.is_drawn(drawn, panels[1:])
    shown = drawn.read_text(encoding="utf-8")
    assert all(f">{name}</text>" in shown for panel in panels for name in (panel.title, *panel.lines))
