"""``locret-train recipe=NAME key=value ...``: train retaining heads on a frozen backbone."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, 1 after an error said in one line, 130 after Ctrl-C."""
    from .config import USAGE, load_config

    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 1
    try:
        cfg = load_config(argv)
        from ..training.fit import fit

        heads = fit(cfg, argv)
    except (ValueError, OSError, ImportError) as error:
        print(f"locret-train: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if heads is not None:
        print(f"heads: {heads}\ntry:   locret-infer --ckpt {heads} --question 'What is ...?' < long.txt")
    return 0


if __name__ == "__main__":
    sys.exit(main())
