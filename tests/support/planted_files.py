"""Pieces that several tests of processes share."""

from pathlib import Path

PLANTED = "import pathlib\npathlib.Path({ran!r}).touch()\nraise SystemExit('planted')\n"


def plant(folder: Path, *names: str) -> Path:
    """Modules that say so when they are imported: by the file whose path is given back."""
    ran = folder / "ran"
    for name in names:
        (folder / f"{name}.py").write_text(PLANTED.format(ran=str(ran)))
    return ran
