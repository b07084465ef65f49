"""Check a release, as a user's pip will have it.

``python scripts/check_release.py`` builds the wheel, installs it into a fresh environment with what pip resolves on that
day (PyTorch first), and asks the demo model of ``checkpoints/`` for the pass key of a text. LOCRET_TORCH_INDEX=URL
takes PyTorch from that index.

``python scripts/check_release.py FOLDER`` looks whether a wheel and an sdist that are there hold everything.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from configparser import ConfigParser
from email import message_from_string
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IN_WHEEL = {"locret_kit": "locret_kit", "kernels/locret_kernels": "locret_kernels", "recipes": "locret_recipes"}
"""Folders whose files must all be in the wheel, except bytecode, and the folders' names there."""
IN_SDIST = ("docs", "examples", "scripts", "tests", "recipes", "locret_kit", "kernels")


def files_below(folder: str) -> list[str]:
    """Files of a folder, relative to it."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path.relative_to(ROOT / folder).as_posix() for path in found)


def missing_of_wheel(wheel: zipfile.ZipFile, project: dict) -> list[str]:
    """Files and entries missing from a wheel."""
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
    """Files missing from an sdist."""
    names = {name.partition("/")[2] for name in sdist.getnames()}
    wanted = [f"{folder}/{file}" for folder in IN_SDIST for file in files_below(folder)]
    wanted += [
        "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "constraints.txt",
    ]  # fmt: skip
    return [f"sdist: {name}" for name in wanted if name not in names]


def check_contents(folder: Path) -> int:
    """Name the missing files; 1 if there are any."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened, tarfile.open(sdist) as packed:
        missing = missing_of_wheel(opened, project) + missing_of_sdist(packed)
        print(f"{len(opened.namelist())} files in the wheel, {len(packed.getnames())} in the sdist")
    print("\n".join(f"missing: {name}" for name in missing) or "nothing is missing")
    return int(bool(missing))


def check_answer(work: Path) -> int:
    """Build, install and ask in the folder ``work``; 1 if the answer is wrong."""
    run = partial(subprocess.run, check=True, cwd=work)
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", str(ROOT)])
    (wheel,) = (work / "dist").glob("*.whl")
    run([sys.executable, "-m", "venv", "fresh"])
    bin = work / "fresh" / "bin"
    pip = [bin / "python", "-m", "pip", "install", "--quiet"]
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    index = os.environ.get("LOCRET_TORCH_INDEX")
    run([*pip, *(["--index-url", index] if index else []), torch])
    run([*pip, f"{wheel}[documents]"])
    versions = (
        "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('torch', 'transformers')), sep=', ')"
    )
    run([bin / "python", "-c", versions])

    model, heads = ROOT / "checkpoints/SmolLM2-135M-Instruct", ROOT / "checkpoints/smollm2-135m-locret"
    if not model.exists():
        run([bin / "python", str(ROOT / "scripts/fetch_backbone.py")])
    words = ["--tokens", "1024", "--document-only", "--tokenizer", str(model)]
    made = run([bin / "python", str(ROOT / "scripts/make_long_text.py"), *words], capture_output=True, text=True)
    key = re.search(r"expected answer: (\d+)", made.stderr)[1]
    (work / "long.html").write_text(f"<html><body><p>{html.escape(made.stdout)}</p></body></html>", encoding="utf-8")
    command = [bin / "locret-infer", "long.html", "--model", model, "--ckpt", heads, "--budget", "512"]
    done = run([*command, "--question", "What is the pass key?"], capture_output=True, text=True)
    right = key in done.stdout
    print(f"{done.stdout.strip()!r}, {'right' if right else f'not {key}'}")
    if not right:
        print(done.stderr, file=sys.stderr)
    return int(not right)


def main() -> int:
    """Run the command of the words; its exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="a wheel and an sdist, whose contents are checked")
    args = parser.parse_args()
    if args.folder is not None:
        return check_contents(args.folder)
    for name in [name for name in os.environ if name.startswith("PYTHON")]:  # the checkout is not to be found
        del os.environ[name]
    with tempfile.TemporaryDirectory() as work:
        return check_answer(Path(work))


if __name__ == "__main__":
    sys.exit(main())
