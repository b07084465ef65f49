"""``locret-train recipe=NAME key=value ...``: train retaining heads, or a pool, on a frozen backbone.
``locret-publish`` puts heads on the Hugging Face Hub, with card, curves and results."""

import shlex
import sys
import tempfile
from pathlib import Path

from ..backbones import demo
from ..config.recipes import TRAIN
from ..config.schema import read
from ..config.train_options import PUBLISH, PublishOptions, TrainConfig
from ..naming import prefixed_errors
from ..samples.records import SUFFIXES, read_records
from .command import command, entry


@command("locret-train", stopped="stopped; resume=auto continues from the newest saved state, if any")
def main(argv: list[str] | None = None) -> int:
    """Train, then print the result's folder and a command that uses it."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(TRAIN.usage)
        return 1
    cfg = read(TRAIN, argv)
    if cfg is None:
        return 0
    with prefixed_errors("data.sources", OSError):
        for source in cfg.data.sources:
            if source.endswith(SUFFIXES):
                read_records(source)  # says at once that there is no such file; reads nothing yet
    demo.provide(cfg.backbone.model)
    import torch

    from ..training.fit import TrainingStopped, fit

    try:
        folder = fit(cfg, argv)
    except TrainingStopped:  # it has said how it goes on
        return 130
    except RuntimeError as error:  # torch.OutOfMemoryError is one; on a CPU the allocator's is of no kind of its own
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator: " not in str(error):
            raise
        said = str(error).splitlines()[0].replace("[enforce fail at alloc_cpu.cpp", "out of memory [alloc_cpu.cpp")
        size = f"data.max_tokens={cfg.data.max_tokens} and data.batch={cfg.data.batch}"
        raise OSError(f"{said}, with {size}; resume=auto continues") from error
    if folder is not None:
        flags = flags_of(cfg, folder)
        print(f"{cfg.trains}: {folder}\ntry:   locret-infer {flags} --question 'What is ...?' < long.txt")
    return 0


def flags_of(cfg: TrainConfig, folder: Path) -> str:
    """Flags for the trained heads or the pool, as a shell takes them; a pool in the settings of its training."""
    if cfg.trains == "heads":
        return shlex.join(["--ckpt", str(folder)])
    given = {"ckpt": cfg.pool.heads, "model": cfg.backbone.model, "adapter": cfg.backbone.adapter}
    given |= {name: str(getattr(cfg.infer, name)) for name in ("budget", "chunk")}
    given["policy"] = f"{cfg.pool.policy} merge=lococo({folder})"
    return shlex.join(word for name, value in given.items() if value for word in (f"--{name}", value))


def run_publish(args: PublishOptions) -> int:
    """Publish heads, or show the files of a dry run. Raises ValueError or OSError with a one-line message."""
    from .. import card
    from ..heads import RetainingHeads

    source = Path(args.ckpt)
    if not source.exists():
        raise FileNotFoundError(f"ckpt={args.ckpt!r}: no such file or folder")
    heads = RetainingHeads.from_pretrained(args.ckpt, backbone=args.base_model)
    facts = {"base_model": args.base_model, "adapter": args.adapter, "license": args.license}
    if not args.dry_run:
        print(card.publish(heads, args.repo, source, private=args.private, message=args.message, **facts))
        return 0
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        names = card.write_release(heads, args.repo, folder, source, **facts)
        kind = "private" if args.private else "public by default"
        print(f"would go to {args.repo} ({kind} if it is new), as one commit:")
        for name in names:
            print(f"{(folder / name).stat().st_size:>12,}  {name}")
        print(f"Besides the card, files are those of {source}, with local paths in JSON files shortened.")
        print(f"\n{card.CARD}:\n\n{(folder / card.CARD).read_text(encoding='utf-8')}", end="")
    return 0


publish = entry(PUBLISH, run_publish, stopped="stopped; check which files the repository has", usage=1)


if __name__ == "__main__":
    sys.exit(main())
