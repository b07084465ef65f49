"""Commands of saved documents: ``locret-read`` reads a text once, ``locret-ask`` answers from it, ``locret-info`` shows its
record, and ``locret-kept`` its kept tokens. Errors in files are reported before torch is imported."""

import codecs
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cache.file import SUFFIX, read_record
from ..config.infer_options import ASK, INFO, KEPT, READ, TEMPLATE, AskOptions, InfoOptions, KeptOptions, ReadOptions
from ..config.schema import refuse
from ..files import read_utf8, write_beside
from ..naming import prefixed_errors
from ..settings import too_few
from ..text.converters import PAGE
from ..validation import display
from .command import check_target, entry, note, progress, record_of, text_of, title_of, typed_or_piped, write_answer

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
    from ..documents.document import forgotten
    from .loading import open_document

    document, chosen = open_document(str(target), args)
    before, began = document.cache.get_seq_length(), time.perf_counter()
    source = Path("stdin" if args.file in (None, "-") else str(args.file))
    pieces = [document.text.parting(source), *text]
    if not args.text:  # as in read_text
        (longer := document.text.copy()).feed(pieces)
        forgotten(longer, document.cache.policy)
    document.append(pieces, None if args.quiet else progress("read"))
    return document, chosen.names, document.cache.get_seq_length() - before, time.perf_counter() - began


read = entry(READ, run_read, stopped="stopped; nothing was written", also=(RuntimeError,))


def run_ask(args: AskOptions) -> int:
    """Load, ask, print. Raises ValueError or OSError with a one-line message."""
    questions = questions_of(args)
    read_record(Path(args.book))
    from .loading import generation_of, open_document

    generation = generation_of(args)
    document, chosen = open_document(args.book, args, args.force)
    refuse(args, () if document.chat_template else TEMPLATE, "on a document that was read with --no-chat")
    if not args.quiet:
        seen = f"the first {document.cache.get_seq_length()} of {document.tokens} tokens are in the cache"
        policy = document.cache.policy
        again = f"policy={policy.name} reads passages again for each question; {seen}" if policy.reread else None
        for line in filter(None, (*chosen.warnings, again)):
            note(line)
    document.prepare()
    for number, question in enumerate(questions):
        reads, began = document.reads, time.perf_counter()
        answer = document.ask(question, evidence=args.evidence, **generation)
        cached = answer.cache.get_seq_length()
        if document.reads > reads and not args.quiet:
            note("reading the text again: this question changes the evictions")
        if args.json:
            record = record_of(answer)
            total = time.perf_counter() - began
            seconds = {"first_token_s": round(answer.first_token_s, 4), "total_s": round(total, 4)}
            counts = {"cached_tokens": cached, "prompt_tokens": len(answer.ids) - cached}
            record = {"question": question, **record, "tokens": len(answer.tokens), **seconds, **counts}
            print(json_line(record), flush=True)
            continue
        write_answer(answer, question if len(questions) > 1 else None, first=not number, quiet=args.quiet)
        for line in () if args.quiet else answer.notices:
            note(line)
    return 0


def questions_of(args: AskOptions) -> list[str]:
    """The questions, in order. Raises ValueError where there is none, or a file cannot be read."""
    questions = list(args.question)
    if args.question_file:
        questions += [line.strip() for line in words_of(args.question_file).split("\n") if line.strip()]
    if not questions:
        raise ValueError('ask something: locret-ask book.locret "question", or --question-file FILE')
    return questions


def words_of(file: str) -> str:
    """The text of a file of questions, or of stdin for -. Raises ValueError if it cannot be read."""
    with (
        prefixed_errors("stdin" if file == "-" else f"question_file={file!r}", ValueError, OSError),
        nullcontext(typed_or_piped("questions")) if file == "-" else Path(file).open("rb") as stream,
    ):
        return "".join(read_utf8(stream))


def json_line(value: object) -> str:
    """A value as JSON, in ASCII where stdout is not UTF-8: the escapes of ``open_streams`` would be invalid JSON."""
    return json.dumps(value, ensure_ascii=codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8")


ask = entry(ASK, run_ask, also=(RuntimeError,))


def run_info(args: InfoOptions) -> int:
    """Show a file's record. Raises ValueError or OSError with a one-line message."""
    path = Path(args.file)
    record, size = read_record(path), path.stat().st_size
    if args.json:
        print(json.dumps({**record, "bytes": size}, indent=2))
        return 0
    with prefixed_errors(f"{path} has a damaged record", TypeError, KeyError, AttributeError, IndexError):
        lines = [(name, value) for name, value in rows(record, size) if value not in ("", None)]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {display(value)}")
    return 0


def rows(record: dict[str, Any], size: int) -> Iterator[tuple[str, object]]:
    """Lines of the table: name and value."""
    text, model, states = record.get("document") or {}, record["model"], record["layers"]
    names, tokens, seen = text.get("names") or {}, text.get("tokens"), states[0]["seen"]
    yield "title", text.get("title")
    yield "tokens", f"{tokens:,}, {seen:,} of them in the cache" if text else f"{seen:,} in the cache"
    yield "text", "stored" if text.get("text") else "not stored" if text else "a cache without a document"
    yield "questions", "through the chat template" if text.get("chat") else "as they are"
    bits = model.get("weight_bits")
    weights = f", weights in {bits}{' bits' if type(bits) is int else ''}" if bits else ""
    layers = f"{model['config'].get('num_hidden_layers', '?')} layers"
    yield "model", f"{names.get('model') or model.get('name')} ({layers}{weights})"
    yield "model's revision", model.get("revision")
    yield "model's weights", model.get("weights")
    yield "adapter", names.get("adapter")
    heads = record.get("heads")
    yield "heads", f"{names.get('heads', 'not named')} ({heads})" if heads else "none"
    yield "policy", record.get("policy")
    for name, value in record["parts"].items():
        yield f"  {name}", value
    yield "settings", "of this text"
    for name, value in record["settings"].items():
        yield f"  {name}", value if name != "backend" else None
    counts = [state["rows"] for state in states if "rows" in state] or [0]
    low, high = min(counts), max(counts)
    yield "slots", f"{high:,} a head and layer" if low == high else f"{low:,} to {high:,} a head, by layer"
    found_again = record["parts"].keys() & {"recall", "reread"}
    yield "note", too_few(high, tokens) if tokens and high and not found_again else None
    yield "precision", record.get("dtype")
    yield "bytes", f"{size:,} ({size / 2**20:.1f} MiB)"
    yield "written", f"{record.get('created')} by locret_kit {record.get('kit')}, format {record.get('version')}"
    yield "SHA-256 of the token ids", text.get("sha256")
    yield "SHA-256 of the content", record.get("digest")


info = entry(INFO, run_info)


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
