"""What the folders must and must not be."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_kernels_is_not_a_package():
    """`kernels/` as a package would shadow the `kernels` package that transformers probes."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "kernels" / "locret_kernels" / "__init__.py").exists()


def test_kernels_never_resolves_into_this_repository():
    spec = find_spec("kernels")
    origin = (
        None if spec is None else spec.origin
    )  # a bare folder has no origin: a namespace, which anything else beats
    assert origin is None or ROOT not in Path(origin).resolve().parents
    from transformers.utils import is_kernels_available

    if spec is None or origin is None:
        assert not is_kernels_available()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_package_is_installed():
    """The list in pyproject.toml, which setuptools cannot find by itself while it renames `recipes`."""
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    roots = ((ROOT, "locret_kit"), (ROOT / "kernels", "locret_kernels"))
    files = [(base, file) for base, package in roots for file in (base / package).rglob("__init__.py")]
    found = {".".join(file.parent.relative_to(base).parts) for base, file in files}
    assert sorted(listed) == sorted(found | {"locret_recipes"})
