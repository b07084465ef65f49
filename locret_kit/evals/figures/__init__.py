"""Every figure by name: what it is drawn from, and its settings where none are given.

A figure is one function that returns a matplotlib figure: of rows (`results`), of training curves (`curves`), or of a
`Study`, which runs a backbone. To add one, write the function and name it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...naming import nearest


@dataclass(frozen=True)
class Kind:
    """One figure."""

    function: str
    """``module.function`` below this package; imported when it is drawn."""
    source: str
    """'rows', 'curves' or 'model'."""
    says: str
    """What it shows, for the list of figures."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Settings of a 'model' figure, as the command line gives them, where the user gives none."""
    answers: bool = False
    """Whether it answers examples and keeps their rows, so that a second call is quick."""

    def load(self) -> Callable[[Any], Any]:
        """The function, which takes rows, a folder or a `Study`."""
        from importlib import import_module

        module, name = self.function.split(".")
        return getattr(import_module(f".{module}", __name__), name)


SHARES = "[0.1,0.3,0.5,0.7,0.9]"
FIGURES: dict[str, Kind] = {
    "score-budget": Kind("results.score_budget", "rows", "score against budget"),
    "score-length": Kind("results.score_length", "rows", "score against prompt length"),
    "needle-grid": Kind("results.needle_grid", "rows", "score by the needle's depth and the prompt's length"),
    "cost": Kind("results.cost", "rows", "memory and tokens a second against prompt length"),
    "training-curves": Kind("curves.training_curves", "curves", "loss and recall of a training run (Locret, figure 7)"),
    "retained": Kind(
        "patterns.retained", "model", "what heads hold over time, by layer and head (Locret, figures 5 and 6)",
        {"policies": "[locret]", "samples": "1"},
    ),
    "kept-positions": Kind(
        "patterns.kept_positions", "model", "what policies hold behind the prompt (NaCl, figure 2)",
        {"policies": "[h2o,tova,nacl]", "samples": "1"},
    ),
    "stabilizers": Kind(
        "sweeps.stabilizers", "model", "score, hidden-state and importance error by stabilizers (Locret, figure 3)",
        {"policies": "[locret]", "samples": "4", "sweep": "[0,16,64,128,256]"}, answers=True,
    ),
    "jaccard": Kind(
        "agreement.jaccard", "model", "agreement with the full cache's top set by budget (RoCo, figure 2)",
        {"policies": "[score=aas,score=aqas,score=ltas,score=mas]", "sweep": SHARES, "samples": "2"},
    ),
    "persistence": Kind(
        "attention.persistence", "model", "how the deviation of attention settles (RoCo, figure 3)",
        {"samples": "1", "lengths": "[1024]"},
    ),
    "scope-size": Kind(
        "sweeps.scope_size", "model", "score by the scope's size and kind (RoCo, figure 4)",
        {"policies": "[roco]", "sweep": "[0.1,0.3,0.5,0.7]", "samples": "4"}, answers=True,
    ),
    "concentration": Kind(
        "attention.concentration", "model", "attention concentration by head (Ada-KV, figure 2)", {"samples": "1"}
    ),
    "loss-bound": Kind(
        "attention.loss_bound", "model", "bound on the eviction loss, uniform and adaptive (Ada-KV, figure 3)",
        {"policies": "[score=window(kernel=1),score=window(kernel=1) allocation=adaptive(1)]", "samples": "1"},
    ),
    "budget-split": Kind(
        "sweeps.budget_split", "model", "score by the share of representatives (KVCrush, figure 5)",
        {"policies": "[h2o]", "sweep": "[0.0,0.1,0.25,0.5,0.75,0.9]", "samples": "4"}, answers=True,
    ),
}  # fmt: skip


def find_figure(name: str) -> Kind:
    """The figure of a name.

    Raises:
        ValueError: there is none; suggests the nearest.
    """
    if name not in FIGURES:
        raise ValueError(f"figure {name!r} is unknown.{nearest(name, FIGURES)} Known: {', '.join(FIGURES)}")
    return FIGURES[name]


def draw(name: str, source: Any, folder: Path) -> list[Path]:
    """Draw a figure of rows, of a training run's folder, or of a `Study`; the files written, ``NAME.png`` and ``NAME.svg``.

    Raises:
        ValueError: an unknown figure, or nothing to draw; says what is missing. OSError: a file cannot be written.
        ImportError: matplotlib is missing.
    """
    kind = find_figure(name)
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: pip install 'locret-kit[eval]'") from error

    from .style import RC, save

    with matplotlib.rc_context(RC):
        return save(kind.load()(source), folder, name)
