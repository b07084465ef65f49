"""``locret-infer long.txt --ckpt heads --budget 6000``: answer from a long text in a fixed key/value budget."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.infer_options import INFER, InferOptions
from ..config.schema import refuse
from .batch_files import open_batch
from .command import entry
from .loading import Chosen, before_reading, beyond_window, check_run, choose, not_shown, prompt_ids
from .terminal import check_question, check_sampling, check_target, progress, text_of, title_of, write_answer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..runtime.session import Answer, Sampling

Say = Callable[[str], None]


def run(args: InferOptions) -> int:
    """Load, read, answer. Raises ValueError or OSError with a one-line message."""
    for one in args.question:
        check_question(one)
    questions: list[str | None] = [*args.question] or [None]  # None: the text is continued
    if args.report:
        check_target(Path(args.report), "report", source=args.file)
    if questions == [None]:
        refuse(args, ("chat",), "without --question: the text is then the whole prompt")
    text = text_of(args.file)  # before torch is imported: a name that is wrong is said at once
    sampling = check_sampling(args)
    reports: list[dict[str, object]] = []
    say = (lambda line: None) if args.quiet else partial(print, file=sys.stderr, flush=True)
    chosen, model, answers, warnings = of_text(args, text, questions, sampling, say)
    for question, answer in zip(questions, answers, strict=True):
        for line in (*warnings, beyond_window(model, answer.cache)) if not reports else ():
            if line:
                print(line, file=sys.stderr)
        write_answer(answer, question if len(questions) > 1 else None, first=not reports)
        for line in answer.report.lines():
            say(line)
        if answer.finish_reason == "length":
            say(f"the answer was cut after max_new_tokens={args.max_new_tokens}")
        asked = {"question": question} if len(questions) > 1 else {}
        said = {"answer": str(answer), "finish_reason": answer.finish_reason}
        reports.append({**asked, **answer.report.to_dict(), **said})
    if args.report:
        from ..files import write_json

        found = reports[0] if len(reports) == 1 else {"answers": reports}
        write_json(Path(args.report).resolve(), {**origin_of(chosen, reports[0]["backend"]), **found})
    return 0


def of_text(
    args: InferOptions, text: Iterable[str], questions: Sequence[str | None], sampling: Sampling, say: Say
) -> tuple[Chosen, PreTrainedModel, Iterator[Answer], list[str | None]]:
    """What was chosen, the backbone, answers about a text, and warnings to be read when the first answer is begun. Each answer is
    begun when it is asked for; the text is read once for all of them where they are then the same."""
    from ..backbones.load import choose_precision, load_tokenizer, pick_device
    from ..documents.document import Document
    from ..runtime.session import Answer

    pick_device(args.device)  # before a long text is tokenised
    chosen = choose(args.ckpt, args.model, args.adapter, args.policy, args.kv_bits, asked=questions != [None])
    check_run(args, chosen)
    say(f"backbone: {chosen.backbone}")
    if len(questions) > 1:
        text = list(text)
    tokenizer = load_tokenizer(chosen.backbone)
    args.set_template(tokenizer)
    prompts = [prompt_ids(tokenizer, text, question, chat=args.chat) for question in questions]
    say(f"prompt: {' and '.join(str(len(ids)) for ids in prompts)} tokens")
    run, longest = args.run, max(prompts, key=len)
    model, tokenizer = chosen.load(args)
    if args.dtype == "auto":
        say(f"precision: {choose_precision(model.device, model.config)}")
    run = chosen.with_text_budget(run, model, len(longest), say)
    for line in before_reading(run, chosen, longest, model) if not args.quiet else ():
        print(line, file=sys.stderr, flush=True)
    warnings = [*chosen.warnings, chosen.idle_stabilizers(args)]
    shown = None if args.quiet else progress

    def alone(question: str | None, ids: array[int]) -> Answer:
        cache, warning = chosen.cache(run, model, tokenizer, ids, asked=args.chat and question is not None)
        warnings.append(warning)
        return Answer(
            model, tokenizer, ids, cache, max_new_tokens=args.max_new_tokens, sampling=sampling, seed=args.seed,
            progress=shown and shown(),
        )  # fmt: skip

    if len(questions) == 1 or not reads_once(args, chosen, tokenizer):
        return chosen, model, map(alone, questions, prompts), warnings
    document = Document.read(
        model, tokenizer, text, run, chosen.policy, chosen.heads, chat=args.chat, title=title_of(args.file),
        progress=shown and shown(),
    )  # fmt: skip
    warnings.append(not_shown(args.protect, document.protected(document.prompt("?"))))
    ask = partial(document.ask, max_new_tokens=args.max_new_tokens, sampling=sampling, seed=args.seed)
    return chosen, model, map(ask, map(str, questions)), warnings


def reads_once(args: InferOptions, chosen: Chosen, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether answers are the same bit for bit where the text is read once for several questions: not where the budget, the
    one chunk or the room hang on each prompt's length."""
    by_length = isinstance(args.budget, float) or args.one_shot or chosen.policy.keeps_everything
    return tokenizer.is_fast and not by_length


def origin_of(chosen: Chosen, backend: object) -> dict[str, object]:
    """The origin of a report. The heads are read anew for their hash, since the run has cast them."""
    from ..heads import RetainingHeads
    from ..runtime.report import provenance, weights_hash

    heads = RetainingHeads.from_pretrained(chosen.ckpt, backbone=chosen.backbone) if chosen.ckpt else None
    hashed = weights_hash(heads) if heads is not None else ""
    return provenance(chosen.backbone, chosen.ckpt, hashed, chosen.adapter, str(backend or ""))


def run_or_batch(args: InferOptions) -> int:
    """The prompts of ``--batch``, or the questions about one text."""
    if args.batch:
        with open_batch(args) as batch:
            from .infer_batch import answer  # with torch

            return answer(args, batch)
    refuse(args, ("out", "batch_size"), "without --batch")
    return run(args)


main = entry(INFER, run_or_batch, also=(RuntimeError,))


if __name__ == "__main__":
    sys.exit(main())
