"""The report: one file that asks for nothing, and sorts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import BROWSER, BROWSERS, browsing

from locret_kit.cli.eval import main
from locret_kit.evals.engine import Row

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with the rows of three policies, one of them failed."""
    out = tmp_path_factory.mktemp("page") / "run"
    out.mkdir()
    base = Row(
        task="R.PassKey", haystack=EVIL, length=4096, budget=512, policy="locret", heads="h", sample=0, score=1.0,
        scores={"match": 1.0}, depth=0.5, tokens=9, prefill_s=2.0, cache_bytes=2**20, prompt_hash="p0", model="m",
        date="2026-11-21", versions={"torch": "2"},
    )  # fmt: skip
    rows = [
        base,
        replace(base, policy="h2o", heads="-", score=0.25, budget=64),
        replace(base, policy="h2o", heads="-", score=0.75, sample=1),
        replace(base, policy="full", heads="-", budget=0, score=None, error="ValueError: no"),
    ]
    (out / "rows.0.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    (out / "config.json").write_text(json.dumps({"tasks": ["passkey"], "seed": 0}))
    return out


@pytest.fixture(scope="module")
def report(run) -> str:
    assert main(["report", f"out={run}"]) == 0
    return (run / "report.html").read_text(encoding="utf-8")


class Parsed(HTMLParser):
    """Tags, addresses that a browser would fetch, and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.fetched += [
            v for n, v in attrs if n in ("src", "href", "xlink:href", "action") and not v.startswith(("#", "data:"))
        ]


def test_the_page_asks_for_nothing_and_nothing_of_a_run_becomes_markup(report):
    parsed = Parsed(report)
    assert parsed.fetched == [] and not re.search(r"@import|url\((?!#)", report)
    assert parsed.tags.count("img") == 2 and "link" not in parsed.tags and "iframe" not in parsed.tags
    assert set(re.findall(r'href="#([^"]+)"', report)) <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert "{{" not in report and report.count("</script>") == 1 and "<img src=x" not in report


def test_tables_sort_by_numbers_and_the_settings_are_there(report):
    assert re.search(r'<td class="n" data-value="0.75">0\.75', report) and "config.json" in report
    assert "1 failed" in report and "version of torch" in report


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} to look with")
def test_in_a_browser(report, tmp_path):
    """Sort the column of means of the table of all cells both ways."""
    script = """(() => {
    const out = [], tables = [...document.querySelectorAll("table.sortable")];
    const table = tables.find((t) => t.caption.textContent.startsWith("Every cell"));
    const at = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === "mean");
    const means = () => [...table.tBodies[0].rows].map((r) => r.cells[at].textContent).join(" ");
    for (const turn of [1, 2]) { table.tHead.rows[0].cells[at].querySelector("button").click(); out.push(means()); }
    return out;
    })()"""
    path = tmp_path / "page.html"
    path.write_text(report, encoding="utf-8")
    with browsing(tmp_path) as tab:
        tab.open(path.as_uri())
        assert tab.evaluate(script) == ["0.250 0.750 1.000 -", "1.000 0.750 0.250 -"]


def test_errors_say_what_is_missing_and_what_does_it_instead(run, tmp_path, capsys):
    for words, said in (
        (["report", f"out={tmp_path}"], "holds no rows"),
        (["figure", "score-memry", f"out={run}"], "Did you mean 'score-memory'"),
        (["figure", "score-memory"], "out=... is missing"),
        (["table", f"out={run}", "format=latex"], "summary.csv has every number"),
        (["tasks=[passkey]", f"out={run}", "retry=errors"], "every rerun repeats failed examples"),
    ):
        assert main(words) == 1
        assert said in capsys.readouterr().err
