"""Commands for documents that are read once and asked often: ``locret-read``, ``locret-ask``, ``locret-info`` and
``locret-kept``.

Errors in files are reported before torch is imported. ``locret-info`` imports no torch and loads no model.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache.file import read_record
from ..config.infer_options import ASK, INFO, KEPT, READ, AskOptions, InfoOptions, KeptOptions, ReadOptions
from ..config.schema import refuse
from ..files import read_utf8, write_beside
from ..naming import prefixed_errors
from ..settings import RunSettings, too_few
from .command import check_question, check_target, entry, evidence_lines, progress, text_of, title_of, write_answer

if TYPE_CHECKING:
    from ..documents.document import Document
    from ..runtime.session import Answer

AS_BEFORE = (*(item.name for item in fields(RunSettings)), "policy", "chat", "title")
"""Options that say how a text is read, which goes on as it began."""


def target_of(args: ReadOptions) -> Path:
    """The file to write: as given, or named like the text. Raises ValueError for a text from stdin, which has no name."""
    if args.out is None and not title_of(args.file):
        raise ValueError("out=... is missing: a text from stdin has no name")
    return Path(args.out or Path(title_of(args.file)).with_suffix(".locret"))


def run_read(args: ReadOptions) -> int:
    """Load, read, save. Raises ValueError or OSError with a one-line message."""
    target = target_of(args)
    if args.append and args.overwrite:
        raise ValueError("give --append or --overwrite, not both")
    check_target(target, "out", source=args.file)
    if args.append:
        refuse(args, AS_BEFORE, "with --append: the document keeps its settings")
        if not target.exists():
            raise FileNotFoundError(f"out={str(target)!r} does not exist: leave out --append to create it")
        read_record(target)
    elif target.exists() and not args.overwrite:
        raise ValueError(f"out={str(target)!r} already exists: --append adds to it, --overwrite replaces it")
    text = text_of(args.file, args.include)  # before torch is imported: a name that is wrong is said at once
    document, names, count, seconds = append(args, text) if args.append else read_text(args, text)
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
    from ..documents.document import Document, DocumentText
    from .loading import beyond_window, not_shown, resolve_choice

    chosen = resolve_choice(args.ckpt, args.model, args.adapter, args.policy, args.run)
    model, tokenizer = chosen.load(args)
    began = time.perf_counter()
    say = (lambda line: None) if args.quiet else partial(print, file=sys.stderr, flush=True)
    whole = DocumentText.of(tokenizer, text, args.chat)
    run = chosen.for_text(args.run, model, whole.ids, say)
    document = Document.read(
        model, tokenizer, whole, run, chosen.policy, chosen.heads, chat=args.chat,
        title=args.title or title_of(args.file), progress=None if args.quiet else progress("read"),
    )  # fmt: skip
    seconds = time.perf_counter() - began
    unseen = not_shown(args.protect, document.protected(document.prompt("?")))
    for line in (*chosen.warnings, unseen, beyond_window(model, document.cache)):
        if line:
            print(line, file=sys.stderr)
    return document, chosen.names, document.cache.get_seq_length(), seconds


def append(args: ReadOptions, text: Iterable[str]) -> Done:
    """The document in the file, with the text at its end."""
    from .loading import open_document

    document, chosen = open_document(str(target_of(args)), args)
    before, began = document.cache.get_seq_length(), time.perf_counter()
    document.append(text, None if args.quiet else progress("read"))
    return document, chosen.names, document.cache.get_seq_length() - before, time.perf_counter() - began


read = entry(READ, run_read, stopped="stopped; nothing was written", also=(RuntimeError,))


# ---- locret-ask ------------------------------------------------------------------------------------------------------


def run_ask(args: AskOptions) -> int:
    """Load, ask, print. Raises ValueError or OSError with a one-line message."""
    questions = questions_of(args)
    read_record(Path(args.book))
    from .loading import generation_of, open_document, remarks

    generation = generation_of(args)
    document, chosen = open_document(args.book, args, args.force)
    if not args.quiet:
        for line in (*chosen.warnings, repeated(document)):
            if line:
                print(line, file=sys.stderr)
    document.prepare()
    for number, question in enumerate(questions):
        reads, began = document.reads, time.perf_counter()
        answer = document.ask(question, evidence=args.evidence, **generation)
        cached = answer.cache.get_seq_length()
        if document.reads > reads and not args.quiet:
            print("reading the text again: this question changes the evictions", file=sys.stderr)
        if args.json:
            print(json_line(as_json(question, answer, cached, began)), flush=True)
            continue
        write_answer(answer, question if len(questions) > 1 else None, first=not number, quiet=args.quiet)
        for line in evidence_lines(answer):
            print(line)
        for line in () if args.quiet else remarks(answer, args):
            print(line, file=sys.stderr)
    return 0


def as_json(question: str, answer: Answer, cached: int, began: float) -> dict[str, object]:
    """An answer, read to its end, as a line of ``--json``. Seconds are wall clock since ``began``."""
    text = str(answer)
    said = {"question": question, "answer": text, "finish_reason": answer.finish_reason, "tokens": len(answer.tokens)}
    said |= {"thought": answer.thought_text} if answer.thought_text else {}
    said |= {"evidence": [asdict(one) for one in shown]} if (shown := answer.evidence) else {}
    seconds = {"first_token_s": round(answer.first_token_s, 4), "total_s": round(time.perf_counter() - began, 4)}
    return {**said, **seconds, "cached_tokens": cached, "prompt_tokens": len(answer.ids) - cached}


def repeated(document: Document) -> str | None:
    """Text that is read again with each question, where it is more than the text's open end."""
    policy, seen = document.cache.policy, f"the first {document.cache.get_seq_length()} of {document.tokens} tokens"
    said = f"policy={policy.name} reads passages again for each question; {seen} are in the cache"
    return said if document.cache.policy.reread is not None else None


def questions_of(args: AskOptions) -> list[str]:
    """The questions, in order. Raises ValueError where there is none, or one is empty or no UTF-8."""
    questions = list(args.question)
    if args.question_file:
        lines = words_of("question_file", args.question_file).splitlines()
        questions += [line.strip() for line in lines if line.strip()]
    if not questions:
        raise ValueError('ask something: locret-ask book.locret "question", or --question-file FILE')
    for question in questions:
        check_question(question)
    return questions


def words_of(option: str, file: str) -> str:
    """The text of a small file named by an option, or of stdin for -. Raises ValueError if it cannot be read."""
    with (
        prefixed_errors("stdin" if file == "-" else f"{option}={file!r}", ValueError, OSError),
        nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as stream,
    ):
        return "".join(read_utf8(stream))


def json_line(value: object) -> str:
    """A value as JSON, in ASCII where stdout is not UTF-8: the escapes of ``open_streams`` would be invalid JSON."""
    return json.dumps(value, ensure_ascii=codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8")


ask = entry(ASK, run_ask, also=(RuntimeError,))


# ---- locret-info -----------------------------------------------------------------------------------------------------


Fields = dict[str, object]


def run_info(args: InfoOptions) -> int:
    """Show a file's record. Raises ValueError or OSError with a one-line message."""
    path = Path(args.file)
    record = read_record(path)
    if args.json:
        print(json.dumps({**record, "bytes": path.stat().st_size}, indent=2))
        return 0
    lines = [(name, value) for name, value in rows(record, path.stat().st_size) if value not in ("", None)]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {plain(value)}")
    return 0


def rows(record: Fields, size: int) -> Iterator[tuple[str, object]]:
    """Lines of the table: name and value. Fields of the file may be missing or of a wrong type."""
    text, model, settings = (part(record, name) for name in ("document", "model", "settings"))
    names, config = part(text, "names"), part(model, "config")
    layers = record.get("layers")
    states = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    rows = [count for layer in states if type(count := layer.get("rows")) is int]
    yield "title", text.get("title")
    seen = number(states[0].get("seen") if states else None)
    yield "tokens", f"{number(text.get('tokens'))}, {seen} of them in the cache"
    yield "text", "stored" if text.get("text") else "not stored" if text else "a cache without a document"
    yield "questions", "through the chat template" if text.get("chat") else "as they are"
    shape = f"{number(config.get('num_hidden_layers'))} layers"
    bits = model.get("weight_bits")
    weights = f", weights in {bits}{' bits' if type(bits) is int else ''}" if bits else ""
    yield "model", f"{names.get('model') or model.get('name')} ({shape}{weights})"
    yield "model's revision", model.get("revision")
    yield "model's weights", model.get("weights")
    yield "adapter", names.get("adapter")
    heads = record.get("heads")
    yield "heads", f"{names.get('heads', 'not named')} ({heads})" if heads else "none"
    yield "policy", record.get("policy")
    for name, value in part(record, "parts").items():
        yield f"  {name}", value
    yield "settings", "of this text"
    for name, value in settings.items():
        if name != "backend":
            yield f"  {name}", value
    low, high = min(rows, default=0), max(rows, default=0)
    slots = f"{number(high)} a head and layer" if low == high else f"{number(low)} to {number(high)} a head, by layer"
    yield "slots", slots
    tokens, brings_back = text.get("tokens"), "recall" in part(record, "parts")
    yield "note", too_few(high, tokens) if type(tokens) is int and high > 0 and not brings_back else None
    yield "precision", record.get("dtype")
    yield "bytes", f"{number(size)} ({size / 2**20:.1f} MiB)"
    yield "written", f"{record.get('created')} by locret_kit {record.get('kit')}, format {record.get('version')}"
    yield "SHA-256 of the token ids", text.get("sha256")
    yield "SHA-256 of the content", record.get("digest")


def part(record: Fields, name: str) -> Fields:
    """A section of the record; an empty one where there is none."""
    section = record.get(name)
    return section if isinstance(section, dict) else {}


def number(value: object) -> str:
    """A count with thousands apart."""
    return f"{value:,}" if type(value) is int else "?"


def plain(value: object) -> str:
    """A value in one line, and nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(value).split()))


info = entry(INFO, run_info)


# ---- locret-kept -----------------------------------------------------------------------------------------------------


def run_kept(args: KeptOptions) -> int:
    """Show the kept tokens. Raises ValueError or OSError with a one-line message."""
    if args.out is not None:
        refuse(args, ("layer", "head"), "with --out: the page shows each")
        check_target(Path(args.out), "out", replace=args.overwrite, source=args.file)
    else:
        refuse(args, ("overwrite",), "without --out")
    read_record(Path(args.file))

    from ..backbones.load import load_tokenizer
    from ..documents.document import highlight, read_kept
    from ..documents.document_text import describe
    from ..evals.report import kept_page
    from ..text.tokens import token_texts

    saved, about = describe(args.file)
    name = args.model or about.names.get("model")
    if not name:
        raise ValueError(f"{args.file} does not name its backbone: give --model")
    tokenizer = load_tokenizer(name)
    found = read_kept(args.file, tokenizer)
    texts = token_texts(tokenizer, found.ids)
    title = about.title or Path(args.file).name
    lead = f"{len(found.ids)} tokens, {saved.policy}, budget {saved.settings.get('budget')}, {name}"
    if args.out is not None:
        page = kept_page(title, lead, texts, found.positions, found.seen).encode("utf-8", "backslashreplace")
        write_beside(Path(args.out), lambda path: path.write_bytes(page))
        return 0
    counts, heads = found.heads(args.layer, args.head)
    where = ", ".join(f"{what} {n}" for what, n in (("layer", args.layer), ("head", args.head)) if n is not None)
    held = f"{(counts > 0).sum()} of {found.seen} held ({where or 'all layers and heads'})"
    print(f"{plain(title)}: {plain(lead)}; {held}\n")
    shown = ["".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text) for text in texts[: found.seen]]
    print(highlight(shown, counts / heads, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 0


kept = entry(KEPT, run_kept)
