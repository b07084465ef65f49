"""Examples run: notebooks cell by cell in small, the page of the Space, and what uses other people's programs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import yaml
from scripts_loaded import load_script
from tiny_heads import INFERENCE
from tiny_tokenizer import TEXT, save_tiny_backbone
from transformers import AutoConfig

from locret_kit import Document
from locret_kit.backbones.spec import spec_of
from locret_kit.heads import HeadsConfig, RetainingHeads
from locret_kit.policies import registry

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
BACKBONE, HEADS = "checkpoints/SmolLM2-135M-Instruct", "checkpoints/smollm2-135m-locret"
SMALL = {
    "read_a_book": {"TOKENS": 400, "BUDGET": 64, "ANSWER": 4},
    "new_policy": {"TOKENS": 300, "BUDGET": 64, "SAMPLES": 1, "OTHERS": ["streaming"]},
    "train_heads": {"RECIPE": "tiny", "STEPS": 2, "TOKENS": 256},
    "evaluate": {"TASKS": "passkey", "POLICIES": "full,locret", "BUDGETS": "64", "LENGTH": 300, "SAMPLES": 2},
}
"""Settings of a notebook that runs in seconds: of the cell with the tag 'parameters'."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder that looks like a checkout, with a tiny random backbone and heads by the names of those that ship."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    backbone = save_tiny_backbone(folder / BACKBONE, max_position_embeddings=8192)
    torch.manual_seed(1)
    config = HeadsConfig.for_backbone(spec_of(AutoConfig.from_pretrained(backbone)), BACKBONE, 8, inference=INFERENCE)
    RetainingHeads(config).save_pretrained(str(folder / HEADS))
    return folder


@pytest.fixture(autouse=True)
def there(place, monkeypatch) -> None:
    """Run in that folder, and forget after a test what a notebook registers."""
    monkeypatch.chdir(place)
    registry.policies()
    for name in ("_policies", "_owners"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    monkeypatch.setattr(registry, "_parts", {kind: dict(table) for kind, table in registry._parts.items()})


def test_every_notebook_runs_and_is_in_the_documentation():
    assert [path.stem for path in NOTEBOOKS] == sorted(SMALL)
    page = (ROOT / "docs" / "tutorials" / "notebooks.md").read_text(encoding="utf-8")
    assert set(re.findall(r"examples/notebooks/(\w+)\.ipynb", page)) == set(SMALL)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs(path):
    book = json.loads(path.read_text(encoding="utf-8"))
    ids = [cell["id"] for cell in book["cells"]]
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and len(set(ids)) == len(ids)
    for cell in book["cells"]:
        assert cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


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
    said = capsys.readouterr().out
    wanted = {"read_a_book": "MiB on disk", "new_policy": "mine(power=2.0)", "train_heads": "val/recall"}
    assert given == 1 and wanted.get(path.stem, "difference") in said


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


def test_the_header_of_the_space():
    _, header, text = (ROOT / "examples" / "space" / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    given = yaml.safe_load(header)
    assert given["sdk"] == "gradio" and (ROOT / "examples" / "space" / given["app_file"]).is_file()
    assert len(given["short_description"]) <= 60 and "examples/space/app.py" in text


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
