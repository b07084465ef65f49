"""Write the tables and pictures of results from the committed rows (``checkpoints/*/results*.jsonl``, GPUs'
``kernels/benchmarks/results/*.csv``, and tables without rows, ``scripts/research/logs/tables/*.csv``), or check that they agree.

    python scripts/results.py           # rewrite them
    python scripts/results.py --check   # exit status 1 if one would change

docs/results has a page of pictures, index.md, and one for each question of a reader. The logs of scripts/research/logs have every
needle (needles.md), what comes back and sparse prefill (recall.md), and the papers' own comparisons (papers.md).
Tables stand between HTML comments such as ``<!-- facts:begin -->`` and ``<!-- facts:end -->``; the RESULTS.md beside each set
of heads has every table of its rows.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from locret_kit.evals.engine import Row, read_rows
from locret_kit.evals.report import score_tables
from locret_kit.evals.tables import Cell, Table, size, summarize
from locret_kit.files import write_beside

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "scripts" / "research")]
import log_tables  # noqa: E402
import paper_tables  # noqa: E402
import picture  # noqa: E402
import targets  # noqa: E402
from log_tables import HEADS, PAPER, RECALL, device_rows  # noqa: E402

SECOND = "gemma3-270m-locret"
"""Heads of the second backbone."""
FACTS = (
    ("R.PassKey", "unseen", 4096, (128, 256, 512)), ("ruler.niah_multiquery", "unseen", 4096, (512,)),
    ("R.PassKey", "unseen", 16384, (1024,)),
    ("R.PassKey", "later", 4096, (256, 512)), ("R.PassKey", "jargon", 4096, (256, 512)),
    ("R.PassKey", "jargon", 16384, (512, 1024, 2048, 4096)),
    ("R.Number", "repeated", 32768, (512,)),
    ("ruler.niah_multikey", "jargon", 2048, (256, 512)), ("paraphrase", "jargon", 1024, (256,)),
    ("ruler.fwe", "-", 2048, (256,)),
)  # fmt: skip
"""Tables of docs/results/facts.md: task, text, tokens, rows on the device."""
QUESTIONS = (
    ("agreement:leval.quality", "-", 2048, (256, 512)), ("perplexity", "later", 2048, (256, 512)),
    ("agreement:fidelity.continue", "later", 2048, (256, 512)),
)  # fmt: skip
"""Tables of docs/results/questions.md."""
GEMMA = (("R.PassKey", "later", 4096, (512,)),)
"""Tables of the second backbone in docs/results/facts.md."""
THIRD = "qwen2.5-coder-1.5b-locret"
"""Heads of the backbone for code."""
CODER = (
    ("code.jsonl", "-", 4096, (512,)), ("code-8k.jsonl", "-", 8448, (1024,)), ("code-16k.jsonl", "-", 16640, (2048,)),
    ("held.jsonl", "-", 4096, (512,)), ("keys-16k.jsonl", "-", 16640, (2048, 1024)),
    ("keys-32k.jsonl", "-", 32640, (4096,)), ("ruler.niah_multiquery", "jargon", 4096, (128, 256, 512)),
    ("leval.tpo", "-", 8192, (512,)),
)  # fmt: skip
"""Tables of that backbone in docs/results/facts.md."""
TITLES = {
    "R.PassKey": "A pass key of five digits", "R.Number": "A number of ten digits",
    "ruler.niah_multikey": "One key among many alike", "ruler.niah_multiquery": "Four numbers by four keys",
    "ruler.fwe": "The three most frequent words of a made-up text",
    "code.jsonl": "Questions about this project's code, of kinds that heads were trained on",
    "code-8k.jsonl": "The same in longer texts", "code-16k.jsonl": "The same, twice as long",
    "held.jsonl": "Questions about this project's code, of kinds that no heads were trained on",
    "keys-16k.jsonl": "Eight pass keys in each of three texts of the Jargon File",
    "keys-32k.jsonl": "Eight pass keys in each of two texts of the Jargon File, as long as the model's window",
    "leval.tpo": "L-Eval's multiple choice about four lectures of 4K tokens, read whole",
    "paraphrase": "A price of five digits, asked for in words that the text does not have",
    "agreement:leval.quality": "L-Eval's questions about stories: share of full attention's tokens that are chosen too",
    "perplexity": "The next words of a text: nats per token, lower is better",
    "agreement:fidelity.continue": "The next words of a text: share of full attention's tokens",
}  # fmt: skip
TEXTS = {
    "later": "two manuals, first opened when all settings were fixed",
    "unseen": "a book, a dictionary and a manual opened for this table alone", "jargon": "the Jargon File",
    "repeated": "five repeated sentences",
}  # fmt: skip
FOLDERS = {"later": "texts/later", "unseen": "texts/unseen"}
"""Texts that a command finds elsewhere than by their name."""
NAMED = (
    "full", "bm25", "locret", "lookahead-locret", "rereading-locret", RECALL, "compactor", "compactor reread=passages", "snapkv",
    "ada-snapkv", "pyramidkv", "h2o", "tova", "roco", "nacl", "kvzip", "streaming",
)  # fmt: skip
"""Policies of those tables, in this order; others are in the RESULTS.md."""
ONE_SHOT = "one-shot.jsonl"
"""Rows beside the others: policies in their papers' own form, one eviction after the whole prompt, at the places in the text."""
OPEN_CHAT, OPEN = "scripts/research/logs/open-chat.jsonl", "open chat"
"""Rows of plain questions through the chat template, without the answer's first words, and their ending."""
PLAIN = (("R.PassKey", "unseen", 4096, (256, 512)),)
"""Tables of those in docs/results/facts.md."""
FEWEST = 5
"""Texts that a line of a table has at least."""
PRINTED = {
    "twenty": "facts", "vectors": "facts", "long": "questions", "turns": "questions", "clients": "serving", "batch": "serving",
    "vllm": "serving", "bench": "serving", "fit": "serving", "schemas": "serving", "llamacpp": "speed", "coder": "speed",
    "coder-avx2": "speed", "large": "speed", "logits": "speed", "slots": "speed", "cost": "speed",
}  # fmt: skip
"""Tables that a script printed, and their pages."""


def provenance(rows: Sequence[Row], files: Sequence[Path]) -> str:
    """Sentence with the number of rows, their files, dates and machine."""
    named = {
        "precision": {row.dtype for row in rows if row.dtype},
        "device": {row.device for row in rows if row.device},
        **{name: {row.versions[name] for row in rows if name in row.versions} for name in ("torch", "transformers")},
    }
    ground = [f"{name} {' and '.join(sorted(values))}" for name, values in named.items() if values]
    sources = ", ".join(f"`{file.parent.name}/{file.name}`" for file in files)
    days = sorted({row.date[:10] for row in rows if row.date})
    where = f"Generated by `scripts/results.py` from {len(rows)} rows of {sources}"
    measured = f"measured {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else ""
    return f"{', '.join(part for part in (where, measured, *ground) if part)}.\n"


Place = tuple[str, str, int, tuple[int, ...]]
"""Task, text, tokens, and rows on the device."""


def answers(rows: Sequence[Row], places: Sequence[Place]) -> str:
    """A table for each place that has rows: a line for each number of slots and policy, with n, interval and date, and its
    command."""
    return "\n".join(filter(None, (_one_place(rows, place) for place in places)))


def _one_place(rows: Sequence[Row], place: Place) -> str:
    task, text, length, budgets = place
    here = [row for row in rows if (row.task, row.haystack, row.length) == (task, text, length) and row.policy in NAMED]
    here = [row for row in here if not row.slots or device_rows(row.policy, row.slots) in budgets]
    if not here:
        return ""
    forms = [[row for row in here if row.one_shot == once] for once in (False, True)]
    cells = [(cell, form) for form in forms for cell in summarize(form) if cell.n >= FEWEST]
    plain = ["asked through the chat template, without the answer's first words"] if here[0].ending == OPEN else []
    words = [TITLES[task], *plain, *([TEXTS[text]] if text in TEXTS else []), f"{size(length)} tokens"]
    lines = []
    for cell, form in sorted(
        cells, key=lambda c: (device_rows(c[0].policy, c[0].budget), NAMED.index(c[0].policy), c[0].heads)
    ):
        own = [row for row in form if (row.policy, row.heads, row.budget) == (cell.policy, cell.heads, cell.budget)]
        days = sorted({row.date[:10] for row in own if row.date})
        slots = f"{device_rows(cell.policy, cell.budget):,}" if cell.budget else "all"
        label = f"`{cell.policy}`" + (", the paper's recipe" if cell.heads == PAPER else "")
        label += ", evicts once, after the question" if own[0].one_shot else ""
        when = "/".join(dict.fromkeys((days[0], days[-1]))) if days else "-"
        lines.append([slots, label, str(cell.n), _figure(cell), f"{when}, {cell.dtype.replace('+', ' and ')}"])
    table = Table(["slots", "policy", "n", "score", "measured"], lines).markdown()
    shown = {(cell.policy, cell.heads, cell.budget) for cell, _ in cells}
    runs: dict[tuple[bool, bool, int], list[Row]] = {}
    for row in (row for form in forms for row in form if (row.policy, row.heads, row.budget) in shown):
        returned = device_rows(row.policy, row.budget) - row.budget if row.budget else 0
        runs.setdefault((row.one_shot, row.heads == PAPER, returned), []).append(row)
    commands = "\n".join(_command(runs[run], place) for run in sorted(runs))
    marks = ["chat"] * bool(plain) + ["gemma"] * any(row.heads == SECOND for row in here)
    name = re.sub(r"[\W_]+", "-", "-".join([task, text, size(length), *marks]).lower())
    return folded(name, ", ".join(words), f"{table}\n```bash\n{commands}\n```")


def folded(name: str, title: str, body: str) -> str:
    """A part of a page below a fold, with the anchor of that name."""
    return f'<details markdown id="{name}">\n<summary>{title}</summary>\n\n{body}\n\n</details>\n'


def _figure(cell: Cell) -> str:
    """The mean with Wilson's 95% interval of a share, else with its standard error."""
    assert cell.mean is not None
    if cell.low is not None:
        return f"{round(cell.mean * cell.n)} of {cell.n} [{cell.low:.2f}, {cell.high:.2f}]"
    return f"{cell.mean:.3f}" + ("" if cell.stderr is None else f" ± {cell.stderr:.3f}")


def _command(rows: Sequence[Row], place: Place) -> str:
    """The command that measures the largest number of examples of these policies."""
    task, text, length, _ = place
    budgets = sorted({row.budget for row in rows if row.budget})
    named = ",".join(name for name in NAMED if any(row.policy == name for row in rows))
    samples = max(row.sample for row in rows) + 1
    where = "" if text == "-" else f"haystacks=[{FOLDERS.get(text, text)}] "
    where = "data=[PATH/leval/eval] " if "leval." in task else where
    heads = next((row.heads for row in rows if row.heads != "-"), HEADS)
    folder = "PATH" if heads == PAPER else "checkpoints"
    out, form = f"runs/{task.replace(':', '-')}-{length}", ""
    if rows[0].one_shot:
        out, form = f"{out}-once", f" one_shot=true positions={rows[0].positions}"
    model = " model=PATH/gemma-3-270m" if heads == SECOND else ""
    if rows[0].ending == OPEN:
        out, form = f"{out}-open", " ending=open chat=always max_new_tokens=24"
    lengths = f"lengths=[{length}]" + " max_new_tokens=40" * task.endswith(".jsonl")
    return (
        f"locret-eval tasks=[{task}] {where}{lengths} budgets=[{','.join(map(str, budgets))}] \\\n"
        f'    "policies=[{named}]" samples={samples}{form} ckpt={folder}/{heads}{model} out={out}'
    )


def _printed(root: Path, name: str) -> str:
    head, *lines = csv.reader((root / picture.TABLES / f"{name}.csv").read_text(encoding="utf-8").splitlines())
    return Table(head, mean_of_rounds(lines) if name == "bench" else lines).markdown()


def mean_of_rounds(lines: Sequence[Sequence[str]]) -> list[list[str]]:
    """One line of the runs that were made alike, which the first seven cells say: the means of the others."""
    rounds: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for line in lines:
        rounds.setdefault(tuple(line[:7]), []).append(line[7:])
    means = {key: [mean(map(float, cells)) for cells in zip(*some, strict=True)] for key, some in rounds.items()}
    return [[*key, *(f"{cell:.5g}" for cell in cells)] for key, cells in means.items()]


def placed(page: str, name: str, tables: str) -> str:
    """A page with ``tables`` between its marks of that name.

    Raises:
        ValueError: a mark is missing, or stands there more than once or in the wrong order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the file must have {begin} and then {end}, once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{tables}{end}{rest.split(end)[1]}"


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 where ``--check`` finds a difference, or after an error said in one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a file is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of docs, scripts, checkpoints and kernels")
    args = parser.parse_args(argv)
    files: dict[str, list[Path]] = {}
    for file in sorted((args.root / "checkpoints").glob("*/results*.jsonl")):
        files.setdefault(file.parent.name, []).append(file)
    results = sorted((args.root / "kernels" / "benchmarks").glob("results/*.csv"))
    try:
        texts: dict[Path, str] = {}
        by_heads = {name: read_rows(own) for name, own in files.items()}
        for name, rows in by_heads.items():
            tables = "\n".join(table.markdown() for table in score_tables(summarize(rows)))
            texts[args.root / "checkpoints" / name / "RESULTS.md"] = (
                f"# Results\n\n{provenance(rows, files[name])}\n{tables}"
            )
        everything, demo = [row for rows in by_heads.values() for row in rows], by_heads[HEADS]
        once = read_rows((args.root / "checkpoints" / HEADS).glob(ONE_SHOT))
        plain = read_rows(args.root.glob(OPEN_CHAT))
        facts = f"{answers([*demo, *once], FACTS)}\n{answers(plain, PLAIN)}"
        texts_of_gpus = [file.read_text(encoding="utf-8") for file in results if not file.stem.endswith("-operations")]
        gpus = [row for text in texts_of_gpus for row in csv.DictReader(text.splitlines())]
        needles = f"{provenance(demo, files[HEADS])}\n{log_tables.needle_table(summarize(demo))}"
        sections = [
            ("docs/results/facts.md", "facts", facts),
            ("docs/results/facts.md", "second", answers(by_heads.get(SECOND, []), GEMMA)),
            ("docs/results/facts.md", "third", answers(by_heads.get(THIRD, []), CODER)),
            ("docs/results/questions.md", "questions", answers(demo, QUESTIONS)),
            ("scripts/research/logs/needles.md", "needles", needles),
            ("scripts/research/logs/recall.md", "recall", log_tables.recall_table(everything, HEADS)),
            ("scripts/research/logs/recall.md", "sparse", log_tables.sparse_table(everything)),
            *(("scripts/research/logs/papers.md", *one) for one in paper_tables.sections(args.root).items()),
            ("docs/results/speed.md", "gpu", targets.to_markdown(gpus)),
            *((f"docs/results/{page}.md", name, _printed(args.root, name)) for name, page in PRINTED.items()),
        ]
        for name, marker, table in sections:
            path = args.root / name
            texts[path] = placed(texts.get(path) or path.read_text(encoding="utf-8"), marker, table)
        stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        panels = picture.pictures(demo, args.root)
        stale += [path for path in panels if not picture.is_drawn(path, panels[path])]
        if args.check and stale:
            names = " and ".join(str(path.relative_to(args.root)) for path in stale)
            print(
                f"{names} differ{'s' if len(stale) == 1 else ''} from the rows: run python scripts/results.py",
                file=sys.stderr,
            )
            return 1
        for path in stale:
            if path in panels:
                picture.write(path, panels[path])
            else:
                write_beside(path, lambda beside, text=texts[path]: beside.write_text(text, encoding="utf-8"))
    except (ValueError, OSError) as error:
        print(f"results.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
