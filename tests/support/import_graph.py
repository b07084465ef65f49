"""Who imports whom, from the files alone: of the kit, the kernels and the tests."""

import ast
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVERY = ("pyproject.toml", "constraints.txt", "setup.py", "tests/conftest.py")
"""Files on which every test depends."""
COMMANDS = {
    name: (module, main)
    for name, module, main in re.findall(
        r'^locret-(\w+) = "([\w.]+):(\w+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M
    )
}
"""The module of each command, and its function there."""
MENTION = re.compile(r"\blocret_kit(?:\.\w+)+|\blocret-(\w+)")
"""A module or a command in a text: programs that a test starts."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the kit and the kernels, by its dotted name."""
    found = {}
    for base, package in ((ROOT, "locret_kit"), (ROOT / "kernels", "locret_kernels")):
        for file in (base / package).rglob("*.py"):
            parts = file.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Dotted names that a module imports; of the project's own, the modules that they lie in."""
    file = modules()[module]
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    return imported(file, package) - {module}


def imported(file: Path, package: list[str]) -> frozenset[str]:
    """Dotted names that a file of a package imports, as ``imports``."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for name in node.names:
                inner = f"{stem}.{name.name}"
                found.add(inner if inner in modules() else exports(stem).get(name.name, stem))
    return frozenset(found)


@cache
def exports(package: str) -> dict[str, str]:
    """Names that a package hands on (``from .heads import RetainingHeads as RetainingHeads``), and their modules."""
    if package not in modules() or modules()[package].name != "__init__.py":
        return {}
    tree = ast.parse(modules()[package].read_text(encoding="utf-8"))
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module)
    return {name.name: f"{package}.{node.module}" for node in nodes for name in node.names if name.asname == name.name}


def changed_since(commit: str) -> list[str]:
    """Files that differ from a commit, those that git does not track yet among them."""
    calls = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    runs = (subprocess.run(["git", "-C", ROOT, *call], capture_output=True, text=True, check=True) for call in calls)
    return [name for run in runs for name in run.stdout.splitlines()]


def tests_that_reach(changed: Iterable[str]) -> set[Path]:
    """Test files that import a changed file, directly or not, or start a program that does. A file that is no module counts as
    all modules of its folder; outside of kit, kernels and tests, it counts for ``tests/site`` and for whoever names it."""
    places = [ROOT / name for name in changed]
    tests = set((ROOT / "tests").glob("*/test_*.py"))
    if any(name in EVERY for name in changed):
        return tests
    files = {**modules(), **{file.stem: file for file in (ROOT / "tests" / "support").rglob("*.py")}}
    code = [ROOT / "locret_kit", ROOT / "kernels" / "locret_kernels", ROOT / "tests" / "support"]
    folders = {place.parent for place in places if place.suffix != ".py"}
    hit = {name for name, file in files.items() if file in places or file.parent in folders}
    outside = [place for place in places if not any(place.is_relative_to(folder) for folder in [*code, ROOT / "tests"])]
    users: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for target in reached_names(file, name):
            users.setdefault(target, set()).add(name)
    todo = [*hit]
    while todo:
        new = users.get(todo.pop(), set()) - hit
        hit |= new
        todo += new
    return {
        test
        for test in tests
        if test in places
        or test.parent / "conftest.py" in places
        or reached_names(test, "") & hit
        or (outside and test.parent.name == "site")
        or any(place.name in test.read_text(encoding="utf-8") for place in outside)
    }


def reached_names(file: Path, module: str) -> set[str]:
    """Modules that a file imports, and of a test those that it names."""
    if module in modules():
        return set(imports(module))
    mentions = MENTION.finditer(file.read_text(encoding="utf-8"))
    return set(imported(file, [])) | {COMMANDS[m[1]][0] if m[1] in COMMANDS else m[0] for m in mentions}
