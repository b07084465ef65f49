"""``locret-infer --ckpt heads.pt --budget 6000 < long.txt``: answer from a long text in a fixed key/value budget."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import RunSettings
from .command import Flags, command

if TYPE_CHECKING:
    from ..heads import HeadsConfig


def parser() -> argparse.ArgumentParser:
    """The flags; defaults of None come from the checkpoint, scaled to the budget."""
    p = Flags(prog="locret-infer", description=__doc__, allow_abbrev=False)
    p.add_argument("--ckpt", help="heads: a folder, a .pt or .bin file, or a Hub repository")
    p.add_argument("--model", help="backbone: a folder or a Hub id (default: the one the heads name)")
    p.add_argument("--adapter", help="PEFT adapter for the backbone, or none (default: the one the heads name)")
    p.add_argument(
        "--policy",
        help="a policy's name or an expression (default: the heads' own, or locret)",
    )
    p.add_argument("--list-policies", action="store_true", help="print every policy with its parts and leave")
    p.add_argument("--budget", type=int, help="slots kept per key/value head and layer")
    p.add_argument("--chunk", type=int, help="tokens between evictions")
    p.add_argument("--stabilizers", type=int, help="newest slots that an eviction may not take")
    p.add_argument("--local-len", type=int, help="last tokens of the prompt, never evicted during prefill")
    p.add_argument("--decode-every", type=int, help="decoded tokens between evictions (default: only when full)")
    p.add_argument(
        "--kv-bits", type=int, choices=(4, 2), help="bits of a stored key or value (default: the model's dtype)"
    )
    p.add_argument("--one-shot", action="store_true", help="one eviction, when the whole prompt has been read")
    p.add_argument(
        "--positions", help="rotate keys by cache row (compact), place in the text (original), or clipped(SPAN) between"
    )
    text = p.add_argument_group("text")
    text.add_argument("--question", help="asked about the text on stdin, through the chat template")
    text.add_argument("--question-file", type=Path, help="the question, from a file")
    text.add_argument(
        "--no-chat",
        action="store_true",
        help="no chat template, and nothing behind the question: it may end with the answer's first words",
    )
    out = p.add_argument_group("generation")
    out.add_argument("--max-new-tokens", type=int, default=64)
    out.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    out.add_argument("--top-k", type=int, default=0)
    out.add_argument("--top-p", type=float, default=1.0)
    out.add_argument("--repetition-penalty", type=float, default=1.0)
    out.add_argument("--seed", type=int, default=0)
    run = p.add_argument_group("machine")
    run.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: the best there is)")
    run.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    run.add_argument(
        "--weight-bits", type=int, choices=(8, 4), help="quantise the backbone's layers with bitsandbytes while loading"
    )
    run.add_argument(
        "--backend", choices=("reference", "triton"), help="of the kernels (default: triton on CUDA, not in float32)"
    )
    run.add_argument(
        "--graph",
        action="store_true",
        help="replay decoding steps as CUDA graphs; an error where the policy or the machine does not allow it",
    )
    run.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="take no more of a CUDA device than this (24GiB), and plan the chunk for it",
    )
    run.add_argument("--report", type=Path, metavar="FILE.json", help="write every figure of the run")
    run.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    return p


def run(args: argparse.Namespace) -> int:
    """Load, read, answer. Raises ValueError or OSError with a one-line message."""
    from ..cache.storage.quantised import check_storage
    from ..policies.grammar import parse_policy
    from ..policies.scopes import Stabilizers

    named = parse_policy(args.policy) if args.policy is not None else None
    if named is not None:
        check_storage(args.kv_bits, named)
        if named.needs_heads and not args.ckpt:
            raise ValueError(f"policy={named.name!r} needs retaining heads: give --ckpt")
    if not args.ckpt and not args.model:
        raise ValueError("give --ckpt (heads, which name their backbone) or --model")
    if args.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={args.max_new_tokens} must be at least 1")
    if args.question and args.question_file:
        raise ValueError("give --question or --question-file, not both")
    if args.budget is not None and args.budget < 1:
        raise ValueError(f"budget={args.budget} must be at least 1")
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"seed={args.seed} must be from 0 to {2**32 - 1}")
    if args.report:
        check_report(args.report)
    if args.no_chat and not (args.question or args.question_file):
        raise ValueError("--no-chat has no effect without --question: stdin is then the whole prompt")

    say = (lambda *a, **k: None) if args.quiet else lambda *a, **k: print(*a, file=sys.stderr, flush=True, **k)
    from ..backbones.load import choose_adapter, load_backbone, load_tokenizer, other_backbone
    from ..cache.bounded import BoundedCache
    from ..heads import RetainingHeads
    from ..planning.memory import cap_gpu_memory
    from ..runtime.provenance import provenance, weights_hash
    from ..runtime.session import Sampling, generate

    cap = cap_gpu_memory(args.gpu_memory, args.device) if args.gpu_memory else None
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    heads = RetainingHeads.from_pretrained(args.ckpt, backbone=args.model) if args.ckpt else None
    config = heads.config if heads else None
    policy = named or parse_policy(config.policy if config else "streaming")
    check_storage(args.kv_bits, policy)
    heads_hash = weights_hash(heads) if heads is not None and args.report else ""  # before they are cast
    given = RunSettings(**{item.name: getattr(args, item.name) for item in fields(RunSettings)})
    check_settings(args, given, config)
    name = args.model or (config.backbone if config else "")
    say(f"backbone: {name}")
    ids = read_prompt(args, load_tokenizer(name))
    say(f"prompt: {len(ids)} tokens")
    if cap is not None:
        given = replace(given, chunk=plan_chunk(args, name, policy, config, given, len(ids), cap, say))
    adapter, warning = choose_adapter(config.adapter if config else None, args.adapter)
    protects = any(isinstance(scope, Stabilizers) for scope in policy.scopes)
    idle = None if protects or args.stabilizers is None else f"warning: policy={policy.name} protects no stabilizers"
    model, tokenizer = load_backbone(
        name, dtype=args.dtype, device=args.device, adapter=adapter, weight_bits=args.weight_bits
    )
    if heads is not None:
        from ..backbones.families import spec_of, text_config

        heads.check_backbone(spec_of(text_config(model)))
    cache = BoundedCache(given, policy, heads, prompt_length=len(ids))
    cache.bind(model)
    other = other_backbone(config.backbone, name) if config else None
    for line in (warning, idle, other, beyond_window(model, cache)):
        if line:
            print(line, file=sys.stderr)
    text, report = generate(
        model, tokenizer, ids, cache, max_new_tokens=args.max_new_tokens, sampling=sampling, seed=args.seed,
        graph=args.graph, progress=None if args.quiet else _progress(), on_text=_to_stdout,
    )  # fmt: skip
    _to_stdout("\n")
    for line in report.lines():
        say(line)
    if args.report:
        from ..files import write_beside

        origin = provenance(name, args.ckpt, heads_hash, adapter, report.settings.backend or "")
        body = json.dumps({**origin, **report.to_dict(), "answer": text, "seed": args.seed}, indent=2) + "\n"
        write_beside(args.report.resolve(), lambda path: path.write_text(body))
    return 0


def check_report(path: Path) -> None:
    """Raise ValueError where no file can be put, before the text is read: minutes later would be too late."""
    said = f"report={str(path)!r}"
    if path.exists() and not path.is_file():
        raise ValueError(f"{said} is {'a folder' if path.is_dir() else 'no regular file'}: name a file")
    if not os.access(path.resolve().parent, os.W_OK):
        raise ValueError(f"{said}: its folder is missing or cannot be written")


def check_settings(args: argparse.Namespace, given: RunSettings, config: HeadsConfig | None) -> None:
    """Raise ValueError for what is out of bounds, and for flags that could not act, before anything big is loaded."""
    from ..cache.geometry.schedule import Schedule

    def useless(flags: tuple[str, ...], why: str, idle: Any = None) -> None:
        for flag in flags:
            value = getattr(args, flag)
            if value != idle:
                raise ValueError(f"--{flag.replace('_', '-')} {value} has no effect {why}")

    if args.one_shot:
        useless(("chunk", "stabilizers", "local_len"), "with --one-shot, which evicts once, behind the whole prompt")
    if args.temperature == 0:
        useless(("top_k",), "at temperature 0, which is greedy", idle=0)
        useless(("top_p",), "at temperature 0, which is greedy", idle=1.0)
    if not given.one_shot and not isinstance(given.budget, float):
        length = None if given.decode_every is None else 1
        Schedule.of(given.resolved(config.inference if config else {}, length), length)


def beyond_window(model: Any, cache: Any) -> str | None:
    """A warning where keys of the prompt are rotated by positions that the backbone was not made for."""
    from ..backbones.families import text_config

    window, s = getattr(text_config(model), "max_position_embeddings", None), cache.schedule
    rows = s.prompt_length if cache.policy.keeps_everything else max(cache.budgets) + s.chunk
    if window is None or not any(cache.budgets) or (reach := cache.places.largest(rows, s.prompt_length)) <= window:
        return None
    advice = "--positions compact, with budget and chunk together below it, does not"
    return f"warning: positions go up to {reach - 1}, beyond the backbone's window of {window}; {advice}"


def plan_chunk(
    args: argparse.Namespace,
    name: str,
    policy: Any,
    heads: HeadsConfig | None,
    given: RunSettings,
    tokens: int,
    cap: int,
    say: Any,
) -> int:
    """The chunk that lets the run stay within ``cap`` bytes; raises ValueError with what fits where none does. Nobody's
    chunk is made larger: results would change with the card."""
    from ..backbones.load import load_config, pick_device, pick_dtype
    from ..planning.memory import PLANNED_CHUNK, fit_plan
    from ..planning.plan import Setting
    from ..planning.sizes import show

    published = heads.inference if heads else {}
    run = replace(replace(given, one_shot=False).resolved(published, tokens), one_shot=given.one_shot)
    if given.chunk is None and "chunk" not in published:
        run = replace(run, chunk=PLANNED_CHUNK)
    setting = Setting(
        tokens, run, dtype=str(pick_dtype(args.dtype, pick_device(args.device))).removeprefix("torch."),
        d_hidden=heads.d_hidden if heads else 0, policy=policy, weight_bits=args.weight_bits,
    )  # fmt: skip
    setting, plan = fit_plan(load_config(name), setting, cap, chunk_is_fixed=args.chunk is not None)
    say(f"plan: {setting}; peak {show(plan.peak)} of {show(cap)}")
    return setting.chunk


def read_prompt(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Token ids of stdin, with the question around it where one is asked."""
    from ..runtime.tokens import read_utf8, stream_ids
    from ..samples.chat import has_template, render_prompt

    question = args.question
    if args.question_file:
        try:
            question = args.question_file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"question_file={str(args.question_file)!r} is not UTF-8: byte {error.start}") from error
        except OSError as error:
            raise ValueError(f"question_file={str(args.question_file)!r} cannot be read: {error.strerror}") from error
    if question is not None and not question.strip():
        raise ValueError("the question is empty")
    try:
        (question or "").encode()
    except UnicodeEncodeError as error:  # bytes of another encoding, as the shell gave them
        raise ValueError(f"the question is not UTF-8: character {error.start}") from error
    if sys.stdin.isatty():
        print("reading the text from the terminal; end it with Ctrl-D", file=sys.stderr)
    blocks = _not_blank(read_utf8(sys.stdin.buffer))
    if question is None:
        return stream_ids(tokenizer, blocks, special=True)
    chat = not args.no_chat
    before, after = render_prompt(tokenizer, "", question, chat=chat)
    return stream_ids(tokenizer, chain([before], blocks, [after]), special=not (chat and has_template(tokenizer)))


def _not_blank(blocks: Any) -> Any:
    """Pass the blocks on; an empty or blank text is an error."""
    blank = True
    for block in blocks:
        blank = blank and not block.strip()
        yield block
    if blank:
        raise ValueError("stdin holds no text: locret-infer ... < long.txt")


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _progress() -> Any:
    began = last = time.perf_counter()

    def show(done: int, total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        terminal = sys.stderr.isatty()
        if done < total and now - last < (0.5 if terminal else 10):
            return
        last = now
        rate = done / (now - began)
        end = "\r" if terminal and done < total else "\n"
        left = (total - done) / rate
        print(
            f"prefill {done}/{total} tokens, {rate:.0f} tok/s, {left:.0f} s left   ",
            file=sys.stderr,
            end=end,
            flush=True,
        )

    return show


@command("locret-infer", also=(RuntimeError,))
def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 after an error said in one line; 130 after Ctrl-C."""
    args = parser().parse_args(argv)
    if args.list_policies:
        from ..policies.grammar import describe_policies

        print("\n".join(describe_policies()))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
