"""What the folders must and must not be."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_is_not_a_package():
    """`kernels/` as a package would shadow the `kernels` package that transformers probes."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_package_is_installed(monkeypatch):
    with mock.patch("setuptools.setup") as setup:
        monkeypatch.chdir(ROOT)
        runpy.run_path("setup.py")
    given = setup.call_args.kwargs
    roots = {"locret_kit": ROOT, "locret_kernels": ROOT / "kernels"}
    files = [(base, file) for package, base in roots.items() for file in (base / package).rglob("*.py")]
    found = {".".join(file.parent.relative_to(base).parts) for base, file in files}
    # Otherwise a folder lacks its __init__.py.
    assert sorted(given["packages"]) == sorted(found | {"locret_recipes", "locret_examples", "locret_demo"})
    for package in set(given["packages"]) - {"locret_demo"}:  # which holds no code
        top, *rest = package.split(".")
        assert ROOT.joinpath(given["package_dir"].get(top, top), *rest, "__init__.py").exists()


def test_kernels_imports_nothing_of_the_kit():
    for file in (ROOT / "kernels").rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) locret_kit\b", file.read_text(encoding="utf-8"), re.M), file


FLOATS = {"empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace"}
"""Functions of torch whose type is the default one where none is named."""
PLACED = FLOATS | {"arange", "tensor", "as_tensor", "randint", "randperm"}
"""Those whose device is."""
MODULES = {"heads.py", "lococo.py"}
"""Files with modules, which are made where PyTorch's context says."""


def test_tensors_are_made_of_a_type_and_on_a_device_by_name():
    """``torch.set_default_dtype`` and ``torch.set_default_device`` are their program's own."""
    wrong = []
    for file in (file for folder in ("locret_kit", "kernels/locret_kernels") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=made), keywords=keywords):
                    named = {keyword.arg for keyword in keywords}
                    wanted = {"dtype"} if made in FLOATS else set()
                    wanted |= {"device"} if made in PLACED and file.name not in MODULES else set()
                    if None not in named and wanted - named:
                        wrong.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []
