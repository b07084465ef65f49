"""Pages that shade a text by what was kept of it: what they have in common, and the page of one text."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
from jinja2 import Environment, PackageLoader


def environment() -> Environment:
    """The templates of this folder; they escape all text."""
    return Environment(loader=PackageLoader(__package__, ""), autoescape=True)


def script_data(value: object) -> str:
    """JSON for a script element, which nothing in it can end."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def kept_page(title: str, lead: str, texts: Sequence[str], positions: Sequence[Sequence[np.ndarray]], seen: int) -> str:
    """A page of one text, page by page, shaded by the layers and heads that hold each token; it needs no other file.

    Args:
        texts: of the tokens. positions: held by each layer and key/value head, ascending. seen: tokens that were read into the
            cache; those after them are read with each question.
    """
    gaps = [[np.diff(row, prepend=0).tolist() for row in heads] for heads in positions]
    data = script_data({"texts": list(texts), "kept": gaps, "seen": seen})
    return environment().get_template("kept.html").render(title=title, lead=lead, data=data)
