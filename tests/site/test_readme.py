"""Names, commands and files in the README, the site and the pages for contributors are those that there are."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from scripts_loaded import load_script

from locret_kit.cli.eval import COMMANDS
from locret_kit.config import recipes
from locret_kit.config.eval_options import load_eval_config
from locret_kit.config.schema import COMMON_OPTIONS, given_by, options_of
from locret_kit.config.serve_options import shared_out
from locret_kit.policies import grammar, registry

ROOT = Path(__file__).resolve().parents[2]
POLICIES = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LOGS = sorted((ROOT / "scripts" / "research").rglob("*.md"))
NAMES = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
PAGES = {
    page: page.read_text(encoding="utf-8")
    for page in (*(ROOT / name for name in FIRST), *sorted((ROOT / "docs").rglob("*.md")), *LOGS)
}
KIT = {command.name: command for command in load_script("scripts/make_reference.py").COMMANDS}
OPTIONS = {name: {*options_of(command.schema), *command.aliases, *COMMON_OPTIONS} for name, command in KIT.items()}
OTHERS = {
    "max_model_len", "data_parallel_size", "tensor_parallel_size", "api_server_count", "max_num_batched_tokens", "enforce_eager",
    "logits_processors", "model_args", "held", "lengths", "prompts", "new_tokens",
}  # fmt: skip
"""Options of other programs that pages name without the program: vLLM, lm-evaluation-harness, scripts."""


def table(header: str) -> list[list[str]]:
    """The cells of the lines below a table's header, in the page of policies."""
    lines = POLICIES[POLICIES.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def replaced(line: str, values: dict[str, str]) -> str:
    """A line with the values of its variables; of a loop's the first."""
    return re.sub(r"\$(\w+)", lambda name: values.get(name[1], name[0]), line)


def commands() -> list[list[str]]:
    """The words of every command of the kit in the pages' blocks."""
    found = []
    for block in (block for text in PAGES.values() for block in re.findall(r"```bash\n(.*?)```", text, re.S)):
        values = dict(re.findall(r"^(?:for )?(\w+)(?:=| in )(\S+)", block, re.M))
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(replaced(line, values), comments=True)
            if words[:1] == ["for"] and "do" in words:
                words = [word.rstrip(";") for word in words[words.index("do") + 1 : -1]]
            if words and words[0] in KIT:
                found.append(words[: words.index("<")] if "<" in words else words)
    return found


def test_every_policy_and_no_other_has_a_line():
    """Its name, and what ``--list-policies`` says of it."""
    rows = {row[0].strip("`"): row[1].replace("`", "") for row in table("| policy | a slot is kept for |")}
    assert rows == {name: named.keeps for name, named in registry.policies().items()}


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_what_there_is_is_counted(page):
    counts = {"recipes": len(recipes.known_recipes()), "policies": len(registry.policies())}
    found = re.findall(r"(\d+) (recipes|policies)", PAGES[ROOT / page])
    assert sorted(found) == sorted((str(count), name) for name, count in counts.items())


def test_every_choice_of_every_part_is_named():
    rows = table("| part | says | choices |")
    assert [row[0].strip("`") for row in rows] == list(registry.KINDS)
    for row in rows:
        choices = [word for text in re.findall(r"`([^`]+)`", row[2]) for word in text.split()]
        names = {re.sub(r"\(.*", "", word) for word in choices if not word.startswith(("locret-", "recipe="))}
        assert names - {"pyramid+adaptive"} == set(registry.parts_named(row[0].strip("`"))), row


def understand(name: str, given: list[str]) -> None:
    """Read a command's arguments by its own parser, without a model, data or output."""
    if name == "locret-eval" and given[0] not in (*COMMANDS, "lm_eval"):
        load_eval_config(given)
    elif name == "locret-train":
        recipes.load_config(given)
    elif name != "locret-eval":
        values = given_by(KIT[name], shared_out(given)[0] if name == "locret-vllm" else given)
        if "policy" in values and "plugin" not in values:
            grammar.parse_policy(values["policy"])


def test_commands_are_understood():
    found, errors = commands(), []
    for name, *given in found:
        try:
            understand(name, given)
        except (ValueError, SystemExit) as error:
            errors.append(f"{name} {' '.join(given)}: {error}")
    assert not errors, "\n".join(errors)
    assert {words[0] for words in found} == set(KIT) and len(found) > 25


def test_options_in_sentences_exist():
    """Those of a named command belong to it; keys of a training's sections, such as ``optim.steps``, too."""
    keys = OPTIONS["locret-train"]
    sections = {key.partition(".")[0] for key in keys if "." in key}
    every = OTHERS.union(*OPTIONS.values())
    pages = "".join(PAGES[page] for page in PAGES if page.is_relative_to(ROOT / "docs"))
    for code in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", TEXT + pages, flags=re.S)):
        first = code.split()[0]
        assert first in KIT or not re.fullmatch(r"locret-[a-z]+", first), code
        if first in KIT or first.startswith("--"):
            given = {flag.replace("-", "_") for flag in re.findall(r"(?<!\S)--(?:no-)?([a-z][\w-]*)", code)}
            known = every if first == "locret-vllm" else OPTIONS.get(first, every)
            assert given <= {name.removeprefix("no_") for name in known}, code
        if (key := re.match(r"(\w+)\.\w+(?==|$)", first)) and key[1] in sections:
            assert key[0] in keys, code


def test_no_line_replaces_a_clone_by_a_copy_of_it():
    """``pip install '.[extra]'`` does, where the clone is installed with ``-e``; in pages, messages, scripts and notebooks."""
    for path in (ROOT / name for name in NAMES if name.endswith((".md", ".py", ".sh", ".ipynb", ".yml", ".toml"))):
        lines = re.findall(r"pip install (?:-(?!e\b|\w*-editable)\S+ )*['\"]?\.[^\n]*", path.read_text("utf-8"))
        assert path == Path(__file__) or not lines, f"{path}: {lines}"


def test_set_up_notices_that_the_kit_is_a_copy(tmp_path):
    """What ``pip install .`` leaves: the stamp of setup.sh, and the package elsewhere. The installer itself is written down."""
    venv, copy, log = tmp_path / "venv", tmp_path / "copy", tmp_path / "log"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] && echo "$@" >> {log} && exit\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (copy / "locret_kit").mkdir(parents=True)
    (copy / "locret_kit" / "__init__.py").touch()

    def set_up(place: Path) -> str:
        env = {**os.environ, "VIRTUAL_ENV": str(venv), "PYTHONPATH": str(place)}
        env.pop("LOCRET_EXTRAS", None)
        log.write_text("")
        subprocess.run(["bash", str(ROOT / "scripts" / "setup.sh")], env=env, check=True, capture_output=True)
        return log.read_text()

    assert set_up(ROOT).rstrip().endswith("-e .[dev]"), "no stamp"
    assert set_up(ROOT) == ""
    assert set_up(copy).rstrip().endswith("-e .[dev]")


def anchors(page: Path) -> set[str]:
    """Anchors of a page: its headings, and what it names."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text), re.M)
    named = re.findall(r'id="([\w-]+)"', text)
    return {*named, *(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)}


def test_links_lead_somewhere():
    """In a clone, and so where the repository is shown; `test_docs.py` has those of the site."""
    for page in (ROOT / name for name in NAMES if name.endswith((".md", ".ipynb"))):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(file), f"{page}: {target}"
        if page.name not in ("LOG.md", "CHANGELOG.md"):  # they name files as they were on their day
            for path in re.findall(r"`((?:tests|scripts|kernels|data|recipes)/[\w./-]+)`", text):
                assert (ROOT / path).exists(), f"{page}: {path}"
