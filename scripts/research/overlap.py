"""Last used 2026-11-23, for scripts/research/logs/overlap.md.

Count the 13-grams of evaluation texts that training texts have too.

    python scripts/research/overlap.py TRAINING... --against EVALUATION... [--write scripts/research/logs/overlap.md]
    python scripts/research/overlap.py pydoc wording FOLDER --against repeated jargon R.PassKey ruler OTHER_FOLDER

TRAINING is a recipe, a folder of heads with a training.json, what ``data.texts`` takes, or 'wording', the facts, prompts and
sentences of synthetic samples. EVALUATION is 'repeated' or another haystack, a folder of them (a row each), or a synthetic task,
whose prompts over repeated sentences are made (--tokenizer). Records count with their questions and answers; as training
texts with their ``input`` alone.

A gram is 13 words in a row; a word stands between white space, in lower case and without punctuation (GPT-3, arXiv 2005.14165,
appendix C). Each gram of a text counts once. Grams of the evaluation are held in memory; training texts pass by one by one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from locret_kit.config.recipes import known_recipes, load_config
from locret_kit.evals.tasks import GROUPS, Example, find_tasks, known_tasks
from locret_kit.evals.tasks.document_tasks import entries
from locret_kit.files import read_json, write_beside
from locret_kit.samples import overlap
from locret_kit.samples.haystack import TEXTS, load_text
from locret_kit.samples.needles import NOISE
from locret_kit.samples.records import SUFFIXES, read_records
from locret_kit.samples.synthetic import TRAINING
from locret_kit.training.sources import SYNTHETIC, text_of

BACKBONE = "checkpoints/SmolLM2-135M-Instruct"
ANY_MODEL = ("backbone.model=any",)
"""A recipe need not name one to say what it trains on."""
EXAMPLES, TOKENS = 4, 2048
"""Prompts of a synthetic task that are made, and the tokens of each."""
BEGIN, END = "<!-- overlap:begin -->\n", "<!-- overlap:end -->"


def files_of(source: str, suffixes: Sequence[str]) -> list[str]:
    """The files of a folder, recursively, by name; anything else as it is."""
    if not Path(source).is_dir():
        return [source]
    return [str(file) for file in sorted(Path(source).rglob("*")) if file.name.endswith(tuple(suffixes))]


def training_texts(source: str) -> Iterator[str]:
    """The texts of one TRAINING, one by one."""
    run = Path(source) / "training.json"
    if source == "wording":
        yield from (part for fact in TRAINING.facts for part in fact)
        yield from (*TRAINING.prompts, *TRAINING.sentences)
    elif run.is_file() or source.endswith((".yaml", ".yml")) or source in known_recipes():
        data = read_json(run)["data"] if run.is_file() else vars(load_config([f"recipe={source}", *ANY_MODEL]).data)
        for name in data["sources"]:
            if name == SYNTHETIC:
                for text in (*data["texts"], "wording"):
                    yield from training_texts(text)
            else:
                yield from map(text_of, read_records(name, split=data["split"]))
    else:
        yield from map(load_text, files_of(source, (".jsonl", *TEXTS)))


def evaluation_texts(source: str, tokenizer: str) -> Iterator[tuple[str, str]]:
    """``(name, text)`` of one EVALUATION, a row each."""
    if source == "repeated":
        yield source, NOISE * 9
    elif (source in known_tasks() or source in GROUPS) and source not in entries() and not Path(source).exists():
        made = AutoTokenizer.from_pretrained(tokenizer)
        for task in find_tasks([source]):
            examples = (task.make(Example(task, made, TOKENS, i)) for i in range(EXAMPLES))
            yield task.name, "\n".join(f"{e.prompt} {e.answer} {e.continuation}" for e in examples)
    else:
        for file in files_of(source, (*SUFFIXES, ".txt", ".txt.gz")):
            records = Path(file).suffix in SUFFIXES
            yield Path(file).name, "\n".join(map(text_of, read_records(file))) if records else load_text(file)


def longest(seen: NDArray[np.bool_]) -> int:
    """Words of the longest stretch of a text all of whose grams were seen."""
    if not seen.any():
        return 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], seen.astype(int), [0]])))
    return int((edges[1::2] - edges[::2]).max()) + overlap.N - 1


def table(training: Sequence[str], evaluation: Sequence[str], tokenizer: str) -> str:
    """A Markdown table: a row for each evaluation text, a column for each training text."""
    rows = [(name, overlap.grams(text)) for source in evaluation for name, text in evaluation_texts(source, tokenizer)]
    known = overlap.union([grams for _, grams in rows])
    seen = {source: np.zeros(len(known), np.bool_) for source in training}
    for source, mine in seen.items():
        for text in training_texts(source):
            mine |= overlap.among(known, np.unique(overlap.grams(text)))
    both = np.logical_or.reduce(list(seen.values()))
    names = ["/".join(Path(source).parts[-2:]) for source in training]
    lines = [
        f"| evaluation text | 13-grams | {' | '.join(f'in {name}' for name in names)} | in any | longest stretch, words |",
        "|---|" + "---|" * (len(names) + 3),
    ]
    for name, grams in rows:
        at = np.searchsorted(known, grams)
        own = np.unique(at)
        counts = [f"{int(hits[own].sum()):,} ({hits[own].mean():.2%})" for hits in (*seen.values(), both)]
        lines.append(f"| {name} | {len(own):,} | {' | '.join(counts)} | {longest(both[at])} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 after an error said in one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2], allow_abbrev=False)
    parser.add_argument("training", nargs="+")
    parser.add_argument("--against", nargs="+", required=True, metavar="EVALUATION")
    parser.add_argument("--tokenizer", default=BACKBONE, help=f"of tasks' prompts (default {BACKBONE})")
    parser.add_argument("--write", type=Path, help="file whose part between overlap:begin and overlap:end it becomes")
    args = parser.parse_args(argv)
    try:
        made = table(args.training, args.against, args.tokenizer)
        print(made, end="")
        if args.write:
            before, rest = args.write.read_text(encoding="utf-8").split(BEGIN)
            whole = before + BEGIN + made + END + rest.split(END)[1]
            write_beside(args.write, lambda beside: beside.write_text(whole, encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"overlap.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
