"""``locret-read``: a text, read once, as a document. Errors in files are reported before torch is imported."""

import sys
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache.file import SUFFIX, read_record
from ..config.infer_options import READ, ReadOptions
from .command import check_target, entry, note, progress, text_of, title_of

if TYPE_CHECKING:
    from ..documents.document import Document


def run_read(args: ReadOptions) -> int:
    """Load, read, save. Raises ValueError or OSError with a one-line message."""
    title = title_of(args.file)
    if args.out is None and not title:
        raise ValueError("out=... is missing: a text from stdin or a pipe has no name")
    target = Path(args.out or f"{title if Path(str(args.file)).is_dir() else Path(title).stem}{SUFFIX}")
    if args.append and args.overwrite:
        raise ValueError("give --append or --overwrite, not both")
    check_target(target, "out", source=args.file)
    if args.append:
        if not target.exists():
            raise FileNotFoundError(f"out={str(target)!r} does not exist: leave out --append to create it")
        read_record(target)
    elif target.exists() and not args.overwrite:
        raise ValueError(f"out={str(target)!r} already exists: --append adds to it, --overwrite replaces it")
    text = text_of(args.file, args.include)  # before torch is imported: a name that is wrong is said at once
    document, names, count, seconds = append(target, args, text) if args.append else read_text(args, text)
    document.save(target, text=args.text, names=names, replace=args.append or args.overwrite)
    if not args.quiet:
        rows = document.cache.kept_rows
        slots = f"{min(rows)} to {max(rows)}" if min(rows) < max(rows) else f"{rows[0]}"
        rate = f" in {seconds:.1f} s ({count / seconds:.0f} tok/s)" if count else ""
        rest = document.tokens - document.cache.get_seq_length()
        size = f"{slots} slots a head and layer, {target.stat().st_size / 2**20:.1f} MiB"
        print(f"{target}: {count} tokens read{rate}, {rest} more with each question; {size}", file=sys.stderr)
    return 0


Done = tuple["Document", dict[str, str], int, float]
"""A document, what its parts are called, and the tokens that were read into its cache, with their seconds."""


def read_text(args: ReadOptions, text: Iterable[str]) -> Done:
    """The text as a new document."""
    from ..documents.document import Document, DocumentText, forgotten
    from .loading import beyond_window, not_shown, resolve_choice

    chosen = resolve_choice(args.ckpt, args.model, args.adapter, args.policy, args.run, asked=args.text)
    model, tokenizer = chosen.load(args)
    began = time.perf_counter()
    whole = DocumentText.of(tokenizer, text, args.chat)
    if not args.text:  # before it is read: minutes later would be too late
        forgotten(whole, chosen.policy)
    run = chosen.for_text(args.run, model, whole.ids, None if args.quiet else note)
    document = Document.read(
        model, tokenizer, whole, run, chosen.policy, chosen.heads, chat=args.chat,
        title=args.title or title_of(args.file),
        progress=None if args.quiet else progress("read", run.budget or 0),
    )  # fmt: skip
    seconds = time.perf_counter() - began
    unseen = not_shown(args.protect, document.protected(document.prompt("?")))
    for line in filter(None, (*chosen.warnings, unseen, beyond_window(model, document.cache))):
        note(line)
    return document, chosen.names, document.cache.get_seq_length(), seconds


def append(target: Path, args: ReadOptions, text: Iterable[str]) -> Done:
    """The document in the file, with the text at its end."""
    from .loading import open_document

    document, chosen = open_document(str(target), args)
    before, began = document.cache.get_seq_length(), time.perf_counter()
    source = Path("stdin" if args.file in (None, "-") else str(args.file))
    document.append(chain([document.text.parting(source)], text), None if args.quiet else progress("read"))
    return document, chosen.names, document.cache.get_seq_length() - before, time.perf_counter() - began


read = entry(READ, run_read, stopped="stopped; nothing was written", also=(RuntimeError,))
