"""``locret-infer --batch prompts.jsonl -o answers.jsonl``: many prompts, answered together; a line of JSON for each."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..cache.bounded import BoundedCache
from ..config.infer_options import BatchPrompt, Generation, InferOptions, Name
from ..naming import first_line
from ..runtime.engine import run as answered
from ..runtime.sequence import Request, Sequence
from ..runtime.session import Sampling
from ..runtime.tokens import answer_text, stream_ids
from ..text.template import has_template, render_messages
from ..validation import made
from .batch_files import BatchFiles, open_answers
from .loading import check_run, choose, prompt_ids
from .terminal import check_question

SHARED = (*(item.name for item in fields(Generation)), "seed")
"""Options that a line may have for itself."""


@dataclass(eq=False)
class Line(Request):
    """The prompt of a line. ``asked``: whether it is a user's one message in the chat template."""

    name: Name = 0
    asked: bool = False


def answer(args: InferOptions, batch: BatchFiles) -> int:
    """Load, and answer what has no answer yet; the exit status. Raises ValueError or OSError with a one-line message."""
    target, lines, done = batch
    left, total = [line for key, line in lines.items() if key not in done], len(lines)
    Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    chosen = choose(args.ckpt, args.model, args.adapter, args.policy, args.kv_bits)
    check_run(args, chosen)
    if not left:
        print(f"{target} has an answer for each of the {total} prompts", file=sys.stderr)
        return 0
    model, tokenizer = chosen.load(args)
    warn = cache(partial(tqdm.write, file=sys.stderr))  # each once
    for line in (*chosen.warnings, chosen.idle_stabilizers(args)):
        if line:
            warn(line)
    errors: list[Name] = []
    bar = tqdm(total=total, initial=total - len(left), unit="prompt", disable=args.quiet)
    with open_answers(target) as out, bar:

        def write(name: Name, **record: object) -> None:
            print(json.dumps({"id": name, **record}, ensure_ascii=False), file=out, flush=True)
            bar.update()
            if "error" in record:
                errors.append(name)

        def new_cache(line: Line) -> BoundedCache:
            settings = replace(args.run, seed=line.seed)
            made, warning = chosen.cache(settings, model, tokenizer, line.ids, asked=line.asked)
            if warning:
                warn(warning)
            return made

        def requests() -> Iterator[Line]:
            for name, data in left:
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
    answered = {"answer": answer_text(tokenizer, sequence.tokens), "finish_reason": sequence.finish_reason}
    tokens = {"prompt_tokens": len(sequence.request.ids), "new_tokens": len(sequence.tokens)}
    return {**answered, **tokens, "first_token_s": round(sequence.first_token_s or 0.0, 4)}
