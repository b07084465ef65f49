"""``locret-publish --ckpt heads.pt --repo user/name``: put heads on the Hugging Face Hub, with card, curves and results."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from .command import Flags, command


def parser() -> argparse.ArgumentParser:
    """The flags; what they leave open comes from the checkpoint and from what lies beside it."""
    p = Flags(prog="locret-publish", description=__doc__, allow_abbrev=False)
    p.add_argument("--ckpt", required=True, help="heads: a folder or a .pt file; a .bin needs --base-model")
    p.add_argument("--repo", required=True, metavar="USER/NAME", help="where they go; made if it is not there")
    p.add_argument("--private", action="store_true", help="make a new repository private")
    p.add_argument("--dry-run", action="store_true", help="print the files and the card, and send nothing")
    p.add_argument("--message", default="Upload retaining heads", help="of the commit")
    p.add_argument("--base-model", metavar="USER/NAME", help="backbone as others load it (default: what the heads say)")
    p.add_argument(
        "--adapter", metavar="USER/NAME", help="PEFT adapter as others load it (default: what the heads say)"
    )
    p.add_argument("--license", help="(default: the card's beside the heads, or apache-2.0)")
    return p


def run(args: argparse.Namespace) -> int:
    """Raises ValueError or OSError with a one-line message."""
    from ..card import CARD, publish, write_release
    from ..heads import RetainingHeads

    if not args.message.strip():
        raise ValueError("message='' must not be empty")
    source = Path(args.ckpt)
    if not source.exists():
        raise FileNotFoundError(f"ckpt={args.ckpt!r}: no such file or folder")
    heads = RetainingHeads.from_pretrained(args.ckpt, backbone=args.base_model)
    facts = {"base_model": args.base_model, "adapter": args.adapter, "license": args.license}
    if not args.dry_run:
        print(publish(heads, args.repo, source, private=args.private, message=args.message, **facts))
        return 0
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        names = write_release(heads, args.repo, folder, source, **facts)
        print(f"would go to {args.repo} ({'private' if args.private else 'public'} if it is new), as one commit:")
        for name in names:
            print(f"{(folder / name).stat().st_size:>12,}  {name}")
        print(f"Beside the card, all of it is as {source} has it, but for local paths in JSON files.")
        print(f"\n{CARD}:\n\n{(folder / CARD).read_text(encoding='utf-8')}", end="")
    return 0


@command("locret-publish", stopped="stopped; whether the files have arrived, the repository says")
def main(argv: list[str] | None = None) -> int:
    """Publish, or with ``--dry-run`` show what would be."""
    return run(parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
