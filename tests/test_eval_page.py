"""The report: one file that asks for nothing, sorts, and shows every example; and the terminal's view of what was kept."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import BROWSER, BROWSERS
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from locret_kit.cli.eval import main
from locret_kit.evals.engine.result_rows import Row
from locret_kit.evals.report import html_report
from locret_kit.runtime import kept_text

TEXT = "The harbour was quiet, naïve \U0001f600 boats came in. The pass key is 12345. "
EVIL = "</script><img src=x onerror=alert(1)>"
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A folder with the rows of three policies, one of them failed, two with kept tokens."""
    out = tmp_path_factory.mktemp("page") / "run"
    (out / "kept").mkdir(parents=True)
    TOKENIZER.save_pretrained(out / "backbone")
    ids = TOKENIZER(TEXT).input_ids
    base = Row(
        task="R.PassKey", haystack="pydoc", length=4096, budget=512, policy="locret", heads="h", sample=0,
        score=1.0, scores={"match": 1.0}, output=EVIL, answer="12345",
        depth=0.5, tokens=len(ids), prefill_s=2.0, prompt_hash="p0", model=str(out / "backbone"), date="2026-11-21",
        versions={"torch": "2"},
    )  # fmt: skip
    rows = [
        replace(base, kept="a"),
        replace(base, policy="h2o", heads="-", score=0.25, kept="b", budget=64),
        replace(base, policy="h2o", heads="-", score=0.75, sample=1),
        replace(base, policy="full", heads="-", budget=0, score=None, error="ValueError: no"),
    ]
    (out / "rows.0.jsonl").write_text("".join(row.to_json() + "\n" for row in rows))
    (out / "config.json").write_text(json.dumps({"tasks": ["passkey"], "seed": 0}))
    heads = np.zeros((2, len(ids)), dtype=np.uint8)
    heads[:, -3:] = 2
    heads[0, 0] = 2
    for stem in ("a", "b"):
        np.savez(out / "kept" / f"{stem}.npz", ids=np.array(ids, dtype=np.int32), heads=heads, n_heads=2)
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


def test_the_page_asks_for_nothing_and_ids_are_unique(report):
    parsed = Parsed(report)
    assert parsed.fetched == [] and not re.search(r"@import|url\((?!#)", report)
    assert parsed.tags.count("img") >= 3 and "link" not in parsed.tags and "iframe" not in parsed.tags
    assert set(re.findall(r'href="#([^"]+)"', report)) <= set(parsed.ids)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert "{{" not in report


def test_no_output_becomes_markup(report):
    assert report.count("</script>") == 2 and "<img src=x" not in report
    found = json.loads(re.search(r'id="data">(.*?)</script>', report, re.DOTALL)[1])
    assert found["examples"][0]["output"] == EVIL
    assert "".join(found["prompts"]["p0"]) == TEXT and len(found["examples"]) == 4
    digits = [e["kept"] for e in found["examples"] if "kept" in e]
    assert len(digits) == 2 and all(d[0] == "4" and d[-3:] == "999" and set(d[1:-3]) == {"0"} for d in digits)


def test_tables_sort_by_numbers_and_the_settings_are_there(report):
    assert re.search(r'<td class="n" data-value="0.75">0\.75', report) and "config.json" in report
    assert "1 failed" in report and "version of torch" in report


def test_the_settings_of_the_rows_are_those_that_a_cell_shares(run):
    rows = [replace(row, kv_bits=4) for row in html_report.read_rows(run)]
    assert ("kv_bits", "4") in html_report.settings(run, rows)[0].lines


def test_what_lies_beside_the_figures_is_an_image_and_runs_nothing(run, tmp_path):
    """A drawing of somebody else's once came in with its scripts, or ended the page."""
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / "a.svg").write_text("<svg><script>alert(2)</script></svg>")
    (folder / r"\g<2>.svg").write_text("no drawing at all")
    html = html_report.page(tmp_path, html_report.read_rows(run))
    assert "alert(2)" not in html and html.count("<script") == 2
    parsed = Parsed(html)
    assert parsed.tags.count("img") == 2 and {"a", r"\g<2>"} <= set(parsed.ids)


def test_a_damaged_configuration_is_one_line(run, tmp_path, capsys):
    (tmp_path / "rows.0.jsonl").write_bytes((run / "rows.0.jsonl").read_bytes())
    (tmp_path / "config.json").write_text("[1]")
    assert main(["report", f"out={tmp_path}"]) == 1
    assert capsys.readouterr().err.endswith("config.json must hold a JSON object, not list\n")


def test_marks_of_a_table_are_explained_in_its_caption(run):
    rows = [
        replace(html_report.read_rows(run)[1], policy=p, sample=i, error=None, score=1.0)
        for p in "ab"
        for i in range(3)
    ]
    html = html_report.page(run, [*rows, replace(rows[0], policy="<c>")])
    assert (
        "; † on other texts than most of its column)</caption>" in html and '<td class="policy">&lt;c&gt;</td>' in html
    )


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(BROWSERS)} to look with")
def test_in_a_browser(report, tmp_path):
    """Sort the last table's numbers both ways, then open the example that wrote markup."""
    script = """<script>
    const out = [], cells = document.querySelectorAll("table.sortable")[0];
    const scores = () => [...document.querySelectorAll("#list tbody tr")].map((r) => r.cells[7].textContent).join(" ");
    const header = document.querySelectorAll("#list th")[7];
    header.click(); out.push(scores()); header.click(); out.push(scores());
    document.querySelector("#list tbody tr").click();
    out.push([...document.querySelectorAll("#prompt span")].map((s) => s.textContent).join("").trim());
    out.push([...document.querySelectorAll("#detail pre")].some((p) => p.textContent.startsWith("</script")) + "");
    document.getElementById("heat").click();
    out.push(document.querySelector("#detail h3").textContent);
    document.documentElement.replaceChildren(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(out) }));
    </script>""".replace('"</script"', '"<" + "/script"')
    path = tmp_path / "page.html"
    path.write_text(report.replace("</body>", script + "</body>"), encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
    ]
    dom = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=240, check=True).stdout
    said = json.loads(re.search(r"<pre>(.*)</pre>", dom, re.DOTALL)[1].replace("&lt;", "<").replace("&gt;", ">"))
    assert said == [
        "0.250 0.750 1 -",
        "1 0.750 0.250 -",
        TEXT.strip(),
        "true",
        "R.PassKey, sample 0: h2o, budget 64",
    ]


def test_the_page_opens_with_all_tasks_and_its_first_link_is_to_what_was_kept(run):
    base = html_report.read_rows(run)[0]
    rows = [replace(base, task=task, policy=policy, budget=512 * (policy != "full"), heads="-", kept=None, score=score, sample=n)
            for n in range(10)
            for task in ("one", "two") for policy, score in (("full", 1.0), ("a", 0.5), ("b", 0.25))]  # fmt: skip
    html = html_report.page(run, [*rows, replace(rows[0], sample=10, kept="a")])
    assert re.search(r"<caption>(.*?) \(", html)[1] == "All tasks" and re.search(r"<nav><a [^>]*id=\"heat\"", html)
    assert (
        html.count("<b>0.50") == 4 and "<b>1.00" not in html and "<b>0.25" not in html
    )  # two tasks, in two tables each
    assert html.count('class="reference"') == 3
    assert 'id="heat"' not in html_report.page(run, rows)


def test_a_missing_tokenizer_costs_the_text_alone(run, monkeypatch):
    def gone(model):
        raise OSError(f"{model} is gone")

    monkeypatch.setattr(html_report, "tokenizer_of", gone)
    found = json.loads(html_report.data(run, html_report.read_rows(run)))
    assert [("kept" in e, "gone" in e.get("kept_error", "")) for e in found["examples"]].count((False, True)) == 2


@settings(max_examples=30)
@given(st.text(max_size=30))
def test_token_texts_are_the_text(text):
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    texts = kept_text.token_texts(TOKENIZER, ids)
    assert len(texts) == len(ids) and "".join(texts) == TOKENIZER.decode(ids)


def test_the_terminal_shows_kept_bright_and_evicted_dim(run, capsys):
    words = ["kept", f"out={run}", "sample=0", "policies=[locret]"]
    assert main([*words, "color=always"]) == 0
    said = capsys.readouterr().out
    body = said.split("\n\n")[1]
    assert body.startswith(kept_text.BRIGHT) and kept_text.DIM in body
    assert re.sub(r"\x1b\[\d+m", "", body).strip() == TEXT.strip()
    ids = TOKENIZER(TEXT).input_ids
    bright = "".join(re.findall(r"\x1b\[1m(.*?)\x1b\[0m", body))
    texts = kept_text.token_texts(TOKENIZER, ids)
    assert bright == texts[0] + "".join(texts[-3:])
    assert main([*words, "color=never", "layer=1"]) == 0
    assert capsys.readouterr().out.split("\n\n")[1] == " ... " + "".join(texts[-3:])


def test_errors_say_what_is_missing(run, tmp_path, capsys):
    for words, said in (
        (["kept", f"out={run}", "sample=9"], "keep=10 or more in another out stores them"),
        (["kept", f"out={run}", "layer=5"], "layer=5 must be from 0 to 1"),
        (["kept", f"out={run}", "color=sometimes"], "color=sometimes"),
        (["report", f"out={tmp_path}"], "holds no rows"),
        (["figure", "score-budgets", f"out={run}"], "score-budget"),
        (["figure", "score-budget", f"out={run}", "budgets=[7]", "policies=[x]"], "no such rows"),
        (["figure", "score-budget"], "out=... is missing"),
    ):
        assert main(words) == 1
        assert said in capsys.readouterr().err
