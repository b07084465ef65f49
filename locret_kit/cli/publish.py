"""``locret-publish HEADS USER/NAME``: put heads on the Hugging Face Hub, with card, curves and results."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ..config.train_options import PUBLISH, PublishOptions
from .command import entry


def run(args: PublishOptions) -> int:
    """Raises ValueError or OSError with a one-line message."""
    from ..card import CARD, publish, write_release
    from ..heads import RetainingHeads

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


main = entry(PUBLISH, run, stopped="stopped; whether the files have arrived, the repository says", usage=1)


if __name__ == "__main__":
    sys.exit(main())
