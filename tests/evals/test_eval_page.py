"""The report: one file that asks for nothing, and sorts."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

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


def test_the_page_asks_for_nothing_and_nothing_of_a_run_becomes_markup(report):
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, dict(attrs)))
    parser.feed(report)
    images = [attrs["src"] for tag, attrs in tags if tag == "img"]
    assert len(images) == 2 and all(source.startswith("data:image/svg+xml;base64,") for source in images)
    assert not {tag for tag, _ in tags} & {"a", "iframe", "link", "script"}
    assert not re.search(r"@import|url\(", report) and "{{" not in report


def test_the_page_has_tables_and_settings(report):
    assert "<td>0.75 (n=1)</td>" in report and "† on other texts" in report
    assert "1 failed" in report and "<td>torch</td><td>2</td>" in report


def test_errors_say_what_is_missing_and_what_does_it_instead(run, tmp_path, capsys):
    for words, said in (
        (["report", f"out={tmp_path}"], "holds no rows"),
        (["figure", "score-memry", f"out={run}"], "Did you mean 'score-memory'"),
        (["figure", "score-memory"], "out=... is missing"),
        (["table", f"out={run}", "format=latx"], "Did you mean 'latex'"),
    ):
        assert main(words) == 1
        assert said in capsys.readouterr().err
