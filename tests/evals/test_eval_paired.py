"""Differences of two policies, example by example."""

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest

from locret_kit.cli.eval import chosen_rows, main
from locret_kit.config.eval_options import RowsConfig
from locret_kit.evals.engine import Row, appending
from locret_kit.evals.tables import differences

ONE = Row(
    task="R.PassKey", haystack="jargon", length=2048, budget=256, policy="locret", heads="ours", sample=0, score=1.0,
    metric="match", scores={"match": 1.0, "nll": 2.0},
)  # fmt: skip
OURS, THEIRS, FULL = [1.0, 0.5, 0.25, 1.0], [0.5, 0.5, 0.0, 0.25], [1.0, 1.0, 1.0, 0.0]


def rows_of(scores: list[float], **settings) -> list[Row]:
    return [
        replace(ONE, sample=i, prompt_hash=str(i), score=x, scores={"match": x, "nll": 3 - x}, **settings)
        for i, x in enumerate(scores)
    ]


ROWS = [*rows_of(OURS), *rows_of(THEIRS, heads="theirs"), *rows_of(FULL, policy="full", heads="-", budget=0)]


def test_means_and_errors_are_those_of_the_differences():
    (ours,) = differences(ROWS, "locret (theirs)")  # full attention has no budget and stands beside none
    wanted = [a - b for a, b in zip(OURS, THEIRS, strict=True)]
    assert (ours.cell.label, ours.cell.n, ours.theirs) == ("locret (ours)", 4, mean(THEIRS))
    assert ours.cell.mean == mean(wanted) and math.isclose(ours.cell.stderr, stdev(wanted) / 2)
    assert [one.cell.mean for one in differences(ROWS, "locret (theirs)", "nll")] == [-ours.cell.mean]


def test_full_attention_stands_beside_every_budget():
    rows = [*ROWS, *rows_of(OURS[:3], budget=512)]
    found = {(one.cell.label, one.cell.budget): one.cell for one in differences(rows, "full")}
    assert found["locret (ours)", 256].mean == mean(a - b for a, b in zip(OURS, FULL, strict=True))
    assert found["locret (ours)", 512].n == 3


def test_examples_that_one_of_them_lacks_do_not_count():
    rows = [row for row in ROWS if (row.label, row.sample) != ("locret (theirs)", 1)]
    rows = [replace(row, score=None) if (row.label, row.sample) == ("locret (ours)", 2) else row for row in rows]
    (found,) = differences(rows, "locret (theirs)")
    assert (found.cell.n, found.cell.mean) == (2, mean([0.5, 0.75]))


def test_errors_name_what_there_is():
    elsewhere = [replace(row, sample=row.sample + 9) for row in ROWS if row.policy == "full"]
    with pytest.raises(
        ValueError, match=r"against='full' has no example that another policy has answered at its budget"
    ):
        differences([row for row in ROWS if row.policy != "full"] + elsewhere, "full")
    with pytest.raises(ValueError, match=r"against='locret \(their\)' is unknown. Did you mean 'locret \(theirs\)'"):
        differences(ROWS, "locret (their)")
    with pytest.raises(ValueError, match=r"figure='nl' is unknown. Did you mean 'nll'"):
        differences(ROWS, "full", "nl")
    with pytest.raises(ValueError, match=r"R.PassKey, sample=3: locret \(ours\) and full have read different prompts"):
        differences([*ROWS[:3], replace(ROWS[3], prompt_hash="x"), *ROWS[4:]], "full")


def test_command(tmp_path, capsys):
    with appending(tmp_path / "rows.0.jsonl") as append:
        for row in ROWS:
            append(row)
    assert main(["paired", f"out={tmp_path}", "against=locret (theirs)", "figure=nll"]) == 0
    lines = capsys.readouterr().out.splitlines()
    spread = stdev(a - b for a, b in zip(OURS, THEIRS, strict=True)) / 2
    assert lines[2] == (
        "| R.PassKey, haystack: jargon | 2K | 256 | locret (ours) | nll, lower is better | 4 | 2.688 | "
        f"{mean(THEIRS) - mean(OURS):+.3f} ± {spread:.3f} |"
    )
    assert main(["paired", f"out={tmp_path}"]) == 1 and "against=... is missing" in capsys.readouterr().err


def test_rows_are_named_as_the_tasks_were_asked_for(tmp_path):
    """Aliases, groups and prefixes of locret-eval find the rows that it wrote for them."""
    names = ("R.PassKey", "ruler.vt", "fidelity:R.PassKey", "agreement:ruler.cwe")
    with appending(tmp_path / "rows.0.jsonl") as append:
        for name in names:
            append(replace(ONE, task=name))
    asked = ("passkey", "ruler", "fidelity:passkey", "agreement:ruler", "ruler.vt")
    found = {name: chosen_rows(RowsConfig(out=str(tmp_path), tasks=[name])) for name in asked}
    assert [[row.task for row in found[name]] for name in asked] == [[name] for name in (*names, "ruler.vt")]
