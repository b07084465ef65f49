"""The site: it builds without a warning and asks no other host, its reference is what the code says, and its blocks run."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path

import pytest
from checkout import BACKBONE, forget_plugins, made_checkout
from import_graph import COMMANDS
from made_documents import pdf
from mkdocs.commands.build import build
from mkdocs.config import load_config
from scripts_loaded import load_script
from tiny_gguf import write_gguf
from tiny_tokenizer import TEXT
from transformers import AutoModelForCausalLM

from locret_kit.evals.tasks import DESCRIPTIONS, HAYSTACK_TASKS, REAL_TEXT_TASKS, STANDALONE_TASKS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PLUGIN = ROOT / "examples" / "value_attention.py"
REFERENCE = load_script("scripts/make_reference.py")
LONG = (
    "LOCRET_EXTRAS=", "python scripts/", "locret-train ", "locret-eval ", "locret-plan ", "for ", "locret-ask books/",
)  # fmt: skip
"""Commands of the pages below that do not run here, by their beginning: they install, take long, have tests of their own, or need
such a command. ``test_readme.py`` parses those of the kit in all pages."""
RECOMMENDED = "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M"
"""The model that pages name first. The checkout's tiny one stands in for it here."""
PAGES = (
    "index", "tutorials/read", "tutorials/train", "tutorials/policy", "howto/bits", "howto/laptop", "howto/many",
    "howto/publish", "documents",
)  # fmt: skip
"""Pages whose blocks run here."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = made_checkout(tmp_path_factory.mktemp("site"), "examples", "scripts", "recipes")
    write_gguf(folder / f"{BACKBONE}.Q4_1.gguf", AutoModelForCausalLM.from_pretrained(folder / BACKBONE), "F16")
    for name in ("long.txt", "book.txt", "appendix.txt"):
        (folder / name).write_text(TEXT * 3)
    (folder / "manual.pdf").write_bytes(pdf([TEXT.split(". ")] * 2))
    (folder / "src").mkdir()
    (folder / "src" / "server.py").write_text("class Server:\n    pass\n" * 40)
    (folder / "questions.txt").write_text("Who is it?\n")
    return folder


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Forget after a test what a plugin registers."""
    forget_plugins(monkeypatch)
    yield
    sys.modules.pop(str(PLUGIN), None)


def blocks(page: str, kind: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.S)


def lines(page: str) -> list[str]:
    """The commands of a page, one a line, without comments."""
    joined = "\n".join(blocks(page, "bash")).replace("\\\n", " ").replace(RECOMMENDED, BACKBONE)
    return [line for found in joined.splitlines() if (line := re.sub(r"\s+#.*$", "", found).strip())]


def run(line: str, command) -> None:
    """Run a line: a command of the kit in this process, anything else by a shell."""
    name, *words = shlex.split(line)
    if not name.startswith("locret-"):
        subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=True)
        return
    files = {mark: words[words.index(mark) + 1] for mark in "<>" if mark in words}
    given = words[: min(words.index(mark) for mark in files)] if files else words
    stdin = Path(files["<"]).read_bytes() if "<" in files else b""
    module, main = COMMANDS[name.removeprefix("locret-")]
    status, out, err = command(getattr(import_module(module), main), *given, stdin=stdin)
    assert status == 0, f"{line}\n{err}"
    if ">" in files:
        Path(files[">"]).write_text(out)


def test_every_synthetic_task_is_described():
    assert set(DESCRIPTIONS) == {*HAYSTACK_TASKS, *STANDALONE_TASKS, *REAL_TEXT_TASKS}


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    committed = {str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md")}
    assert listed == committed | {f"reference/{page}" for page in REFERENCE.PAGES}


def test_no_link_leads_out_of_the_site():
    """MkDocs says nothing of a file that is there, but beside the pages. Links to code lead to the pages made of it there."""
    for file in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text(encoding="utf-8")):
            place = (file.parent / link).resolve()
            assert place.is_relative_to(DOCS) or str(place.relative_to(ROOT)) in REFERENCE.SOURCES, f"{file}: {link}"


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "true")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    for file in tmp_path.rglob("*.html"):
        assert not re.search(r"href=\"[./]*(?:locret_kit|recipes)/", file.read_text("utf-8")), file
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:[^\"]+)\"", file.read_text("utf-8"))
        assert not loaded, file
    assert len(json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))["docs"]) > 100


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, place, monkeypatch, command):
    monkeypatch.chdir(place)
    ran = 0
    for line in lines(page):
        if not line.startswith(LONG):
            run(line, command)
            ran += 1
    for block in set(blocks(page, "python")) - {PLUGIN.read_text(encoding="utf-8")}:
        with redirect_stdout(io.StringIO()):
            exec(compile(block, page, "exec", dont_inherit=True), {"__name__": "pasted"})
    assert ran


def test_what_is_left_out_where_pages_are_run_as_printed_stands_there():
    """In ``scripts/run_pages.py``: neither a reason nor a stand-in for what no page says, and a page's own install lines."""
    script = load_script("scripts/run_pages.py")
    pages = {page.name: page for page in script.pages([])}
    said = "".join((ROOT / name).read_text(encoding="utf-8") for name in pages)
    assert [words for words in (*script.SKIPPED, *script.STAND_INS) if words not in said] == []
    assert script.BEFORE.keys() < pages.keys() and pages["README.md"].installs == ()
    assert pages["docs/tutorials/serve.md"].installs == ("pip install -e '.[serve]'", "pip install openai httpx")


def test_the_policy_of_the_tutorial_is_the_example():
    (block,) = blocks("tutorials/policy", "python")
    assert block == PLUGIN.read_text(encoding="utf-8")


def test_the_examples_run(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    load_script("examples/read_book.py").main("book.txt", "What is it?", budget=64)
    assert "tokens, of which a head holds 64" in capsys.readouterr().out
    load_script("examples/compare_policies.py").main(BACKBONE, "recency", "full", budget=128)
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["0% kept", "100% kept"]


def test_the_records_of_the_tutorial_are_of_every_schema():
    from locret_kit.samples.records import SCHEMAS, to_messages

    (block,) = blocks("tutorials/train", "json")
    records = [json.loads(line) for line in block.splitlines()]
    assert len({tuple(record) for record in records}) == len(SCHEMAS) == len(records)
    for record in records:
        messages = to_messages(record)
        assert messages[-1] == {"role": "assistant", "content": "The baker."}
        assert "Who came in?" in messages[-2]["content"]
