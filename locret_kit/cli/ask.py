"""``locret-ask book.locret "question"``: ask about a text that was read before."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ..config.infer_options import ASK, AskOptions
from .command import entry
from .loading import open_document
from .terminal import check_question, check_sampling, check_saved, json_line, words_of, write_answer

if TYPE_CHECKING:
    from ..documents.document import Document
    from ..runtime.session import Answer


def run(args: AskOptions) -> int:
    """Load, ask, print. Raises ValueError or OSError with a one-line message."""
    questions = questions_of(args)
    check_saved(args.book)
    sampling = check_sampling(args)
    document, chosen = open_document(args.book, args, args.force)
    if not args.quiet:
        for line in (*chosen.warnings, repeated(document)):
            if line:
                print(line, file=sys.stderr)
    document.prepare()
    for number, question in enumerate(questions):
        reads, began = document.reads, time.perf_counter()
        answer = document.ask(question, max_new_tokens=args.max_new_tokens, sampling=sampling, seed=args.seed)
        cached = answer.cache.get_seq_length()
        if document.reads > reads and not args.quiet:
            print("the text is read anew: with this question it is evicted otherwise", file=sys.stderr)
        if args.json:
            print(json_line(as_json(question, answer, cached, began)), flush=True)
            continue
        write_answer(answer, question if len(questions) > 1 else None, first=not number)
        if answer.finish_reason == "length" and not args.quiet:
            print(f"the answer was cut after max_new_tokens={args.max_new_tokens}", file=sys.stderr)
    return 0


def as_json(question: str, answer: Answer, cached: int, began: float) -> dict[str, object]:
    """An answer, read to its end, as a line of ``--json``. Seconds are wall clock since ``began``."""
    text = str(answer)
    said = {"question": question, "answer": text, "finish_reason": answer.finish_reason, "tokens": len(answer.tokens)}
    seconds = {"first_token_s": round(answer.first_token_s, 4), "total_s": round(time.perf_counter() - began, 4)}
    return {**said, **seconds, "cached_tokens": cached, "prompt_tokens": len(answer.ids) - cached}


def repeated(document: Document) -> str | None:
    """Text that is read again with each question, where it is more than the text's open end."""
    policy, seen = document.cache.policy, f"the first {document.cache.get_seq_length()} of {document.tokens} tokens"
    said = f"policy={policy.name} reads passages again for each question; {seen} are in the cache"
    return None if policy.reread is None else said


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


main = entry(ASK, run, also=(RuntimeError,))


if __name__ == "__main__":
    sys.exit(main())
