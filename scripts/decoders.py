"""Run every causal language model of the installed transformers, tiny and random, and write what works.

    python scripts/decoders.py                                  every row, into docs/reference/models.jsonl and models.md
    python scripts/decoders.py 'qwen3*' 'gemma*' --rows -       some rows, printed
    python scripts/decoders.py 'qwen3*' --size heads=6 kv_heads=3 head_dim=24 layers=6 --rows -

A row runs in a process of its own: crashes, hangs and wrong answers are reported, and the others go on. The checks are
those of ``tests/support/tiny_decoders/checks.py``; the exit code is 1 where a verdict is neither right nor a refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatch
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]
if __name__ == "__main__":  # the libraries read these as they are imported
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
from tiny_decoders.checks import Subject, verdict  # noqa: E402
from tiny_decoders.needed import Sizes  # noqa: E402
from tiny_decoders.rows import DECODERS, Row, rows  # noqa: E402

from locret_kit.evals.tables import Table, escaped  # noqa: E402

ROWS, PAGE = (ROOT / "docs" / "reference" / name for name in ("models.jsonl", "models.md"))
LIMIT = 240
"""Seconds of one row."""
GROUPS = {
    "policies": ("plain", "long", "streaming", "h2o", "snapkv"),
    "generate": ("generate",),
    "heads, compact": ("heads compact",),
    "heads, original": ("heads original", "heads kept"),
    "training": ("training",),
    "saved, copied": ("save", "fork"),
    "batch": ("batch",),
    "plan": ("plan",),
}
"""Columns of the page, and the checks that each stands for."""
INTRODUCTION = """Every causal language model of transformers {version}, built tiny with random weights and read with a bounded
cache: what is right, and for what is refused the sentence that you get. Nothing here is about speed, half precision or quality.

- **policies**: with a long budget the kit's own reading gives the model's own tokens and logits; with a short one `streaming`,
  `h2o` and `snapkv` keep the slots, and give the logits, of a simulation that shares no code with the kit.
- **generate**: transformers' `generate` with a bounded cache, in chunks, gives the model's own tokens and logits too.
- **heads**: random retaining heads, at both position schemes: exact with a long budget, within it with a short one; at original
  positions the slots are those of the simulation.
- **training**: a step gives gradients to every head, and the model's hidden states stay.
- **saved, copied**: a cache that is saved and loaded, or copied, in the middle of a text goes on bit for bit.
- **batch**: two texts together get the tokens of each alone.
- **plan**: `locret-plan` counts the bytes that the cache holds."""
BAD = ("wrong", "crash", "no end")
Record = dict[str, Any]


# ---- processes -----------------------------------------------------------------------------------------------------


def run(name: str, row: Row, sizes: Sizes, seed: int, say: Connection) -> None:
    """The child: builds the model and says ``(check, line)`` one by one; the check "" is about the model itself."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        subject = Subject(row, sizes, seed)
    except Exception as error:
        said = " ".join((str(error).strip().splitlines() or [""])[-1].split())
        say.send(("not built", f"{type(error).__name__}: {said}"))
        return
    say.send(("class", type(subject.model).__name__))
    for check, call in subject.checks().items():
        say.send(("begins", check))
        say.send((check, verdict(call)))


def verdicts(chosen: dict[str, Row], sizes: Sizes, seed: int, jobs: int, limit: int) -> Iterator[Record]:
    """A record of each row as it ends. ``jobs`` processes at a time."""
    context, waiting = get_context("fork"), list(chosen.items())
    running: dict[Connection, tuple[Any, Record, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, row = waiting.pop(0)
            listen, say = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(name, row, sizes, seed, say), daemon=True)
            process.start()
            say.close()
            record: Record = {"name": name, "model_type": row[0], "decoder": name in DECODERS, "verdicts": {}}
            running[listen] = process, record, time.monotonic()
        for listen in wait(list(running), timeout=1):
            assert isinstance(listen, Connection)
            process, record, began = running[listen]
            try:
                key, line = listen.recv()
            except EOFError:
                process.join()
                _end(record, began, f"crash: the process ended with {process.exitcode}" if process.exitcode else None)
                del running[listen]
                yield record
                continue
            if key in ("class", "not built", "begins"):
                record[key] = line
            else:
                record["verdicts"][key] = line
                record.pop("begins", None)
        for listen, (process, record, began) in list(running.items()):
            if time.monotonic() - began > limit:
                process.kill()
                process.join()
                _end(record, began, f"no end: after {limit} s")
                del running[listen]
                yield record


def _end(record: Record, began: float, line: str | None) -> None:
    """Give the check that was running the ``line`` of a process that did not end by itself."""
    check = record.pop("begins", None)
    if line is not None:
        record["verdicts" if check else "not built"] = {**record["verdicts"], check: line} if check else line
    record["seconds"] = round(time.monotonic() - began, 1)


# ---- the page ------------------------------------------------------------------------------------------------------


def state(record: Record, checks: Sequence[str]) -> tuple[str, str]:
    """``(kind, sentence)`` of some checks of a record: the worst of them. Kinds: those of ``BAD``, "refused", "exact"."""
    lines = [record["verdicts"].get(check, "crash: not reached") for check in checks]
    for kind in (*BAD, "refused"):
        for line in lines:
            if line.startswith(f"{kind}: "):
                return kind, line.removeprefix(f"{kind}: ")
    return "exact", ""


def page(records: Sequence[Record], version: str) -> str:
    """The page of all rows."""
    built = sorted((r for r in records if "not built" not in r), key=lambda r: r["name"].lower())
    of_text = [r for r in built if r["decoder"]]
    counts = {name: sum(state(r, checks)[0] == "exact" for r in of_text) for name, checks in GROUPS.items()}
    text = [
        "# Models",
        "<!-- Made by scripts/decoders.py, from models.jsonl. Run it again instead of changing this. -->",
        INTRODUCTION.format(version=version),
        f"Of {len(of_text)} decoders of text: " + ", ".join(f"{name} {n}" for name, n in counts.items()) + ".",
        "## What works",
        _works([r for r in built if any(state(r, checks)[0] == "exact" for checks in GROUPS.values())]),
        "## What is refused, and why",
        _sentences(built, ("refused",)) or "None.",
    ]
    if wrong := _sentences(built, BAD):
        text += ["## What is not right yet", wrong]
    if missing := [r for r in records if "not built" in r]:
        text += ["## Not built", "\n".join(f"- `{r['name']}`: {escaped(r['not built'])}" for r in missing)]
    return "\n\n".join(text) + "\n"


def _works(records: Sequence[Record]) -> str:
    """The models whose checks are all right, and a table of the others."""
    words = {"exact": "yes", "refused": "no", **dict.fromkeys(BAD, "**not right**")}
    cells = {r["name"]: [words[state(r, checks)[0]] for checks in GROUPS.values()] for r in records}
    whole = [f"`{name}`" for name, row in cells.items() if set(row) == {"yes"}]
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, row in cells.items():
        if set(row) != {"yes"}:
            alike[tuple(row)].append(f"`{name}`")
    some = [[", ".join(names), *row] for row, names in alike.items()]
    text = [f"All of it: {', '.join(whole)}."] if whole else []
    return "\n\n".join([*text, Table(["models", *GROUPS], some).markdown().rstrip()] if some else text) or "None."


def _sentences(records: Sequence[Record], kinds: Sequence[str]) -> str:
    """Sentences of these kinds, each with the rows and the columns that get it."""
    places: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for column, checks in GROUPS.items():
            kind, sentence = state(record, checks)
            if kind in kinds:
                sentence = sentence.replace(repr(record["model_type"]), "...")
                places[sentence if kind == "refused" else f"{kind}: {sentence}"][record["name"]].append(column)
    lines = []
    for sentence, by_name in places.items():
        named = (
            f"`{name}`" + ("" if len(columns) == len(GROUPS) else f" ({'; '.join(columns)})")
            for name, columns in by_name.items()
        )
        lines.append([sentence, ", ".join(named)])
    return Table(["sentence", "models"], lines).markdown().rstrip() if lines else ""


# ---- the command ---------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run rows, write or print them, and report wrong ones."""
    sizes = {field.name: field.default for field in fields(Sizes)}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("patterns", nargs="*", default=["*"], help="rows by name; a name that is none is a model type")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds of one row")
    parser.add_argument("--rows", default=str(ROWS), help="JSON lines; - prints them and writes no page")
    parser.add_argument("--size", nargs="*", default=[], metavar="NAME=N", help=f"of the models: {sizes}")
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts")
    parser.add_argument("--page", action="store_true", help="only write the page, from the rows that are there")
    args = parser.parse_args(argv)
    file = None if args.rows == "-" else Path(args.rows)
    if not args.page:
        asked = replace(Sizes(), **{name: int(n) for name, n in (pair.split("=") for pair in args.size)})
        known = rows(asked)
        chosen = {name: row for name, row in known.items() if any(fnmatch(name, pattern) for pattern in args.patterns)}
        chosen |= {
            name: (name, {}) for name in args.patterns if name in transformers.CONFIG_MAPPING and name not in chosen
        }
        import locret_kit.training.module  # noqa: F401  (once, for all processes)

        before = {r["name"]: r for r in (read(file) if file is not None and file.exists() else ())}
        for record in verdicts(chosen, asked, args.seed, args.jobs, args.limit):
            before[record["name"]] = record
            if file is None:
                print(json.dumps(record), flush=True)
            else:
                print(f"{record['name']:32} {record['seconds']:6.1f} s  {summary(record)}", flush=True)
                ordered = [before[name] for name in (*known, *(before.keys() - known.keys())) if name in before]
                file.write_text("".join(json.dumps(one) + "\n" for one in ordered))
        records = [before[name] for name in chosen]
    else:
        assert file is not None, "--page needs rows"
        records = read(file)
    if file == ROWS or args.page:
        PAGE.write_text(page(read(ROWS), transformers.__version__))
    built = [record for record in records if "not built" not in record]
    return int(any(state(record, checks)[0] in BAD for record in built for checks in GROUPS.values()))


def read(file: Path) -> list[Record]:
    """The records of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def summary(record: Record) -> str:
    """Number of checks by verdict."""
    if "not built" in record:
        return f"not built: {record['not built']}"
    counts = Counter(line.partition(":")[0] for line in record["verdicts"].values())
    return ", ".join(f"{n} {kind}" for kind, n in counts.items())


if __name__ == "__main__":
    sys.exit(main())
