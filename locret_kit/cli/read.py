"""``locret-read book.txt -o book.locret``: read a text once, into a file that is asked often."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.infer_options import READ, ReadOptions
from ..config.schema import refuse
from ..settings import RunSettings
from .command import entry
from .loading import beyond_window, check_run, choose, counted_text, not_shown, open_document
from .terminal import check_saved, check_target, progress, text_of, title_of

if TYPE_CHECKING:
    from ..documents.document import Document

AS_BEFORE = (*(item.name for item in fields(RunSettings)), "policy", "chat", "title")
"""Options that say how a text is read, which goes on as it began."""


def run(args: ReadOptions) -> int:
    """Load, read, save. Raises ValueError or OSError with a one-line message."""
    target = Path(args.out)
    if args.append and args.overwrite:
        raise ValueError("give --append or --overwrite, not both")
    check_target(target, "out", source=args.file)
    if args.append:
        refuse(args, AS_BEFORE, "with --append: the text is read on as it began")
        if not target.exists():
            raise FileNotFoundError(f"out={args.out!r} is not there: without --append it is made")
        check_saved(target)
    elif target.exists() and not args.overwrite:
        raise ValueError(f"out={args.out!r} is there already: --append adds to it, --overwrite replaces it")
    text = text_of(args.file)  # before torch is imported: a name that is wrong is said at once
    document, names, read, seconds = append(args, text) if args.append else read_text(args, text)
    document.save(target, text=args.text, names=names, replace=args.append or args.overwrite)
    if not args.quiet:
        rows = document.cache.kept_rows
        slots = f"{min(rows)} to {max(rows)}" if min(rows) < max(rows) else f"{rows[0]}"
        rate = f" in {seconds:.1f} s ({read / seconds:.0f} tok/s)" if read else ""
        rest = document.tokens - document.cache.get_seq_length()
        size = f"{slots} slots a head and layer, {target.stat().st_size / 2**20:.1f} MiB"
        print(f"{args.out}: {read} tokens read{rate}, {rest} more with each question; {size}", file=sys.stderr)
    return 0


Done = tuple["Document", dict[str, str], int, float]
"""A document, what its parts are called, and the tokens that were read into its cache, with their seconds."""


def read_text(args: ReadOptions, text: Iterable[str]) -> Done:
    """The text as a new document."""
    from ..documents.document import Document

    chosen = choose(args.ckpt, args.model, args.adapter, args.policy, args.kv_bits)
    check_run(args.run, chosen)
    model, tokenizer = chosen.load(args)
    began = time.perf_counter()
    say = (lambda line: None) if args.quiet else partial(print, file=sys.stderr, flush=True)
    whole, run = counted_text(text, args.run, chosen, model, tokenizer, say, chat=args.chat)
    document = Document.read(
        model, tokenizer, whole, run, chosen.policy, chosen.heads, chat=args.chat,
        title=args.title or title_of(args.file), progress=None if args.quiet else progress("read"),
    )  # fmt: skip
    seconds = time.perf_counter() - began
    unseen = not_shown(args.protect, document.protected(document.prompt("?")))
    idle = chosen.idle_stabilizers(args)
    for line in (*chosen.warnings, idle, unseen, beyond_window(model, document.cache)):
        if line:
            print(line, file=sys.stderr)
    return document, chosen.names, document.cache.get_seq_length(), seconds


def append(args: ReadOptions, text: Iterable[str]) -> Done:
    """The document in the file, with the text at its end."""
    document, chosen = open_document(args.out, args)
    before, began = document.cache.get_seq_length(), time.perf_counter()
    document.append(text, None if args.quiet else progress("read"))
    return document, chosen.names, document.cache.get_seq_length() - before, time.perf_counter() - began


main = entry(READ, run, stopped="stopped; nothing was written", also=(RuntimeError,))


if __name__ == "__main__":
    sys.exit(main())
