"""Check that a wheel and an sdist hold everything: ``python scripts/check_release.py FOLDER``."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

if sys.version_info < (3, 11):
    raise SystemExit("check_release.py needs Python 3.11 or newer")
import tomllib

ROOT = Path(__file__).resolve().parents[1]
IN_WHEEL = {"locret_kit": "locret_kit", "kernels/locret_kernels": "locret_kernels", "recipes": "locret_recipes"}
"""Folders of which every file that is no bytecode must be in the wheel, and what they are called there."""
IN_SDIST = ("docs", "examples", "scripts", "tests", "recipes", "locret_kit", "kernels")


def files_below(folder: str) -> list[str]:
    """Files of a folder, relative to it."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(ROOT / folder).as_posix() for path in found)


def missing_of_wheel(wheel: zipfile.ZipFile, project: dict) -> list[str]:
    """What a wheel lacks."""
    names = set(wheel.namelist())
    wanted = [f"{name}/{file}" for folder, name in IN_WHEEL.items() for file in files_below(folder)]
    wanted += ["locret_demo/model.safetensors", "locret_demo/config.json"]
    wanted += [f"locret_examples/{path.name}" for path in (ROOT / "examples").glob("*.py")]
    (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
    points = ConfigParser()
    points.read_string(wheel.read(f"{info}/entry_points.txt").decode())
    commands = dict(points["console_scripts"])
    metadata = message_from_string(wheel.read(f"{info}/METADATA").decode())
    description = str(metadata.get_payload())
    missing = [f"wheel: {name}" for name in wanted if name not in names]
    missing += [
        f"wheel: command {name}" for name in project["scripts"] if commands.get(name) != project["scripts"][name]
    ]
    missing += [] if description.startswith("# locret_kit\n") else ["wheel: the README in METADATA"]
    missing += [f"the package index: {link}" for link in re.findall(r"\]\((?!https://)[^)]*\)", description)]
    extras = set(metadata.get_all("Provides-Extra", []))
    missing += [f"wheel: extra {name}" for name in project["optional-dependencies"] if name not in extras]
    return missing


def missing_of_sdist(sdist: tarfile.TarFile) -> list[str]:
    """What an sdist lacks."""
    names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = [f"{folder}/{file}" for folder in IN_SDIST for file in files_below(folder)]
    wanted += [
        "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "constraints.txt",
    ]  # fmt: skip
    return [f"sdist: {name}" for name in wanted if name not in names]


def main(folder: str) -> int:
    """Name what is missing; 1 if anything is."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened, tarfile.open(sdist) as packed:
        missing = missing_of_wheel(opened, project) + missing_of_sdist(packed)
        print(f"{len(opened.namelist())} files in the wheel, {len(packed.getnames())} in the sdist")
    print("\n".join(f"missing: {name}" for name in missing) or "nothing is missing")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
