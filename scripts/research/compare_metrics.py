"""Last used 2026-11-22, for README.md.

Compare our metrics with the scores of the benchmarks' own scripts, on predictions that were published with them.

    git clone https://github.com/OpenLMLab/LEval
    git clone https://github.com/OpenBMB/InfiniteBench
    python scripts/research/compare_metrics.py --leval LEval --infinitebench InfiniteBench

Exit status 1 where a figure differs by more than 0.1 point. ``--longbench`` takes a folder with LongBench's `eval.py` and
`metrics.py` and with predictions under ``pred/MODEL/``, which LongBench itself does not publish; its script needs
``pip install fuzzywuzzy``. The published scripts run unchanged, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from locret_kit.evals.metrics.benchmarks import get_metric
from locret_kit.evals.tasks.document_tasks import entries
from locret_kit.naming import first_line

BOUND = 0.1  # points
Prediction = tuple[str, Any, dict]
"""Output, answer, and the record that they come from."""


@dataclass(frozen=True)
class Row:
    """A figure of a model on a task, in points."""

    benchmark: str
    model: str
    task: str
    metric: str
    n: int
    published: float
    ours: float

    @property
    def difference(self) -> float:
        return self.ours - self.published


# ---- the published scripts -----------------------------------------------------------------------------------------


def run_published(script: str, arguments: Sequence[str]) -> None:
    """Run a script as its authors would, in this process; stands in for three things that are hard to have today:
    `datasets.Metric` (gone since datasets 3), `evaluate.load("rouge")` (code from the Hub around rouge-score) and nltk's
    sentence splitter (its files are a download; ROUGE-1, -2 and -L do not depend on where lines break)."""
    import nltk
    from rouge_score.rouge_scorer import RougeScorer

    class Metric:
        def __init__(self, config_name: str) -> None:
            self.config_name = config_name

        def compute(self, predictions: list, references: list) -> dict:
            return self._compute(predictions, references)  # type: ignore[attr-defined]

    class Rouge:
        def compute(self, predictions: list, references: list, use_aggregator: bool) -> dict:
            scorer = RougeScorer(["rougeLsum"])
            found = [
                scorer.score_multi(*pair)["rougeLsum"].fmeasure for pair in zip(references, predictions, strict=True)
            ]
            return {"rougeLsum": found}

    stand_ins: dict[str, Any] = {
        "datasets": SimpleNamespace(Metric=Metric, load_dataset=None),
        "evaluate": SimpleNamespace(load=lambda name: Rouge()),
    }
    sys.modules.update(stand_ins)
    nltk.sent_tokenize = lambda text: [text]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def published(folder: Path, script: str, *arguments: str) -> str:
    """Output of a script of the folder.

    Raises:
        ValueError: it fails; with the last line of what it says.
    """
    command = [sys.executable, str(Path(__file__).resolve()), "--run", script, *arguments]
    environment = {**os.environ, "PYTHONUTF8": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ValueError(f"{script} fails: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


# ---- benchmarks ----------------------------------------------------------------------------------------------------


def leval(folder: Path) -> Iterator[Row]:
    """Its exams and its questions and summaries by words; those that a model judges are left out."""
    for path in sorted(folder.glob("Predictions/*_eval/*/*.pred.jsonl")):
        task, records = path.name.removesuffix(".pred.jsonl"), read(path)
        key = next(key for key in records[0] if key.endswith("_pred"))
        kept = [record for record in records if record["evaluation"] in ("exam", "f1", "rouge")]
        # A relative path: the script looks for tasks' names in all of it.
        said = published(folder, "Evaluation/auto_eval.py", "--pred_file", str(path.relative_to(folder)))
        last = said.strip().splitlines()[-1]
        figures = {"exact_match": last.split(":")[1]} if last.startswith("average") else literal_eval(last)
        for name, value in ours(f"leval.{task}", [(record[key], record["gt"], record) for record in kept]).items():
            right = next(float(figures[k]) for k in (f"rouge/{name}", "exact_match", "f1") if k in figures)
            yield Row("L-Eval", path.parent.name, task, name, len(kept), right, value)


def infinitebench(folder: Path) -> Iterator[Row]:
    """Its twelve tasks."""
    for path in sorted(folder.glob("results/*/preds_*.jsonl")):
        model, task = path.parent.name, path.stem.removeprefix("preds_")
        if f"infinitebench.{task}" not in entries():
            continue
        try:
            arguments = ["--task", task, "--model_name", model, "--output_dir", "results"]
            said = published(folder, "src/compute_scores.py", *arguments)
        except ValueError as error:
            print(f"left out: {path.relative_to(folder)}: {error}", file=sys.stderr)
            continue
        predictions = [(record["prediction" if "prediction" in record else "pred"], record) for record in read(path)]
        if (model, task) == ("gpt4", "math_calc"):  # that model begins with the first operand; published rule
            predictions = [(re.sub("[0-9]+", "", output, count=1), record) for output, record in predictions]
        label = "ground_truth" if "ground_truth" in predictions[0][1] else "label"
        found = ours(f"infinitebench.{task}", [(output, record[label], record) for output, record in predictions])
        name, value = next(iter(found.items()))
        right = 100 * float(said.strip().splitlines()[-1])
        yield Row("InfiniteBench", model, task, name, len(predictions), right, value)


def longbench(folder: Path) -> Iterator[Row]:
    """Its twenty-one tasks. Its script writes beside the predictions, so it is given a folder of links."""
    for place in sorted(path for path in folder.glob("pred/*") if path.is_dir()):
        files = {path.stem: path for path in sorted(place.glob("*.jsonl"))}
        with TemporaryDirectory() as scratch:
            links = Path(scratch, "pred", place.name)
            links.mkdir(parents=True)
            for path in files.values():
                (links / path.name).symlink_to(path.resolve())
            published(Path(scratch), str(folder.resolve() / "eval.py"), "--model", place.name)
            figures = json.loads((links / "result.json").read_text(encoding="utf-8"))
        for task, path in files.items():
            predictions = [(record["pred"], record["answers"], record) for record in read(path)]
            name, value = next(iter(ours(f"longbench.{task}", predictions).items()))
            yield Row("LongBench", place.name, task, name, len(predictions), figures[task], value)


BENCHMARKS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "leval": leval,
    "infinitebench": infinitebench,
    "longbench": longbench,
}


# ---- ours ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def ours(task: str, predictions: Sequence[Prediction]) -> dict[str, float]:
    """Means of the task's figures in points; the main one alone, but every one of ROUGE."""
    entry = entries()[task]
    metric, found = get_metric(entry.metric), []
    for output, answer, record in predictions:
        extra = {key: record.get(value, value) for key, value in entry.extra.items()}
        found.append(metric(output, answer, extra))
    names = list(found[0]) if entry.metric == "rouge" else list(found[0])[:1]
    return {name: 100 * sum(figures[name] for figures in found) / len(found) for name in names}


def table(rows: Sequence[Row]) -> str:
    """All rows, in Markdown."""
    lines = [
        "| benchmark | model | task | metric | n | published | ours | difference |",
        "|---|---|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        numbers = f"{row.n} | {row.published:.2f} | {row.ours:.2f} | {round(row.difference, 2) + 0.0:+.2f}"
        lines.append(f"| {row.benchmark} | {row.model} | {row.task} | {row.metric} | {numbers} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 where a figure differs, where there is none, or after an error said in one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[2], allow_abbrev=False)
    for name in BENCHMARKS:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help="a checkout with predictions")
    chosen = {name: folder for name, folder in vars(parser.parse_args(argv)).items() if folder is not None}
    if not chosen:
        parser.error(f"give one or more of {', '.join(f'--{name}' for name in BENCHMARKS)}")
    try:
        rows = [row for name, folder in chosen.items() for row in some(name, folder)]
    except (ValueError, OSError) as error:
        print(f"compare_metrics.py: {first_line(error)}", file=sys.stderr)
        return 1
    print(table(rows))
    far = [row for row in rows if abs(row.difference) > BOUND]
    largest = max(abs(row.difference) for row in rows)
    print(f"\n{len(rows)} figures, largest difference {largest:.3f} points, {len(far)} above {BOUND}")
    return 1 if far else 0


def some(name: str, folder: Path) -> list[Row]:
    """A benchmark's rows.

    Raises:
        ValueError: the folder holds no predictions where the benchmark has them.
    """
    if rows := list(BENCHMARKS[name](folder)):
        return rows
    raise ValueError(f"--{name}={folder} holds no predictions of {name}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_published(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
