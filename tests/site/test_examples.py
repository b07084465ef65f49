"""Examples run: notebooks cell by cell in small, the page of the Space, and what uses other people's programs."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from checkout import BACKBONE, forget_plugins, made_checkout
from scripts_loaded import load_script
from tiny_tokenizer import TEXT

from locret_kit import Document

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SMALL = {
    "read_a_book": {"TOKENS": 400, "BUDGET": 64, "ANSWER": 4},
    "new_policy": {"TOKENS": 300, "BUDGET": 64, "SAMPLES": 1, "OTHERS": ["streaming"]},
    "train_heads": {"RECIPE": "tiny", "STEPS": 2, "TOKENS": 256},
    "evaluate": {"TASKS": "passkey", "POLICIES": "full,locret", "BUDGETS": "64", "LENGTH": 300, "SAMPLES": 2},
}
"""Settings of a notebook that runs in seconds: of the cell with the tag 'parameters'."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return made_checkout(tmp_path_factory.mktemp("examples"), "recipes")


@pytest.fixture(autouse=True)
def there(place, monkeypatch) -> None:
    """Run in that folder, and forget after a test what a notebook registers."""
    monkeypatch.chdir(place)
    forget_plugins(monkeypatch)


def test_every_notebook_runs_and_is_in_the_documentation():
    assert [path.stem for path in NOTEBOOKS] == sorted(SMALL)
    page = (ROOT / "docs" / "tutorials" / "notebooks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"examples/notebooks/(\w+)\.ipynb", page)) == set(SMALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch, capsys):
    """Its cells, in their order, with the settings above after its own; a run's page is drawn in other tests."""
    monkeypatch.setattr("locret_kit.cli.eval.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "notebook", module := ModuleType("notebook"))
    given, names = 0, vars(module)
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, {cell['id']}", "exec"), names)
            if "parameters" in cell["metadata"].get("tags", []):
                assert names.keys() >= SMALL[path.stem].keys()
                names.update(SMALL[path.stem])
                given += 1
    said, errors = capsys.readouterr()
    assert "unknown key" not in errors
    wanted = {"read_a_book": "MiB on disk", "new_policy": "mine(power=2.0)", "train_heads": "val/recall"}
    assert given == 1 and wanted.get(path.stem, "difference") in said


@pytest.mark.parametrize("given", [[], ["--help"]])
@pytest.mark.parametrize("name", ["compare_policies", "pipeline", "read_book"])
def test_an_example_without_arguments_says_how_it_is_run(name, given, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *given])
    with pytest.raises(SystemExit, match=rf"python examples/{name}\.py \S+"):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def test_a_head_holds_no_more_than_the_book(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("Hello.")
    load_script("examples/read_book.py").main(str(tmp_path / "short.txt"))
    tokens, held = re.match(r"(\d+) tokens, of which a head holds (\d+):", capsys.readouterr().out).groups()
    assert tokens == held


def test_the_page_of_the_space_shades_what_the_document_holds():
    app = load_script("examples/space/app.py")
    answer, held, html = app.read_and_ask(TEXT * 8, "What is it?", 64, "lookahead-locret")
    model, tokenizer, heads = app.parts()
    book = Document.read(model, tokenizer, TEXT * 8, 64, "lookahead-locret", heads)
    assert answer == "".join(book.ask("What is it?", max_new_tokens=48)).strip()
    counts = np.zeros(book.cache.get_seq_length())
    for layer in range(3):
        for head in book.cache.kept_positions(layer)[0]:
            counts[head[head >= 0]] += 1
    assert held.startswith(f"{counts.mean() / 6:.0%} of {book.tokens} tokens")
    shown = re.sub(r"<[^>]+>", "", html)
    assert shown == tokenizer.decode(list(book.ids)[: len(counts)]).replace("<", "&lt;").replace(">", "&gt;")
    assert app.read_and_ask("", "What?", 64, "locret")[0] == "Give a text and a question."
    assert "<b>" not in app.shaded(["<b>"], np.array([1.0])) and "0.75" in app.shaded(["x"], np.array([1.0]))


def test_the_pipeline_s_answer_is_that_of_generate(monkeypatch, capsys):
    """With every token held, full attention's own."""
    example = load_script("examples/pipeline.py")
    monkeypatch.setattr(example, "TEXT", "The boats came in. " * 10)
    said = example.main(BACKBONE, "streaming", 4096)
    assert capsys.readouterr().out == f"{said}\n"
    model, tokenizer = example.load_backbone(BACKBONE)
    content = f"{example.TEXT}\nThe pass key is 71432. Remember it.\n{example.TEXT}\n\nWhat is the pass key?"
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert said == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
