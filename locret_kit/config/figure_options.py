"""The configurations of ``locret-eval figure`` and ``locret-eval table``. Know no model, import no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt, MinLen

from ..validation import check
from .eval_options import FolderConfig, RowsConfig
from .schema import Command

Inches = Annotated[float, Gt(0)]


@dataclass(kw_only=True)
class Look:
    """The look of a figure; by default that of a page."""

    formats: Annotated[list[Literal["png", "svg", "pdf"]], MinLen(1)] = field(default_factory=lambda: ["png", "svg"])
    """Kinds of files."""
    width: Inches | None = None
    """Inches of the whole figure: 3.3 is a column of many papers, 6.9 their page. Default: by the number of panels."""
    height: Inches | None = None
    """Inches of the whole figure. Default: in proportion to the width."""
    font: Annotated[float, Gt(0)] = 9
    """Points of the text; titles and legends follow."""
    title: str | None = None
    """Title above the panels; 'none' has none. Default: the figure's own."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(kw_only=True)
class FigureConfig(RowsConfig, Look):
    """A figure of rows; an empty list is all."""


@dataclass(kw_only=True)
class SweepConfig(FigureConfig):
    """A sweep: scores of several runs against a setting in which they differ."""

    x: str
    """A setting of the rows, such as 'stabilizers', 'chunk' or 'kv_bits'; or 'budget', 'length' or 'wording'."""
    out: str
    """Folder of folders with rows, a folder for each run; the figure goes to its ``figures/``."""


@dataclass(kw_only=True)
class CurvesConfig(FolderConfig, Look):
    """A figure of a training run."""


@dataclass(kw_only=True)
class TableConfig(RowsConfig):
    """Tables of rows; an empty list is all."""

    format: Literal["markdown", "latex"] = "markdown"
    """'latex' is for the package booktabs, the best of each column in bold."""
    interval: Literal["stderr", "wilson"] = "stderr"
    """'wilson' gives Wilson's 95% interval of a share, which is honest also at 0 and 1, in place of the standard error."""


FIGURE = Command(
    "locret-eval",
    FigureConfig,
    "usage: locret-eval figure NAME out=FOLDER [key=value ...]",
    ("out", "tasks", "haystacks", "policies", "budgets", "lengths", "formats", "width", "height", "title"),
)
SWEEP = Command(
    "locret-eval",
    SweepConfig,
    "usage: locret-eval figure sweep x=SETTING out=FOLDER [key=value ...]",
    ("x", "out", "tasks", "haystacks", "policies", "budgets", "lengths", "formats", "width", "height"),
)
CURVES = Command("locret-eval", CurvesConfig, "usage: locret-eval figure training-curves out=FOLDER [key=value ...]")
TABLE = Command("locret-eval", TableConfig, "usage: locret-eval table out=FOLDER [key=value ...]")
