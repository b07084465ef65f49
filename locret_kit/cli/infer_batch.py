"""``locret-infer --batch prompts.jsonl -o answers.jsonl``: many prompts, answered together; a line of JSON for each."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING

from tqdm import tqdm

from ..config.infer_options import BatchPrompt, Generation, InferOptions, Name
from ..config.schema import refuse
from ..files import parse_json, write_text
from ..naming import first_line
from ..runtime.batch import run as answered
from ..runtime.sequence import Request, Sequence
from ..runtime.session import Sampling
from ..runtime.tokens import stream_ids
from ..text.template import has_template, render_messages
from ..validation import made
from .loading import check_run, choose, idle_stabilizers, idle_store, prompt_ids
from .terminal import check_question, check_target

if TYPE_CHECKING:
    from array import array

    from transformers import PreTrainedTokenizerBase

    from ..cache.bounded import BoundedCache

IDLE = ("file", "question", "question_file", "report", "graph")
"""Options of one text."""
SHARED = (*(item.name for item in fields(Generation)), "seed")
"""Options that a line may have for itself."""


@dataclass(eq=False)
class Line(Request):
    """The prompt of a line. ``asked``: whether it is a user's one message in the chat template."""

    name: Name = 0
    asked: bool = False


def run(args: InferOptions) -> int:
    """Check, load, answer what has no answer yet. Raises ValueError or OSError with a one-line message."""
    target = check_files(args)
    with open_prompts(str(args.batch)) as source:
        return answer(args, source, target)


def answer(args: InferOptions, source: IO[bytes], target: Path) -> int:
    """The exit status of ``run``, for prompts that can be read twice: for their names, and when their turn comes."""
    names = [name for name, _ in lines_of(source)]
    check_names(str(args.batch), names)
    done = keep_answers(target)
    left = [name for name in names if key_of(name) not in done]
    Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    chosen = choose(args.ckpt, args.model, args.adapter, args.policy, args.kv_bits)
    check_run(args, chosen.config)
    if not left:
        print(f"{target} has an answer for each of the {len(names)} prompts", file=sys.stderr)
        return 0
    model, tokenizer = chosen.load(args)
    warnings: set[str] = set()

    def warn(line: str | None) -> None:
        if line and line not in warnings:
            warnings.add(line)
            tqdm.write(line, file=sys.stderr)

    for line in (*chosen.warnings, idle_stabilizers(args, chosen.policy), idle_store(args.run, chosen.policy)):
        warn(line)
    errors: list[Name] = []
    with (
        open(target, "a", encoding="utf-8") as out,
        tqdm(total=len(names), initial=len(names) - len(left), unit="prompt", disable=args.quiet) as bar,
    ):

        def write(name: Name, **record: object) -> None:
            print(json.dumps({"id": name, **record}, ensure_ascii=False), file=out, flush=True)
            bar.update()
            if "error" in record:
                errors.append(name)

        def new_cache(line: Line) -> BoundedCache:
            settings = replace(args.run, seed=line.seed)
            cache, warning = chosen.cache(settings, model, tokenizer, line.ids, asked=line.asked)
            warn(warning)
            return cache

        def requests() -> Iterator[Line]:
            for name, data in lines_of(source):
                if key_of(name) in done:
                    continue
                try:
                    prompt, sampling = read_line(args, data)
                    ids, asked = ids_of(args, prompt, tokenizer)
                except ValueError as error:
                    write(name, error=first_line(error))
                    continue
                yield Line(ids, prompt.max_new_tokens, sampling, prompt.seed, name=name, asked=asked)

        for sequence in answered(model, tokenizer, requests(), new_cache, max_running=args.batch_size):
            assert isinstance(sequence.request, Line)
            write(sequence.request.name, **said(sequence, tokenizer))
    if errors:
        print(f"{len(errors)} of {len(left)} prompts have an error, which is in {target}", file=sys.stderr)
    return 1 if errors else 0


# ---- the two files ---------------------------------------------------------------------------------------------------


def check_files(args: InferOptions) -> Path:
    """The file of the answers. Raises ValueError for files that cannot be, and for options of one text."""
    refuse(args, IDLE, "with --batch, whose lines say what is asked")
    refuse(args, ("gpu_memory",), "with --batch: a cache for each of --batch-size prompts is not planned yet")
    if not args.out:
        raise ValueError("--batch needs a file for the answers: give -o answers.jsonl")
    target = Path(args.out)
    check_target(target, "out")
    if Path(str(args.batch)).resolve() == target.resolve():
        raise ValueError(f"out={args.out!r} is the file of the prompts: name another")
    return target


@contextmanager
def open_prompts(batch: str) -> Iterator[IO[bytes]]:
    """A file of prompts, or a temporary copy of what a pipe gives, which can be read but once.

    Raises:
        ValueError: it cannot be read, or is neither.
    """

    def at_once(path: str, flags: int) -> int:
        """Opened without waiting for a writer: a pipe that has none is empty."""
        return os.open(path, flags | os.O_NONBLOCK)

    with ExitStack() as stack:
        try:
            source: IO[bytes] = stack.enter_context(open(batch, "rb", opener=at_once))
            kind = os.fstat(source.fileno()).st_mode
            if stat.S_ISFIFO(kind):
                os.set_blocking(source.fileno(), True)
                copy = stack.enter_context(TemporaryFile())
                shutil.copyfileobj(source, copy)
                source = copy
            elif not stat.S_ISREG(kind):
                raise ValueError(f"batch={batch!r} must be a file or a pipe")
        except OSError as error:
            raise ValueError(f"batch={batch!r} cannot be read: {error.strerror}") from error
        yield source


def lines_of(source: IO[bytes]) -> Iterator[tuple[Name, object]]:
    """Each prompt's id and its line's value, or the ValueError that says why there is none. Blank lines are left out."""
    source.seek(0)
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            data = parse_json(line, f"line {number}")
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            data = ValueError(f"line {number} holds half of a character (a surrogate)")
        except ValueError as error:
            data = error
        name = data.get("id") if isinstance(data, dict) else None
        yield (name if isinstance(name, str) or type(name) is int else number), data


def check_names(batch: str, names: list[Name]) -> None:
    """Raise ValueError where there are no prompts, or two have one id."""
    if not names:
        raise ValueError(f"batch={batch!r} holds no prompts")
    seen: set[str] = set()
    for name in names:
        if key_of(name) in seen:
            raise ValueError(
                f"batch={batch!r}: id {key_of(name)} is there twice (a prompt without one has its line's number)"
            )
        seen.add(key_of(name))


def key_of(name: object) -> str:
    """An id as JSON writes it: 1 and "1" are two."""
    return json.dumps(name, ensure_ascii=False)


def keep_answers(target: Path) -> set[str]:
    """Ids that have an answer in the file. Of a run that was cut short, a last line without its end is dropped, and so are
    errors, whose prompts are run again.

    Raises:
        ValueError: the file holds something else than answers.
    """
    if not target.exists():
        return set()
    whole = target.read_bytes()
    kept, done = [], set()
    for number, line in enumerate(whole.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        record = parse_json(line, f"out={str(target)!r}: line {number}")
        if not isinstance(record, dict) or "id" not in record or not {"answer", "error"} & record.keys():
            raise ValueError(f"out={str(target)!r}: line {number} is no answer of a batch: name another file")
        if "error" not in record:
            kept.append(line)
            done.add(key_of(record["id"]))
    if b"".join(kept) != whole:
        write_text(target.resolve(), b"".join(kept).decode())
    return done


# ---- a line ----------------------------------------------------------------------------------------------------------


def read_line(args: InferOptions, data: object) -> tuple[BatchPrompt, Sampling]:
    """A line's prompt and how its tokens are chosen; the command's options stand in for those that it leaves out.

    Raises:
        ValueError: says what is wrong with it.
    """
    if isinstance(data, ValueError):
        raise data
    if not isinstance(data, Mapping):
        raise ValueError('a prompt must be an object, such as {"prompt": "..."}')
    prompt = made(BatchPrompt, {name: getattr(args, name) for name in SHARED} | dict(data), "field")
    if not prompt.temperature and (idle := {"top_k", "top_p"} & data.keys()):
        raise ValueError(f"{min(idle)} has no effect at temperature 0, which is greedy")
    return prompt, Sampling(prompt.temperature, prompt.top_k, prompt.top_p, prompt.repetition_penalty)


def ids_of(args: InferOptions, prompt: BatchPrompt, tokenizer: PreTrainedTokenizerBase) -> tuple[array[int], bool]:
    """Token ids, and whether they are a user's one message in the chat template.

    Raises:
        ValueError: no tokens, an empty question, messages without a chat template or that it refuses.
    """
    asked = prompt.question is not None
    if prompt.messages is not None:
        if not args.chat:
            raise ValueError("messages go through the chat template: leave out --no-chat")
        asked = [message.get("role") for message in prompt.messages] == ["user"]
        if not prompt.messages or prompt.messages[-1].get("role") == "assistant":
            raise ValueError("messages must end with one that is to be answered")
        if wrong := next((message for message in prompt.messages if message.keys() != {"role", "content"}), None):
            raise ValueError(f"a message has role and content, not {', '.join(wrong) or 'nothing'}")
        ids = stream_ids(tokenizer, render_messages(tokenizer, prompt.messages), special=not has_template(tokenizer))
    else:
        if prompt.question is not None:
            check_question(prompt.question)
        ids = prompt_ids(tokenizer, [prompt.text or prompt.prompt or ""], prompt.question, chat=args.chat)
    if not len(ids):
        raise ValueError("the prompt holds no tokens")
    return ids, asked and args.chat


def said(sequence: Sequence, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The record of a prompt whose answer has ended."""
    if sequence.error is not None:
        return {"error": first_line(sequence.error)}
    return {
        "answer": tokenizer.decode(sequence.tokens, skip_special_tokens=True),
        "finish_reason": sequence.finish_reason,
        "prompt_tokens": len(sequence.request.ids),
        "new_tokens": len(sequence.tokens),
        "first_token_s": round(sequence.first_token_s or 0.0, 4),
    }
