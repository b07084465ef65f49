"""Pins of ``constraints.txt`` hold together, for every Python and system that the file is for."""

import re
import tomllib
from functools import cache
from importlib.metadata import distributions
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TRITON = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}
"""Release of torch -> the Triton that its ordinary build for Linux asks for. Builds for CPUs ask for none, so the metadata of the
package index is written down."""
PYTHONS = ("3.11.2", "3.12.0", "3.13.5", "3.14.0")
SYSTEMS = {"Linux": ("linux", "x86_64"), "Darwin": ("darwin", "arm64")}


def environment(python: str, system: str) -> dict[str, str]:
    platform, machine = SYSTEMS[system]
    return {
        "python_version": python.rpartition(".")[0], "python_full_version": python, "implementation_name": "cpython",
        "sys_platform": platform, "platform_system": system, "platform_machine": machine, "extra": "",
    }  # fmt: skip


def pins(text: str, python: str, system: str) -> dict[str, Version]:
    """Name -> version on one Python and system.

    Raises:
        AssertionError: a name with two versions there, or a line that is no pin.
    """
    found: dict[str, Version] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate(environment(python, system)):
            (pin,) = wanted.specifier
            assert pin.operator == "==" and wanted.name not in found, line
            found[canonicalize_name(wanted.name)] = Version(pin.version)
    return found


@cache
def requirements() -> list[tuple[str, Version, Requirement]]:
    """Name and release of what is installed here, and each of its requirements; torch's Triton by the table."""
    asked = ((x.metadata, line) for x in distributions() for line in x.requires or () if "extra ==" not in line)
    found = [(x["Name"], Version(x["Version"]), Requirement(line)) for x, line in asked]
    return found + [("torch", Version(torch), Requirement(f"triton=={triton}")) for torch, triton in TRITON.items()]


def conflicts(text: str, python: str, system: str) -> list[str]:
    """Requirements of pinned releases that another pin does not meet."""
    here, found = pins(text, python, system), []
    for name, release, asked in requirements():
        pin = here.get(canonicalize_name(asked.name))
        speaks = str(here.get(canonicalize_name(name))) == release.public
        if pin and speaks and (asked.marker is None or asked.marker.evaluate(environment(python, system))):
            found += [] if asked.specifier.contains(pin, prereleases=True) else [f"{name}: {asked}, pinned {pin}"]
    return found


@pytest.mark.parametrize(("python", "system"), list(product(PYTHONS, SYSTEMS)))
def test_pins_hold_together(python, system):
    text = (ROOT / "constraints.txt").read_text()
    assert str(pins(text, python, system)["torch"]) in TRITON, "write down its Triton"
    assert conflicts(text, python, system) == []


def test_another_pin_is_a_conflict():
    text = re.sub(r"^triton==\S*", "triton==3.9.0", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert conflicts(text, "3.13.5", "Linux") == ["torch: triton==3.7.1, pinned 3.9.0"]


def test_every_direct_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = sum((extras[name] for name in extras if name != "vllm"), project["dependencies"])
    here = pins((ROOT / "constraints.txt").read_text(), "3.11.2", "Linux")
    assert {canonicalize_name(Requirement(line).name) for line in lines} - {"locret-kit"} <= set(here)
