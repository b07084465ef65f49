"""The benchmark of heads: its prompts, its intervals, its tables, and one small run of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from tiny_heads import save_tiny_heads
from tiny_text import tiny_tokenizer
from tiny_tokenizer import save_tiny_backbone

from locret_kit.cli.eval import main
from locret_kit.config import benchmark_runs as config
from locret_kit.evals.cells import wilson
from locret_kit.evals.engine.result_rows import Row, read_rows
from locret_kit.evals.report.benchmark_tables import BlockRows, by_document, compared, grids, scores
from locret_kit.evals.tasks import Example, find_tasks
from locret_kit.samples import overlap
from locret_kit.samples.facts import FACTS, HELD_FACTS
from locret_kit.samples.haystack import load_text
from locret_kit.samples.needles import WORDINGS
from locret_kit.samples.wording import HELD_PROMPTS, PROMPTS

# ---- prompts -----------------------------------------------------------------------------------------------------------


def test_questions_about_a_document_begin_alike(tmp_path):
    (tmp_path / "text.txt").write_text(load_text("pydoc")[:60_000])
    (task,) = find_tasks(["questions"], haystacks=[str(tmp_path)])
    made = [task.make(Example(task, tiny_tokenizer(), 1500, i)) for i in range(5)]
    first, other = made[:4], made[4]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*(one.prompt for one in first), strict=False))
    document = "".join(letters[0] for letters in same)
    assert len({one.answer for one in first}) == 4 and not document.startswith(other.prompt[:200])
    for i, one in enumerate(first):
        said, question = next(
            (w.needle.format(key=one.answer), w.question) for w in WORDINGS if w.question in one.prompt
        )
        assert document.count(said) == 1 and one.prompt.count(question) == 1
        assert abs(document.index(said) / len(document) - (i + 0.5) / 4) < 0.1
        assert len(tiny_tokenizer()(one.prompt).input_ids) <= 1500


def test_wordings_are_not_those_of_training():
    trained = [part for fact in (*FACTS, *HELD_FACTS) for part in fact[1:]] + [*PROMPTS, *HELD_PROMPTS]
    known = overlap.union([overlap.grams(text) for text in trained])
    for words in WORDINGS[1:]:
        assert not overlap.among(overlap.grams(words.needle), known).any()
        assert words.question not in {fact[2] for fact in FACTS}
    assert len(WORDINGS) == 10 and len({words.question for words in WORDINGS}) == 10


def test_a_folder_of_texts_is_one_haystack(tmp_path):
    (tmp_path / "b.txt").write_text("Second.\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "first.md").write_text("First.\n")
    assert load_text(tmp_path) == "First.\n\nSecond."


# ---- figures -----------------------------------------------------------------------------------------------------------


ONE = Row(
    task="R.PassKey", haystack="dev", length=4096, budget=512, policy="locret", heads="old", sample=0, score=1.0,
    metric="match", scores={"match": 1.0},
)  # fmt: skip


def rows_of(values, **settings):
    return [replace(ONE, sample=i, prompt_hash=str(i), score=x, scores={}, **settings) for i, x in enumerate(values)]


def test_answers_about_one_document_count_once():
    rows = rows_of([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], task="questions")
    assert [(row.sample, row.score) for row in by_document(rows)] == [(0, 0.5), (1, 1.0)]  # the third lacks questions


def test_scores_and_differences():
    rows = [*rows_of([1.0, 0.0, 1.0, 1.0]), *rows_of([1.0, 1.0, 1.0, 1.0], heads="new")]
    rows += rows_of([1.0] * 4, policy="full", heads="-", budget=0)
    rows += rows_of([2.0, 3.0, 4.0, 5.0], task="perplexity", metric="nll")
    rows += rows_of([2.5, 3.0, 4.5, 5.0], task="perplexity", metric="nll", heads="new")
    table = scores(rows)
    assert list(table.head)[5:] == ["full", "locret (new)", "locret (old)"]
    share, nll = (list(map(str, line)) for line in table.lines)
    low, high = wilson(3 / 4, 4)
    sure = f"1.00 [{wilson(1.0, 4)[0]:.2f}, 1.00]"
    assert share[4:] == ["4", sure, sure, f"0.75 [{low:.2f}, {high:.2f}]"]
    assert "lower is better" in nll[0] and nll[6] == f"3.750 ± {np.std([2.5, 3, 4.5, 5], ddof=1) / 2:.3f}"
    assert compared(rows, "lookahead-locret (old)") == []
    each, whole = compared([*rows, *rows_of([0.0] * 4, policy="lookahead-locret")], "locret (old)")
    assert [line[-1] for line in each.lines] == ["+0.250 ± 0.250", "+0.250 ± 0.144"]
    (line,) = whole.lines
    assert line[2] == "+0.250" and line[3].startswith("perplexity") and line[4] == "-1.7"  # more nats are a loss


def test_the_grid_names_its_worst_cell():
    parts = [
        BlockRows("grid", "as it is", rows_of([1.0, 1.0])), BlockRows("grid", "ending=line", rows_of([0.0, 1.0])),
        BlockRows("grid", "chunk=256", rows_of([1.0, 1.0])),
    ]  # fmt: skip
    (table,) = grids(parts)
    assert table.title == "Grid, dev, 4K"
    assert [line[0] for line in table.lines] == ["as it is", "ending=line", "chunk=256", "mean", "worst cell"]
    assert table.lines[-2][1] == "0.83" and table.lines[-1][1] == "0.50: ending=line"
    (table,) = grids([*parts, BlockRows("grid", "offset=128", rows_of([1.0, 0.0]))])
    assert table.lines[-1][1] == "0.50: ending=line and 1 more"


# ---- a run -------------------------------------------------------------------------------------------------------------


def test_the_benchmark_is_runs_of_locret_eval():
    """As it was written down: a share of the text for each budget, texts by size, and one key of the grid at a time."""
    made = config.BenchmarkConfig(ckpt=["a/heads", "b/new"], haystacks=["texts/dev"], out="o", data=["d"], size="final")
    runs = list(config.runs(made))
    shares = {one.block: [b / one.config.lengths[0] for b in one.config.budgets] for one in runs}
    assert shares["needles-4k"] == shares["needles-16k"] == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    assert {one.config.samples for one in runs if one.block != "questions"} == {40}
    every = list(config.runs(replace(made, blocks=["grid"], size="screening")))
    assert len(every) == 4 and all(one.config.samples == 10 for one in every)
    assert len({one.config.out for one in [*runs, *every]}) == len(runs) + 4
    small = list(config.runs(replace(made, blocks=["grid-2k"])))
    assert len(small) == 4 and all((one.config.samples, one.config.lengths) == (2, [2048]) for one in small)
    asked = config.runs(replace(made, blocks=["grid-2k", "language", "questions"], samples=6))
    assert {one.block: one.config.samples for one in asked} == {"grid-2k": 6, "language": 6, "questions": 24}
    for plain, *others in (every, small):
        assert plain.config.budgets == [plain.config.lengths[0] // 8]
        assert plain.config.haystacks == ["repeated", "texts/dev"]
        for one in others:
            name, value = one.variation.split("=")
            assert str(getattr(one.config, name)) == value
            assert replace(one.config, out=plain.config.out, **{name: getattr(plain.config, name)}) == plain.config
    assert "leval" not in {one.block for one in config.runs(replace(made, data=[]))}
    ours = {one.block: one.config.policies for one in config.runs(replace(made, policy="lookahead-locret(newest=0)"))}
    for one in runs:
        assert ours[one.block] == ["lookahead-locret(newest=0)" if p == "locret" else p for p in one.config.policies]
    with pytest.raises(ValueError, match=r"against=nev must be one of heads, new. Did you mean 'new'\?"):
        replace(made, against="nev")


def test_a_block_of_another_name_is_refused_with_the_names_there_are(capsys):
    assert main(["benchmark", "blocks=[grid,needle]", "ckpt=[x]"]) == 1
    assert "blocks=['grid', 'needle'] must be a list out of [needles-4k,needles-16k," in capsys.readouterr().err


def test_a_small_benchmark_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    backbone = save_tiny_backbone(tmp_path / "backbone")
    for seed, name in enumerate(("old", "new")):
        save_tiny_heads(tmp_path, seed=seed, backbone=backbone, name=name)
    keys = {"lengths": [900], "budgets": [64], "policies": ["full", "locret"], "max_new_tokens": 4}
    blocks = {
        "questions": {"tasks": ["questions"], **keys, "policies": ["locret"]},
        "grid": {"tasks": ["passkey"], **keys, "policies": ["locret"], "vary": {"chunk": [32]}},
    }  # fmt: skip
    monkeypatch.setattr(config, "definition", lambda: {"sizes": {"screening": 1}, "blocks": blocks})
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- heads:begin -->\nold\n<!-- heads:end -->after\n")
    words = [
        "benchmark", f"ckpt=[{tmp_path / 'old'},{tmp_path / 'new'}]", "haystacks=[pydoc]", f"out={tmp_path / 'out'}",
        "blocks=[questions,grid]", "dtype=float32", f"write={page}",
    ]  # fmt: skip
    assert main(words) == 0
    rows = [len(read_rows(tmp_path / "out" / place)) for place in ("questions", "grid", "grid/chunk=32")]
    assert rows == [8, 4, 4]
    text = (tmp_path / "out" / "benchmark.md").read_text()
    assert page.read_text() == f"before\n<!-- heads:begin -->\n{text}<!-- heads:end -->after\n"
    assert text in capsys.readouterr().out
    assert all(word in text for word in ("Minus locret (old)", "Grid, repeated", "chunk=32", "questions (share)"))
    before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("rows.*.jsonl")}
    assert main(words) == 0
    assert before == {file: file.read_bytes() for file in (tmp_path / "out").rglob("rows.*.jsonl")}
