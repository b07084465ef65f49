"""Last used 2026-11-25, for scripts/research/logs/heads.md.

Compare retaining heads from one reading of each text: training signals, or any sets of heads of one backbone.

    python scripts/research/signals.py --ckpt runs/signals/heads/* --haystacks texts/dev --out runs/dev --best
    python scripts/research/signals.py --ckpt HEADS... --haystacks texts/test --out runs/test --against log-prob@0.003 \\
        --write scripts/research/logs/heads.md

Every prompt is read once with full attention, and every set of heads answers from an eighth and from a sixteenth of it
(`one_reading.py`), token by token: digits that are asked for (``passkey``, and ``questions`` of four
facts in one text), the text's next 64 tokens (``perplexity``), or the 64 that full attention answers to a question of a data
set's (``agreement:leval.quality``, with ``--data``). ``--best`` names for each signal the rate (NAME@RATE) of the least nats a
token, over all tasks alike, for ``--ckpt`` of a second run on other texts.
``--policy lookahead-locret`` chooses the slots as that policy does at the last eviction of a prompt.
A rerun does only what is missing. ``--write`` puts the table between the page's marks.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from one_reading import Given, given

from locret_kit import BoundedCache, RetainingHeads
from locret_kit.backbones.load import load_backbone
from locret_kit.evals.engine.fidelity import greedy_reference
from locret_kit.evals.engine.result_rows import Row, Shard, read_rows
from locret_kit.evals.report.benchmark_tables import figure
from locret_kit.evals.report.paired import differences
from locret_kit.evals.tables import Table
from locret_kit.evals.tasks import Example, find_tasks
from locret_kit.evals.tasks.task import Task
from locret_kit.files import write_text
from locret_kit.runtime.provenance import versions, weights_hash
from locret_kit.runtime.sampling import stop_ids
from locret_kit.runtime.tokens import stream_ids

TAIL = 64
"""Last tokens of a prompt, which no eviction touches."""
NEXT = 64
"""Most tokens after a prompt that are given."""
SHARES = (8, 16)
"""Parts of the prompt that are kept, the tail counted."""
FIGURES = {"answer": ("right", "nll"), "nll": ("agreement", "nll"), "agreement": ("agreement", "nll")}
"""By a task's kind."""
BEGIN, END = "<!-- signals:begin -->\n", "<!-- signals:end -->"


def measured(args: argparse.Namespace, done: set[tuple], rows: Shard) -> Iterator[Row]:
    """Rows that ``done`` lacks, as they are made and written."""
    names = [Path(path).name for path in args.ckpt]
    heads = [RetainingHeads.from_pretrained(path) for path in args.ckpt]
    model, tokenizer = load_backbone(args.model or heads[0].config.backbone, dtype=args.dtype)
    if len(args.tasks) != len(args.lengths):
        raise ValueError(f"lengths={args.lengths} must be as many as tasks={args.tasks}")
    asked = [
        (task, length)
        for name, length in zip(args.tasks, args.lengths, strict=True)
        for task in find_tasks([name], haystacks=args.haystacks or ["repeated"], data=args.data, samples=args.samples)
    ]
    if wrong := [task for task, _ in asked if task.kind not in FIGURES]:
        raise ValueError(
            f"task={wrong[0].name} is of the kind {wrong[0].kind}, which must be one of {', '.join(FIGURES)}"
        )
    for sample in range(args.samples):
        for task, length in asked:
            if task.size is not None and sample >= task.size:
                continue
            budgets = [length // share for share in args.shares]
            wanted = {
                (task.name, task.haystack, length, budget, args.policy, name, sample)
                for budget in budgets
                for name in names
            }
            if not (wanted := wanted - done):
                continue
            example = task.make(Example(task, tokenizer, length, sample))
            ids = stream_ids(tokenizer, [example.prompt], special=example.special)
            continuation = continuation_of(task, example, model, tokenizer, ids)
            missing = [i for i, name in enumerate(names) if any(key[5] == name for key in wanted)]
            shared = {
                "task": task.name, "haystack": task.haystack, "length": length, "sample": sample, "tokens": len(ids),
                "answer": answer_of(example) if task.kind == "answer" else "", "depth": example.depth, "local_len": TAIL,
                "chunk": length, "stabilizers": 0, "positions": "compact", "new_tokens": len(continuation),
                "prompt_hash": hashlib.sha256(ids.tobytes()).hexdigest()[:16], "text_hash": task.text_hash,
                "model": heads[0].config.backbone, "dtype": str(model.dtype).removeprefix("torch."), "versions": versions(),
            }  # fmt: skip
            for one in given(model, [heads[i] for i in missing], ids, continuation, budgets, TAIL, args.policy):
                row = row_of(one, args.policy, missing, names, heads, FIGURES[task.kind], shared)
                if row.key not in done:
                    rows.append(row)
                    yield row


def continuation_of(task: Task, example: Example, model: Any, tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Tokens that are given after the prompt: its answer, the text's next ones, or what full attention writes."""
    if task.kind == "agreement":
        full = BoundedCache(len(ids) + NEXT, "full", prompt_length=len(ids))
        return greedy_reference(model, full, ids, NEXT, stop_ids(model, tokenizer))
    return list(stream_ids(tokenizer, [example.continuation or f" {answer_of(example)}"]))[:NEXT]


def answer_of(example: Example) -> str:
    """The first of the accepted answers."""
    return example.answer if isinstance(example.answer, str) else str(example.answer[0])


def row_of(
    one: Given,
    policy: str,
    missing: Sequence[int],
    names: Sequence[str],
    heads: Sequence[RetainingHeads],
    figures: tuple[str, str],
    shared: dict,
) -> Row:
    """The row of one set of heads and one budget."""
    scores = {name: float(getattr(one, name)) for name in figures}
    who = {"policy": "full", "heads": "-"}
    if one.heads is not None:
        i = missing[one.heads]
        who = {"policy": policy, "heads": names[i], "heads_hash": weights_hash(heads[i])}
    return Row(**shared, **who, budget=one.budget, score=scores["nll"], metric="nll", scores=scores, slots=one.budget)


def best(rows: Sequence[Row]) -> dict[str, str]:
    """For each signal its heads of the least mean, over cells, of the mean nats of a cell."""
    cells: dict[str, dict[tuple, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.policy != "full":
            cells[row.heads][row.task, row.length, row.budget].append(row.scores["nll"])
    means = {
        name: sum(sum(values) / len(values) for values in mine.values()) / len(mine) for name, mine in cells.items()
    }
    found: dict[str, str] = {}
    for name in sorted(means, key=lambda name: (means[name], name)):
        found.setdefault(name.partition("@")[0], name)
    return found


def table(rows: Sequence[Row], against: str, policy: str) -> str:
    """A table for each task, or for all of a data set's: a line for each set of heads, for each budget its figures and the nats
    minus those of ``against``, prompt by prompt."""
    tables = []
    for task, length in sorted({(family(row.task), row.length) for row in rows}):
        mine = [row for row in rows if (family(row.task), row.length) == (task, length)]
        budgets = sorted({row.budget for row in mine if row.policy == policy}, reverse=True)
        labels = sorted({row.label for row in mine}, key=lambda label: (label != "full", label))
        joined = [Row(**{**vars(row), "task": task, "haystack": "-", "sample": i}) for row, i in numbered(mine)]
        apart = {(one.label, one.budget): one for one in differences(joined, f"{policy} ({against})", "nll")}
        first = "right" if "right" in mine[0].scores else "agreement"
        lines = []
        for label in labels:
            cells = [label.removeprefix(f"{policy} (").removesuffix(")")]
            for budget in budgets:
                found = [row for row in mine if row.label == label and row.budget in (budget, 0)]
                cells += [figure([row.scores[name] for row in found]) for name in (first, "nll")]
                gap = apart.get((label, budget))
                cells.append(
                    "-" if gap is None else f"{gap.mean:+.3f}" + ("" if gap.stderr is None else f" ± {gap.stderr:.3f}")
                )
            lines.append(cells)
        parts = [[f"{first}, {budget} slots", "nats", f"minus {against}"] for budget in budgets]
        texts = ", ".join(sorted({row.haystack for row in mine} - {"-"}))
        n = len({row.sample for row in joined})
        asked = f"{n} prompts of {length:,} tokens" + (f" of {texts}" if texts else "")
        says = f"{asked}; {policy}; mean ± standard error, shares with Wilson's 95% interval"
        tables.append(Table(["heads", *(cell for part in parts for cell in part)], lines, task, says).markdown())
    return "\n".join(tables)


def numbered(rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """Rows with a number for each prompt, whatever its task and text."""
    numbers: dict[tuple[str, str, int], int] = {}
    for row in rows:
        yield row, numbers.setdefault((row.task, row.haystack, row.sample), len(numbers))


def family(task: str) -> str:
    """The subject of a table: the data set of a task such as agreement:leval.quality, else the task."""
    return task if task.endswith(".jsonl") or ":" not in task else task.rpartition(".")[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 after an error said in one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2], allow_abbrev=False)
    parser.add_argument("--ckpt", nargs="+", default=[], help="heads: folders of different names")
    parser.add_argument("--haystacks", nargs="+", default=[], help="real texts: files or folders")
    parser.add_argument("--data", nargs="+", default=[], help="folders of the data sets' files")
    parser.add_argument("--tasks", nargs="+", default=["passkey", "perplexity"], help="what is asked, as locret-eval's")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 2048], help="prompt tokens, for each task")
    parser.add_argument(
        "--shares", nargs="+", type=int, default=list(SHARES), help="8: an eighth of the prompt is kept"
    )
    parser.add_argument("--samples", type=int, default=8, help="prompts of each text and task")
    parser.add_argument("--model", help="backbone; by default the one that the heads name")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", default="locret", help="what is kept: one that scores by retaining heads alone")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--against", help="heads that the others are compared with")
    parser.add_argument("--best", action="store_true", help="print the heads of each signal's best rate")
    parser.add_argument("--write", type=Path, help="page whose table is rewritten")
    args = parser.parse_args(argv)
    try:
        if args.ckpt:
            done = {row.key for row in read_rows(args.out)} if list(args.out.glob("rows.*.jsonl")) else set()
            with Shard(args.out / "rows.0.jsonl") as shard:
                for row in measured(args, done, shard):
                    print(
                        f"{row.task} {row.haystack} #{row.sample} {row.label} {row.budget}: {row.scores}",
                        file=sys.stderr,
                    )
        rows = [row for row in read_rows(args.out) if row.policy in ("full", args.policy)]
        if args.best:
            print("\n".join(best(rows).values()))
        if args.against:
            made = table(rows, args.against, args.policy)
            print(made)
            if args.write:
                before, rest = args.write.read_text(encoding="utf-8").split(BEGIN)
                write_text(args.write, before + BEGIN + made + END + rest.split(END)[1])
    except (OSError, ValueError) as error:
        print(f"signals.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
