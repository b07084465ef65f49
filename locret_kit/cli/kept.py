"""``locret-kept``: the kept tokens of a document, in a terminal or as a page."""

import os
import sys
from pathlib import Path

from ..cache.file import read_record
from ..config.infer_options import KEPT, KeptOptions
from ..files import write_beside
from ..text.converters import PAGE
from ..validation import display
from .command import check_target, entry


def run_kept(args: KeptOptions) -> int:
    """Show the kept tokens. Raises ValueError or OSError with a one-line message."""
    if args.out is not None:
        check_target(Path(args.out), "out", replace=args.overwrite, source=args.file)
    read_record(Path(args.file))

    from ..backbones.load import load_tokenizer
    from ..documents.kept import highlight, read_kept
    from ..documents.text_record import describe
    from ..evals.report import kept_page
    from ..text.tokens import token_texts

    saved, about = describe(args.file)
    name = args.model or about.names.get("model")
    if not name:
        raise ValueError(f"{args.file} does not name its backbone: give --model")
    tokenizer = load_tokenizer(name)
    shown = read_kept(args.file, tokenizer)
    texts = token_texts(tokenizer, shown.ids)
    title = about.title or Path(args.file).name
    lead = f"{len(shown.ids)} tokens, {saved.policy}, budget {saved.settings.get('budget')}, {name}"
    if args.out is not None:
        page = kept_page(title, lead, texts, shown.positions, shown.seen).encode("utf-8", "backslashreplace")
        write_beside(Path(args.out).resolve(), lambda path: path.write_bytes(page))
        return 0
    counts, heads = shown.heads(args.layer, args.head)
    where = ", ".join(f"{what} {n}" for what, n in (("layer", args.layer), ("head", args.head)) if n is not None)
    held = f"{(counts > 0).sum()} of {shown.seen} held ({where or 'all layers and heads'})"
    print(f"{display(title)}: {display(lead)}; {held}\n")
    plain = (text.replace(PAGE, "") for text in texts[: shown.seen])
    printable = ["".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text) for text in plain]
    print(highlight(printable, counts / heads, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0


kept = entry(KEPT, run_kept, also=(RuntimeError,))
