"""Last used 2026-11-22, for checkpoints/gemma3-270m-locret/README.md.

Make a backbone's folder out of a GGUF file, with every weight dequantised to bfloat16.

    python scripts/research/convert_gguf.py FILE.gguf FOLDER

GGUF has only a name for how a tokenizer splits a text before its merges: where you have the original's tokenizer files, put
them into the folder instead.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from locret_kit.backbones.demo import say, unpack
from locret_kit.cli.command import command


def convert(file: Path, to: Path) -> None:
    """Make the folder ``to``, complete or not at all.

    Raises:
        ValueError: no GGUF file, one that cannot be read, or a folder that is there already.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    if to.exists():
        raise ValueError(f"{to} exists: move it away or name another folder")
    to.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{to.name}.", dir=to.parent))
    try:
        unpack(file, work / "made", to.name)
        for made in (work / "made").iterdir():
            made.chmod(0o644)
        (work / "made").rename(to)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"done: {to}")


@command("convert_gguf")
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2])
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="folder to make")
    args = parser.parse_args(argv)
    convert(args.file.absolute(), args.folder.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
