"""``locret-infer long.txt --ckpt heads --budget 6000``: answer from a long text in a fixed key/value budget.

This module imports no torch. Errors in the text or the ``--batch`` file are reported before anything is loaded.
"""

import json
import sys
from pathlib import Path

from ..config.infer_options import INFER, InferOptions, Name
from ..files import locked, parse_json, write_text
from ..naming import prefixed_errors
from .command import check_target, entry, text_of


def run(args: InferOptions) -> int:
    """Check everything, read, answer. Raises ValueError or OSError with a one-line message."""
    if args.batch:
        return run_batch(args, Path(args.batch), args.out)
    if args.evidence and (args.by_length or not args.question):
        raise ValueError("evidence needs a --question, and a --budget in slots without --one-shot")
    if args.report:
        check_target(Path(args.report), "report", source=args.file)
    text = text_of(args.file, args.include)  # before torch is imported: a name that is wrong is twice at once
    from .answers import answer_questions

    return answer_questions(args, text)


def run_batch(args: InferOptions, batch: Path, out: str | None) -> int:
    """Answer a file of prompts, for this process alone. Raises ValueError or OSError with a one-line message."""
    if not out:
        raise ValueError("--batch needs a file for the answers: give -o answers.jsonl")
    target, busy = Path(out), f"out={out!r} is being written by another process"
    check_target(target, "out", source=str(batch))
    with locked(target.with_name(f".{target.name}.lock"), busy):
        lines, done = read_prompts(batch), keep_answers(target)
        from .answers import answer_batch

        return answer_batch(args, target, lines, done)


def read_prompts(batch: Path) -> dict[str, tuple[Name, object]]:
    """The lines of a file or a pipe; blank ones are left out. Raises ValueError where it cannot be read, is neither, holds no
    prompts, or two have one id."""
    if batch.is_char_device() or batch.is_block_device():
        raise ValueError(f"batch={str(batch)!r} must be a file or a pipe")
    with prefixed_errors("batch", OSError):
        data = batch.read_bytes()
    prompts: dict[str, tuple[Name, object]] = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        value: object = None
        try:
            value = parse_json(line, f"line {number}", strict=True)
        except ValueError as error:
            value = error
        name = value.get("id") if isinstance(value, dict) else None
        name = name if isinstance(name, str) or type(name) is int else number
        if (key := key_of(name)) in prompts:
            twice = f"id {key} occurs twice (a prompt without one has its line's number)"
            raise ValueError(f"batch={str(batch)!r}: {twice}")
        prompts[key] = name, value
    if not prompts:
        raise ValueError(f"batch={str(batch)!r} holds no prompts")
    return prompts


def key_of(name: object) -> str:
    """An id as JSON writes it: 1 and "1" are two."""
    return json.dumps(name, ensure_ascii=False)


BEGIN = b'{"id": '
"""Beginning of a line of answers."""


def keep_answers(target: Path) -> set[str]:
    """Ids that have an answer in the file. Of a run that was cut short, a last line without its end is dropped, and so are
    errors, whose prompts are run again.

    Raises:
        ValueError: the file holds something else than answers.
    """
    whole = target.read_bytes() if target.exists() else b""
    kept: dict[str, bytes] = {}
    for number, line in enumerate(whole.splitlines(keepends=True), 1):
        if not line.endswith(b"\n") and (line.startswith(BEGIN) or BEGIN.startswith(line)):
            break
        record = parse_json(line, f"out={str(target)!r}: line {number}")
        if not isinstance(record, dict) or "id" not in record or not {"answer", "error"} & record.keys():
            raise ValueError(f"out={str(target)!r}: line {number} is not an answer of --batch: name another file")
        if "error" not in record:
            kept[key_of(record["id"])] = line.removesuffix(b"\n") + b"\n"
    if b"".join(kept.values()) != whole:
        write_text(target.resolve(), b"".join(kept.values()).decode())
    return set(kept)


main = entry(INFER, run, also=(RuntimeError,))


if __name__ == "__main__":
    sys.exit(main())
