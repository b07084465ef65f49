"""``locret-ask``: answers from a document. Errors in files are reported before torch is imported."""

import codecs
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from ..cache.file import read_record
from ..config.infer_options import ASK, TEMPLATE, AskOptions
from ..config.schema import refuse
from ..files import read_utf8
from ..naming import prefixed_errors
from .command import entry, note, record_of, typed_or_piped, write_answer


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
