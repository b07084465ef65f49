"""``locret-kept book.locret -o page.html``: the words that each layer and head kept of a text."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..config.document_options import KEPT, KeptOptions
from ..config.schema import refuse
from .command import entry
from .terminal import check_saved, check_target, plain


def run(args: KeptOptions) -> int:
    """Raises ValueError or OSError with a one-line message."""
    if args.out is not None:
        refuse(args, ("layer", "head"), "with --out: the page shows each")
        check_target(Path(args.out), "out", replace=args.overwrite, source=args.file)
    else:
        refuse(args, ("overwrite",), "without --out")
    check_saved(args.file)

    from ..backbones.load import load_tokenizer
    from ..documents.kept_positions import read_kept
    from ..documents.text_record import describe
    from ..files import write_beside
    from ..runtime.kept_text import highlight, levels
    from ..runtime.tokens import token_texts

    saved, about = describe(args.file)
    name = args.model or about.names.get("model")
    if not name:
        raise ValueError(f"{args.file} does not name its backbone: give --model")
    tokenizer = load_tokenizer(name)
    kept = read_kept(args.file, tokenizer)
    texts = token_texts(tokenizer, kept.ids)
    title = about.title or Path(args.file).name
    lead = f"{len(kept.ids)} tokens, {saved.policy}, budget {saved.settings.get('budget')}, {name}"
    if args.out is not None:
        from ..evals.report.html_report import kept_page

        page = kept_page(title, lead, texts, kept.positions, kept.seen).encode("utf-8", "backslashreplace")
        write_beside(Path(args.out), lambda path: path.write_bytes(page))
        return 0
    counts, heads = kept.heads(args.layer, args.head)
    where = ", ".join(f"{what} {n}" for what, n in (("layer", args.layer), ("head", args.head)) if n is not None)
    print(
        f"{plain(title)}: {plain(lead)}; {(counts > 0).sum()} of {kept.seen} held ({where or 'all layers and heads'})\n"
    )
    shown = ["".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text) for text in texts[: kept.seen]]
    print(highlight(shown, levels(counts / heads), color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0


main = entry(KEPT, run)


if __name__ == "__main__":
    sys.exit(main())
