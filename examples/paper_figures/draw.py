"""Redraw a paper's figure with your backbone and policies.

    python examples/paper_figures/draw.py retained ckpt=checkpoints/smollm2-135m-locret out=runs/figures
    python examples/paper_figures/draw.py stabilizers --sweep 0,16,64 ckpt=... budgets=[128] out=runs/figures

Words of the form key=value are those of `locret-eval`. A figure goes to OUT/figures as PNG and SVG; the rows that it
answers go to OUT/studies/NAME, so that a second call is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import agreement
import attention
import patterns
import sweeps
from matplotlib.figure import Figure
from study import Study

from locret_kit.cli.eval import CONFIG, run_config
from locret_kit.cli.eval_setup import load_parts, load_setup
from locret_kit.config.eval_options import load_eval_config
from locret_kit.evals.figures.style import draw
from locret_kit.evals.tasks import find_tasks
from locret_kit.files import write_json
from locret_kit.naming import first_line


@dataclass(frozen=True)
class Kind:
    """One figure."""

    function: Callable[[Study], Figure]
    says: str
    """Caption, with its source."""
    defaults: dict[str, str] = field(default_factory=dict)
    """`locret-eval` settings where the user gives none; one example unless they say otherwise."""
    sweep: tuple[float, ...] = ()
    """Values that the figure varies where the user gives nothing."""


FIGURES = {
    "retained": Kind(
        patterns.retained, "what heads hold over time, by layer and head (Locret, figures 5 and 6)",
        {"policies": "[locret]"},
    ),
    "kept-positions": Kind(
        patterns.kept_positions, "what policies hold after the prompt (NaCl, figure 2)",
        {"policies": "[h2o,tova,nacl]"},
    ),
    "stabilizers": Kind(
        sweeps.stabilizers, "score, hidden-state and importance error by stabilizers (Locret, figure 3)",
        {"policies": "[locret]", "samples": "4"}, (0, 16, 64, 128, 256),
    ),
    "jaccard": Kind(
        agreement.jaccard, "agreement with the full cache's top set by budget (RoCo, figure 2)",
        {"policies": "[score=aas,score=aqas,score=ltas,score=mas]", "samples": "2", "lengths": "[1024]"},
        (0.1, 0.3, 0.5, 0.7, 0.9),
    ),
    "persistence": Kind(
        attention.persistence, "how the deviation of attention settles (RoCo, figure 3)", {"lengths": "[1024]"}
    ),
    "sparsity": Kind(
        attention.sparsity, "attention by length of the text (NaCl, figures 2d and 6)", {"lengths": "[1024]"}
    ),
    "scope-size": Kind(
        sweeps.scope_size, "score by the scope's size and kind (RoCo, figure 4)",
        {"policies": "[roco]", "samples": "4"}, (0.1, 0.3, 0.5, 0.7),
    ),
    "concentration": Kind(attention.concentration, "attention concentration by head (Ada-KV, figure 2)"),
    "loss-bound": Kind(
        attention.loss_bound, "bound on the eviction loss, uniform and adaptive (Ada-KV, figure 3)",
        {"policies": "[score=window(kernel=1),score=window(kernel=1) allocation=adaptive(1)]"},
    ),
    "budget-split": Kind(
        sweeps.budget_split, "score by the share of representatives (KVCrush, figure 5)",
        {"policies": "[h2o]", "samples": "4"}, (0.0, 0.1, 0.25, 0.5, 0.75, 0.9),
    ),
    "proxy-share": Kind(
        sweeps.proxy_share, "score by the share of the prompt whose queries are proxies (NaCl, figure 5, middle)",
        {"policies": "[nacl]", "samples": "4", "one_shot": "true"}, (0.0, 0.05, 0.1, 0.3, 1.0),
    ),
    "random-share": Kind(
        sweeps.random_share, "score by the share of the budget that is drawn (NaCl, figure 5, right)",
        {"policies": "[nacl]", "samples": "4", "one_shot": "true"}, (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0),
    ),
}  # fmt: skip


def study_of(name: str, args: argparse.Namespace, words: list[str]) -> Study:
    """Backbone, heads and texts of a figure."""
    defaults = {"tasks": "passkey", "samples": "1", **FIGURES[name].defaults}
    given = {word.partition("=")[0] for word in words}
    config = load_eval_config([f"{key}={value}" for key, value in defaults.items() if key not in given] + words)
    out = Path(config.out) / "studies" / name
    parts = load_parts(config)
    sweep = args.sweep
    if sweep is None:
        sweep = [x for x in FIGURES[name].sweep if name != "stabilizers" or x < config.budgets[0]]
    if FIGURES[name].function.__module__ == "sweeps":  # these keep rows
        write_json(out / CONFIG, run_config(replace(config, out=str(out)), parts))
    return Study(
        setup=load_setup(config, parts),
        tasks=find_tasks(config.tasks, haystacks=config.haystacks, data=config.data, samples=config.samples),
        policies=config.policies, budgets=config.budgets, lengths=config.lengths, samples=config.samples, out=out,
        sweep=sweep, layers=args.layers, heads=args.heads,
    )  # fmt: skip


def floats(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 after an error said in one line."""
    listed = "\n".join(f"  {name:<16} {kind.says}" for name, kind in FIGURES.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"figures:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=FIGURES, metavar="NAME")
    parser.add_argument(
        "--sweep", type=floats, metavar="X,X,...", help="what the figure varies: shares, or stabilizers"
    )
    parser.add_argument(
        "--layers", type=integers, metavar="N,...", default=[], help="layers to show (default: up to four)"
    )
    parser.add_argument(
        "--heads", type=integers, metavar="N,...", default=[], help="key/value heads to show (default: up to four)"
    )
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of locret-eval; out=FOLDER is needed")
    args = parser.parse_intermixed_args(argv)
    try:
        study = study_of(args.name, args, args.words)
        paths = draw(FIGURES[args.name].function, study, study.out.parents[1] / "figures", args.name)
    except (ValueError, OSError, ImportError) as error:
        print(f"draw.py: {first_line(error)}", file=sys.stderr)
        return 1
    print("\n".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
