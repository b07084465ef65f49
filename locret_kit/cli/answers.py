"""Answers of ``locret-infer``, with torch: about one text, and to the lines of ``--batch``, which are answered together."""

from __future__ import annotations

import functools
import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..backbones.load import choose_precision
from ..cache.bounded import BoundedCache
from ..config.infer_options import BatchPrompt, Generation, InferOptions, Name
from ..documents.document import Document
from ..files import write_json
from ..heads import RetainingHeads
from ..naming import first_line, prefixed_errors
from ..runtime.engine import run
from ..runtime.report import versions, weights_hash
from ..runtime.sequence import Request, Sequence
from ..runtime.session import Answer
from ..runtime.thoughts import Thought
from ..text.template import message_ids, prompt_ids
from ..text.tokens import answer_text
from ..validation import build
from . import loading
from .command import note, progress, record_of, title_of, write_answer

SHARED = (*(item.name for item in fields(Generation)), "seed")
"""Options that a line may have for itself."""


def answer_questions(args: InferOptions, text: Iterable[str]) -> int:
    """Load, then answer the questions about a text, or continue it. Each answer is begun when it is shown; the text is read once
    for all of them where they are then the same. Raises ValueError or OSError with a one-line message."""
    questions: list[str | None] = [*args.question] or [None]  # None: the text is continued
    generation, say = loading.generation_of(args), (lambda line: None) if args.quiet else note
    chosen = loading.resolve_choice(args.ckpt, args.model, args.adapter, args.policy, args, asked=questions != [None])
    say(f"backbone: {chosen.backbone}")
    if questions == [None]:
        say("no --question: the text is continued")
    text = list(text) if len(questions) > 1 or args.evidence else text
    tokenizer = chosen.open_tokenizer(args)
    prompts = [prompt_ids(tokenizer, text, question, chat=args.chat) for question in questions]
    say(f"prompt: {' and '.join(str(len(ids)) for ids in prompts)} tokens")
    model, _ = chosen.load(args, tokenizer)
    if args.dtype == "auto":
        say(f"precision: {choose_precision(model.device)}")
    run = chosen.for_text(args.run, model, max(prompts, key=len), None if args.quiet else note)
    warnings: list[str | None] = [*chosen.warnings]

    def answer_one(question: str | None, ids: array[int]) -> Answer:
        cache, warning = chosen.cache(run, tokenizer, ids, asked=args.chat and question is not None)
        warnings.append(warning)
        thought = None if question is None else Thought.after(tokenizer, ids, max_tokens=args.max_thought_tokens)
        return Answer(
            model, tokenizer, ids, cache, max_new_tokens=args.max_new_tokens, sampling=generation["sampling"], seed=args.seed,
            progress=None if args.quiet else progress(full=run.budget or 0), thought=thought,
        )  # fmt: skip

    answers = map(answer_one, questions, prompts)
    if args.evidence or (len(questions) > 1 and tokenizer.is_fast and not args.by_length):
        document = Document.read(
            model, tokenizer, text, run, chosen.policy, chosen.heads, chat=args.chat, title=title_of(args.file),
            progress=None if args.quiet else progress(full=run.budget or 0),
        )  # fmt: skip
        warnings.append(loading.not_shown(args.protect, document.protected(document.prompt("?"))))
        answers = map(partial(document.ask, evidence=args.evidence, **generation), args.question)
    reports: list[dict[str, object]] = []
    for question, answer in zip(questions, answers, strict=True):
        for line in filter(None, () if reports else (*warnings, loading.beyond_window(model, answer.cache))):
            note(line)
        asked = {"question": question} if len(questions) > 1 else {}
        write_answer(answer, asked.get("question"), first=not reports, quiet=args.quiet)
        for line in (*answer.report.lines(), *answer.notices):
            say(line)
        reports.append({**asked, **answer.report.to_dict(), **record_of(answer)})
    if args.report:
        figures = reports[0] if len(reports) == 1 else {"answers": reports}
        write_json(Path(args.report).resolve(), {**origin_of(chosen, reports[0]["backend"]), **figures})
    return 0


def origin_of(chosen: loading.ModelChoice, backend: object) -> dict[str, object]:
    """The origin of a report. The heads are read anew for their hash, since the run has cast them."""
    heads = RetainingHeads.from_pretrained(chosen.ckpt, backbone=chosen.backbone) if chosen.ckpt else None
    return {
        "model": chosen.backbone, "heads": chosen.ckpt or "-", "heads_hash": weights_hash(heads) if heads else "",
        "adapter": chosen.adapter, "backend": str(backend or ""), "versions": versions(),
    }  # fmt: skip


@dataclass(eq=False)
class Line(Request):
    """The prompt of a line. ``asked``: whether it is a user's one message in the chat template."""

    name: Name = 0
    asked: bool = False


def answer_batch(args: InferOptions, target: Path, lines: dict[str, tuple[Name, object]], done: set[str]) -> int:
    """Load the model and answer the remaining prompts; returns the exit status. Raises ValueError or OSError with a
    one-line message."""
    left, total = [line for key, line in lines.items() if key not in done], len(lines)
    chosen = loading.resolve_choice(args.ckpt, args.model, args.adapter, args.policy, args)
    if not left:
        note(f"{target} has an answer for each of the {total} prompts")
        return 0
    model, tokenizer = chosen.load(args)
    warn = functools.cache(partial(tqdm.write, file=sys.stderr))  # each once
    for line in chosen.warnings:
        warn(line)
    errors, defaults = list[Name](), {name: getattr(args, name) for name in SHARED}
    bar = tqdm(total=total, initial=total - len(left), unit="prompt", disable=args.quiet)
    with prefixed_errors(f"cannot write {target}", OSError), open(target, "a", encoding="utf-8") as out, bar:

        def write(name: Name, **record: object) -> None:
            print(json.dumps({"id": name, **record}, ensure_ascii=False), file=out, flush=True)
            bar.update()
            if "error" in record:
                errors.append(name)

        def new_cache(line: Line) -> BoundedCache:
            cache, warning = chosen.cache(replace(args.run, seed=line.seed), tokenizer, line.ids, asked=line.asked)
            if warning:
                warn(warning)
            return cache

        def requests() -> Iterator[Line]:
            for name, data in left:
                try:
                    prompt = read_line(data, defaults)
                    ids, asked = ids_of(prompt, tokenizer, args.chat)
                except ValueError as error:
                    write(name, error=first_line(error))
                    continue
                limit = prompt.max_thought_tokens
                thought = None if prompt.prompt is not None else Thought.after(tokenizer, ids, max_tokens=limit)
                sampling = loading.sampling_of(prompt)
                yield Line(ids, prompt.max_new_tokens, sampling, prompt.seed, name=name, asked=asked, thought=thought)

        for sequence in run(model, tokenizer, requests(), new_cache, max_running=args.batch_size):
            assert isinstance(sequence.request, Line)
            write(sequence.request.name, **record(sequence, tokenizer))
    if errors:
        note(f"{len(errors)} of {len(left)} prompts have an error, which is in {target}")
    return 1 if errors else 0


def read_line(data: object, defaults: Mapping[str, object]) -> BatchPrompt:
    """A line's prompt. The command's options are the ``defaults``.

    Raises:
        ValueError: an invalid line, with the reason.
    """
    if isinstance(data, ValueError):
        raise data
    if not isinstance(data, Mapping):
        raise ValueError('a prompt must be an object, such as {"prompt": "..."}')
    prompt = build(BatchPrompt, {**defaults, **data}, "field")
    if not prompt.temperature and (idle := {"top_k", "top_p"} & data.keys()):
        raise ValueError(f"{min(idle)} has no effect at temperature 0, which is greedy")
    return prompt


def ids_of(prompt: BatchPrompt, tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[array[int], bool]:
    """Token ids, and whether they are a user's one message in the chat template.

    Raises:
        ValueError: no tokens, messages without a chat template or that it refuses.
    """
    asked = prompt.question is not None
    if prompt.messages is not None:
        if not chat:
            raise ValueError("messages go through the chat template: leave out --no-chat")
        asked = [message.get("role") for message in prompt.messages] == ["user"]
        if not prompt.messages or prompt.messages[-1].get("role") == "assistant":
            raise ValueError("the last message must not be the assistant's")
        if wrong := next((message for message in prompt.messages if message.keys() != {"role", "content"}), None):
            raise ValueError(f"a message must have role and content, not {', '.join(wrong) or 'nothing'}")
        ids = message_ids(tokenizer, prompt.messages)
    else:
        ids = prompt_ids(tokenizer, [prompt.text or prompt.prompt or ""], prompt.question, chat=chat)
    if not len(ids):
        raise ValueError("the prompt holds no tokens")
    return ids, asked and chat


def record(sequence: Sequence, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The record of a prompt whose answer has ended."""
    if sequence.error is not None:
        return {"error": first_line(sequence.error)}
    texts = {"text": answer_text(tokenizer, sequence.tokens), "thought": ""}
    if (thought := sequence.request.thought) is not None:
        thought.end()
        texts = {kind: "".join(event.text for event in thought.events if event.kind == kind) for kind in texts}
    return {
        "answer": texts["text"], "finish_reason": sequence.finish_reason,
        **({"thought": texts["thought"]} if texts["thought"] else {}), "prompt_tokens": len(sequence.request.ids),
        "new_tokens": len(sequence.tokens), "first_token_s": round(sequence.first_token_s or 0.0, 4),
    }  # fmt: skip
