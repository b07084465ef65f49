"""Facts to hide in synthetic samples, each with its question and answer.

A fact's template is (kind of value, statement, question, first words of the answer); {v} is the value, {n} a name,
{w} a thing, {p} a place, {r} a project, {k} a key. To add one, add a line to ``wording.yaml``: to ``facts``, which are
trained on, or to ``held_facts``, which are for validation alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import wording
from .wording import COLOURS, HELD_QUOTES, JOBS, MONTHS, NAMES, PLACES, PROJECTS, QUOTES, THINGS, WORDS

Template = tuple[str, str, str, str]


def _template(kind: str, what: str, *rest: str) -> Template:
    """The template of a line of ``wording.yaml``: whole, or of "The ... is {v}.", whose answer may say ``rest`` instead."""
    if len(rest) == 2:
        return kind, what, *rest
    return kind, f"The {what} is {{v}}.", f"What is the {what}?", f"The {rest[0] if rest else what} is"


FACTS: tuple[Template, ...] = tuple(_template(*line) for line in wording.FACTS)
HELD_FACTS: tuple[Template, ...] = tuple(_template(*line) for line in wording.HELD_FACTS)


@dataclass(frozen=True)
class Fact:
    """One fact with its question and answer."""

    statement: str
    question: str
    prefix: str
    """First words of the full-sentence answer, without a blank at the end."""
    value: str


def make_fact(rng: random.Random, templates: Sequence[Template] = FACTS) -> Fact:
    """A random fact; said a second time at once in half of the cases."""
    kind, statement, question, prefix = rng.choice(templates)
    names = {
        "n": rng.choice(NAMES),
        "w": rng.choice(THINGS),
        "p": rng.choice(PLACES),
        "r": rng.choice(PROJECTS),
        "k": f"{rng.choice(WORDS)}_{rng.randrange(1000)}",
    }
    value = make_value(kind, rng)
    said, first = (part.format(v=value, **names) for part in (statement, prefix))
    if rng.random() < 0.5:
        said += rng.choice((" Remember it. ", " ", " Again: ")) + _again(first, value, said, rng)
    return Fact(said, question.format(**names), first, value)


def make_value(kind: str, rng: random.Random) -> str:
    """A random value; `kind` as in `FACTS`."""

    def letters(alphabet: str, n: int) -> str:
        return "".join(rng.choice(alphabet) for _ in range(n))

    drawn: dict[str, Callable[[], str]] = {
        "digits5": lambda: letters("0123456789", 5),
        "digits": lambda: letters("0123456789", rng.randint(4, 12)),
        "number": lambda: str(rng.randrange(10, 100000)),
        "code": lambda: letters("ABCDEFGHJKLMNPQRSTUVWXYZ", rng.randint(2, 4)) + "-" + str(rng.randint(10, 99999)),
        "hex": lambda: letters("0123456789abcdef", rng.choice((8, 12, 16))),
        "uuid": lambda: "-".join(letters("0123456789abcdef", n) for n in (8, 4, 4, 4, 12)),
        "word": lambda: f"{rng.choice(WORDS)}{rng.choice(('', '-', ' '))}{rng.choice(WORDS)}",
        "words": lambda: ", ".join(rng.sample(WORDS, 3)),
        "price": lambda: f"{rng.randrange(2, 5000)}{rng.choice((' euros', ' dollars', ' crowns'))}",
        "date": lambda: f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1900, 2040)}",
        "time": lambda: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}",
    }
    listed = {"job": JOBS, "name": NAMES, "place": PLACES, "colour": COLOURS, "quote": QUOTES, "saying": HELD_QUOTES}
    return drawn[kind]() if kind in drawn else rng.choice(listed[kind])


def _again(prefix: str, value: str, said: str, rng: random.Random) -> str:
    """The second saying: turned round where grammar allows, else the answer's words or the same words."""
    if prefix.startswith("The ") and prefix.endswith(" is") and rng.random() < 0.6:
        return f"{value} is the {prefix[4:-3]}."
    return rng.choice((said, f"{prefix} {value}."))
