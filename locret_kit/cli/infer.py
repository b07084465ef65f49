"""``locret-infer long.txt --ckpt heads --budget 6000``: answer from a long text in a fixed key/value budget."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.infer import INFER, InferOptions
from ..config.reader import read
from .command import command
from .loading import choose
from .terminal import check_target, progress, text_of, to_stdout

if TYPE_CHECKING:
    from ..cache.bounded import BoundedCache
    from ..heads import HeadsConfig
    from ..policies.base import Policy
    from ..settings import RunSettings


PLAIN = (None, "none", "first")
"""``protect`` that asks for nothing of a chat template."""


def run(args: InferOptions) -> int:
    """Load, read, answer. Raises ValueError or OSError with a one-line message."""
    questions = questions_of(args)
    if args.report:
        check_target(Path(args.report), "report")
    if not args.chat and questions == [None]:
        raise ValueError("--no-chat has no effect without --question: the text is then the whole prompt")

    from ..backbones.load import load_tokenizer
    from ..cache.bounded import BoundedCache
    from ..planning.memory import cap_gpu_memory
    from ..policies.scopes import Stabilizers
    from ..runtime.provenance import provenance, weights_hash
    from ..runtime.session import Sampling, generate
    from ..samples.chat import protected_spans

    def say(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    cap = cap_gpu_memory(args.gpu_memory, args.device) if args.gpu_memory else None
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    chosen = choose(args.ckpt, args.model, args.adapter, args.policy, args.kv_bits)
    name, heads, policy = chosen.backbone, chosen.heads, chosen.policy
    heads_hash = weights_hash(heads) if heads is not None and args.report else ""  # before they are cast
    check_settings(args, chosen.config)
    say(f"backbone: {name}")
    prompts = read_prompts(args, questions, load_tokenizer(name))
    say(f"prompt: {' and '.join(str(len(ids)) for ids in prompts)} tokens")
    given = args.run
    if cap is not None:
        given = replace(given, chunk=plan_chunk(args, name, policy, chosen.config, max(map(len, prompts)), cap, say))
    protects = any(isinstance(scope, Stabilizers) for scope in policy.scopes)
    idle = None if protects or args.stabilizers is None else f"warning: policy={policy.name} protects no stabilizers"
    model, tokenizer = chosen.load(args)
    found: list[dict[str, object]] = []
    for question, ids in zip(questions, prompts, strict=True):
        cache = BoundedCache(given, policy, heads, prompt_length=len(ids))
        cache.bind(model)
        spans = protected_spans(tokenizer, ids, args.protect) if args.chat and question is not None else []
        for span in spans:
            cache.pin(*span)
        met = spans or args.protect in PLAIN
        unseen = None if met else f"warning: protect={args.protect}: the prompt shows no such text"
        for line in (*chosen.warnings, idle, unseen, beyond_window(model, cache)) if not found else ():
            if line:
                print(line, file=sys.stderr)
        if len(questions) > 1:
            to_stdout("\n" * bool(found) + f"question: {question}\n")
        text, report = generate(
            model, tokenizer, ids, cache, max_new_tokens=args.max_new_tokens, sampling=sampling, seed=args.seed,
            graph=args.graph, progress=None if args.quiet else progress(), on_text=to_stdout,
        )  # fmt: skip
        to_stdout("\n")
        for line in report.lines():
            say(line)
        reason = "stop" if report.new_tokens < args.max_new_tokens else "length"
        if reason == "length":
            say(f"the answer was cut after max_new_tokens={args.max_new_tokens}")
        asked = {"question": question} if len(questions) > 1 else {}
        found.append({**asked, **report.to_dict(), "answer": text, "finish_reason": reason})
    if args.report:
        from ..files import write_beside

        origin = provenance(name, args.ckpt, heads_hash, chosen.adapter, report.settings.backend or "")
        body = json.dumps({**origin, **(found[0] if len(found) == 1 else {"answers": found})}, indent=2) + "\n"
        write_beside(Path(args.report).resolve(), lambda path: path.write_text(body))
    return 0


def check_settings(args: InferOptions, heads: HeadsConfig | None) -> None:
    """Raise ValueError for what is out of bounds, and for options that could not act, before anything big is loaded."""
    from ..cache.geometry.schedule import Schedule

    def useless(names: tuple[str, ...], why: str, idle: object = None) -> None:
        for name in names:
            value = getattr(args, name)
            if value != idle:
                raise ValueError(f"--{name.replace('_', '-')} {value} has no effect {why}")

    if args.one_shot:
        useless(("chunk", "stabilizers", "local_len"), "with --one-shot, which evicts once, after the whole prompt")
    if args.temperature == 0:
        useless(("top_k",), "at temperature 0, which is greedy", idle=0)
        useless(("top_p",), "at temperature 0, which is greedy", idle=1.0)
    if not args.one_shot and not isinstance(args.budget, float):
        length = None if args.decode_every is None else 1
        Schedule.of(args.resolved(heads.inference if heads else {}, length), length)


def beyond_window(model: Any, cache: BoundedCache) -> str | None:
    """A warning where keys of the prompt are rotated by positions that the backbone was not made for."""
    from ..backbones.families import text_config

    window, s = getattr(text_config(model), "max_position_embeddings", None), cache.schedule
    budgets, places = cache.context.budgets, cache.context.positions
    rows = (s.prompt_length or 0) if cache.policy.keeps_everything else max(budgets) + s.chunk
    if window is None or not any(budgets) or (reach := places.largest(rows, s.prompt_length)) <= window:
        return None
    advice = "--positions compact, with budget and chunk together below it, does not"
    return f"warning: positions go up to {reach - 1}, beyond the backbone's window of {window}; {advice}"


def plan_chunk(
    args: InferOptions,
    name: str,
    policy: Policy,
    heads: HeadsConfig | None,
    tokens: int,
    cap: int,
    say: Callable[[str], None],
) -> int:
    """The chunk that lets the run stay within ``cap`` bytes; raises ValueError with what fits where none does. Nobody's
    chunk is made larger: results would change with the card."""
    from ..backbones.load import load_config, pick_device, pick_dtype
    from ..planning.memory import PLANNED_CHUNK, fit_plan
    from ..planning.plan import Setting
    from ..planning.sizes import show

    published = heads.inference if heads else {}
    run: RunSettings = replace(replace(args.run, one_shot=False).resolved(published, tokens), one_shot=args.one_shot)
    if args.chunk is None and "chunk" not in published:
        run = replace(run, chunk=PLANNED_CHUNK)
    setting = Setting(
        tokens, run, dtype=str(pick_dtype(args.dtype, pick_device(args.device))).removeprefix("torch."),
        d_hidden=heads.d_hidden if heads else 0, policy=policy, weight_bits=args.weight_bits,
    )  # fmt: skip
    setting, plan = fit_plan(load_config(name), setting, cap, chunk_is_fixed=args.chunk is not None)
    say(f"plan: {setting}; peak {show(plan.peak)} of {show(cap)}")
    return setting.chunk


def questions_of(args: InferOptions) -> list[str | None]:
    """The questions, or None alone where the text is continued."""
    if args.question and args.question_file:
        raise ValueError("give --question or --question-file, not both")
    questions = list(args.question)
    if args.question_file:
        said = f"question_file={args.question_file!r}"
        try:
            questions = [Path(args.question_file).read_text(encoding="utf-8").strip()]
        except UnicodeDecodeError as error:
            raise ValueError(f"{said} is not UTF-8: byte {error.start}") from error
        except OSError as error:
            raise ValueError(f"{said} cannot be read: {error.strerror}") from error
    for question in questions:
        if not question.strip():
            raise ValueError("the question is empty")
        try:
            question.encode()
        except UnicodeEncodeError as error:  # bytes of another encoding, as the shell gave them
            raise ValueError(f"the question is not UTF-8: character {error.start}") from error
    return [*questions] or [None]


def read_prompts(args: InferOptions, questions: list[str | None], tokenizer: Any) -> list[array[int]]:
    """Token ids of the text with each question around it; of one question as the text is read."""
    from ..runtime.tokens import stream_ids
    from ..samples.chat import has_template, render_prompt

    text: Iterable[str] = text_of(args.file)
    if len(questions) > 1:
        text = list(text)
    prompts = []
    for question in questions:
        if question is None:
            return [stream_ids(tokenizer, text, special=True)]
        before, after = render_prompt(tokenizer, "", question, chat=args.chat)
        special = not (args.chat and has_template(tokenizer))
        prompts.append(stream_ids(tokenizer, chain([before], text, [after]), special=special))
    return prompts


@command("locret-infer", also=(RuntimeError,), usage=2)
def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 after an error said in one line, 2 after words that are no options; 130 after Ctrl-C."""
    args = read(INFER, sys.argv[1:] if argv is None else argv)
    if args is None:
        return 0
    args.load_plugin()
    if args.list_policies:
        from ..policies.grammar import describe_policies

        print("\n".join(describe_policies()))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
