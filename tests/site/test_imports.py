"""Who may import whom. Every import counts: at the top of a file, inside of a function, and for types alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from import_graph import imports, modules

FLOORS = (
    {"naming", "processes"},
    {"files", "cis", "registry", "validation"},
    {"settings", "hub"},
    {"backbones", "text"},
    {"answers"},
    {"samples"},
    {"heads"},
    {"policies"},
    {"cache"},
    {"planning"},
    {"runtime"},
    {"engine"},
    {"documents"},
    {"serving", "vllm"},
    {"config"},
    {"training"},
    {"evals"},
    {"card"},
    {"cli"},
    {"lm_eval", "__main__"},
)
"""Rooms of ``locret_kit``: packages, and the modules beside them. A room imports from its own floor's rooms only what is its
own, and from the floors before it."""
ONLY = {
    "pydantic": {"validation", "config", "serving"},
    "fastapi": {"serving"},
    "prometheus_client": {"serving"},
    "llguidance": {"serving"},
    "vllm": {"vllm", "cli"},
    "lightning": {"training"},
    "deepspeed": {"training"},
    "huggingface_hub": {"hub", "card", "backbones", "evals"},
    "matplotlib": {"evals", "training"},
    "jinja2": {"card", "evals", "text"},
    "markitdown": {"text"},
    "pypdfium2": {"text"},
    "prompt_toolkit": {"cli"},
    "triton": set(),
}
"""Libraries that only some rooms know; Triton is known to the kernels alone."""


def room(module: str) -> str:
    """The room of a module of the kit: ``cache`` of ``locret_kit.cache.storage.rows``."""
    return module.split(".")[1] if "." in module else module


def folder(module: str) -> str:
    """The package in which a module lies; a package lies in itself."""
    return module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]


def reached(module: str) -> set[str]:
    """A module and all that it imports of its own room, directly or not."""
    found, to_follow = {module}, [module]
    while to_follow:
        targets = imports(to_follow.pop()) & modules().keys()
        new = {target for target in targets if room(target) == room(module)} - found
        found |= new
        to_follow += new
    return found


def arrows() -> Iterator[tuple[str, str]]:
    """Every import of a module of ``locret_kit`` by another one."""
    for module in modules():
        for target in imports(module) & modules().keys():
            if module.startswith("locret_kit.") and target.startswith("locret_kit."):
                yield module, target


def test_every_room_has_its_floor():
    rooms = {room(module) for module in modules() if module.startswith("locret_kit.")}
    assert rooms == set.union(*FLOORS)


def test_imports_run_one_way():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    up = [
        f"{module} imports {target}"
        for module, target in arrows()
        if room(module) != room(target) and floor[room(target)] >= floor[room(module)]
    ]
    assert not up, "\n".join(sorted(up))


def test_the_door_is_narrow():
    """Who serves, measures or drives another engine takes of the engine's rooms what ``locret_kit.engine`` hands on."""
    engine = {"cache", "runtime", "backbones", "heads", "planning", "locret_kernels"}
    guests = {"serving", "vllm", "evals"}
    inner = {(module, name) for module in modules() if room(module) in guests for name in imports(module)}
    past = {(module, name) for module, name in inner if room(name) in engine or name.startswith("locret_kernels")}
    assert not past
    taken = ast.parse(modules()["locret_kit.engine"].read_text(encoding="utf-8")).body
    names = [name.asname for node in taken if isinstance(node, ast.ImportFrom) and node.level for name in node.names]
    assert len(names) <= 15 and len(taken) == len(names) + 1 and None not in names


def test_python_is_started_in_one_place():
    """``sys.executable -m`` and ``-c`` import from the current folder; ``processes`` does not."""
    starts = {module for module, file in modules().items() if "sys.executable" in file.read_text(encoding="utf-8")}
    assert starts == {"locret_kit.processes"}


def test_no_circle():
    """Neither among modules: whoever follows imports never comes back."""
    done: set[str] = set()

    def follow(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(imports(module) & modules().keys()):
                follow(target, (*path, module))
            done.add(module)

    for module in sorted(modules()):
        follow(module, ())


def test_who_looks_out_of_a_folder_does_not_come_back():
    """Within a room a folder imports what is above or beside it only where that knows nothing of the folder's modules."""
    back = {
        (module, target)
        for module, target in arrows()
        if room(module) == room(target) and not f"{folder(target)}.".startswith(f"{folder(module)}.")
        if any(f"{one}.".startswith(f"{folder(module)}.") for one in reached(target) - {folder(module)})
    }
    assert not back


@pytest.mark.parametrize("library", ONLY)
def test_a_library_is_known_where_it_belongs(library):
    knows = {
        room(module)
        for module in modules()
        if module.startswith("locret_kit") and any(name.split(".")[0] == library for name in imports(module))
    }
    assert knows <= ONLY[library]
