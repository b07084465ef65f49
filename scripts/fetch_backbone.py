"""Put the demo backbone, SmolLM2-135M-Instruct, into checkpoints/: ``python scripts/fetch_backbone.py [--to FOLDER]``.

Commands that need it do so by themselves; here tests and scripts have it before they start.
"""

import argparse
import errno
import sys
from pathlib import Path

from locret_kit.backbones import demo
from locret_kit.naming import first_line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Put the demo backbone, SmolLM2-135M-Instruct, into checkpoints/.")
    parser.add_argument("--to", type=Path, default=demo.backbone_folder(), help="folder to make (default: %(default)s)")
    to = parser.parse_args(argv).to.absolute()
    try:
        demo.fetch(to)
    except (OSError, ValueError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        print(f"error: {f'no disk space left beside {to}' if full else first_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
