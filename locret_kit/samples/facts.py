"""Facts to hide in synthetic samples, each with its question and answer.

A fact's template is (kind of value, statement, question, first words of the answer); {v} is the value, {n} a name,
{w} a thing, {p} a place, {r} a project, {k} a key. To add one, add a line to `FACTS`, which is trained on, or to `HELD_FACTS`,
which is for validation alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .wording import COLOURS, HELD_QUOTES, JOBS, MONTHS, NAMES, PLACES, PROJECTS, QUOTES, THINGS, WORDS

Template = tuple[str, str, str, str]


def _the(kind: str, what: str, short: str | None = None) -> Template:
    """The template of "The ... is {v}."; the answer may say ``short`` instead of ``what``."""
    return kind, f"The {what} is {{v}}.", f"What is the {what}?", f"The {short or what} is"


FACTS: tuple[Template, ...] = (
    _the("digits5", "pass key"),
    _the("digits", "sequence of digits"),
    _the("digits", "secret number"),
    (
        "digits",
        "One of the special magic numbers for {w} is: {v}.",
        "What is the special magic number for {w}?",
        "The special magic number for {w} is",
    ),
    ("digits", "Please remember this number: {v}.", "Which number should be remembered?", "The number to remember is"),
    _the("digits", "telephone number of {n}"),
    _the("digits", "account number of {n}", "account number"),
    _the("digits", "combination of the safe"),
    (
        "digits",
        "The serial number on the {w} reads {v}.",
        "Which serial number does the {w} have?",
        "The serial number of the {w} is",
    ),
    ("digits", "Your order has the tracking number {v}.", "What is the tracking number?", "The tracking number is"),
    ("digits", "{n} lives in room {v}.", "In which room does {n} live?", "{n} lives in room"),
    ("digits", "To enter the building, dial {v}.", "What must be dialled to enter the building?", "One must dial"),
    (
        "digits",
        "The lottery ticket of {n} has the number {v}.",
        "What number is on the lottery ticket of {n}?",
        "The number on the ticket is",
    ),
    ("digits", "Case file {v} was opened by {n}.", "Which case file did {n} open?", "{n} opened case file"),
    _the("code", "access code for {p}", "access code"),
    _the("code", "Wi-Fi password at {p}", "Wi-Fi password"),
    _the("code", "booking reference of {n}", "booking reference"),
    (
        "code",
        "The licence plate of the car {n} drives is {v}.",
        "What is the licence plate of the car of {n}?",
        "The licence plate is",
    ),
    ("code", "Use the voucher {v} before the end of the month.", "Which voucher should be used?", "The voucher is"),
    ("code", "Flight {v} leaves for Lisbon in the evening.", "Which flight leaves for Lisbon?", "The flight is"),
    ("hex", "session_{k} = {v}", "What is the value of session_{k}?", "The value of session_{k} is"),
    ("uuid", '"{k}": "{v}"', 'What is the value of the key "{k}"?', 'The value of "{k}" is'),
    _the("uuid", "identifier of the {w}", "identifier"),
    _the("hex", "checksum of archive {k}", "checksum"),
    ("number", "{k}={v}", "What is {k} set to?", "{k} is set to"),
    _the("word", "password"),
    _the("word", "magic word of {n}", "magic word"),
    _the("word", "code name of the meeting", "code name"),
    ("words", "The three words to remember are {v}.", "What are the three words to remember?", "The three words are"),
    ("words", "The recovery phrase of {n} is: {v}.", "What is the recovery phrase of {n}?", "The recovery phrase is"),
    ("job", "{n} works as a {v}.", "What does {n} do for a living?", "{n} works as a"),
    ("job", "Everyone at {p} knows {n}, the {v}.", "What is the profession of {n}?", "{n} is a"),
    ("name", "The director of project {r} is {v}.", "Who directs project {r}?", "The director of project {r} is"),
    ("name", "The {w} belongs to {v}.", "Who owns the {w}?", "The {w} belongs to"),
    ("name", "The winner of the chess evening at {p} was {v}.", "Who won the chess evening?", "The winner was"),
    ("place", "{n} will wait at {v}.", "Where will {n} wait?", "{n} will wait at"),
    (
        "place",
        "The meeting about project {r} takes place at {v}.",
        "Where is the meeting about project {r}?",
        "The meeting takes place at",
    ),
    ("place", "The {w} was left at {v}.", "Where was the {w} left?", "The {w} was left at"),
    ("colour", "The {w} of {n} is {v}.", "What colour is the {w} of {n}?", "The colour is"),
    ("colour", "Somebody painted the {w} {v}.", "In which colour was the {w} painted?", "The {w} was painted"),
    ("price", "The {w} costs {v}.", "How much does the {w} cost?", "The {w} costs"),
    ("price", "{n} paid {v} for the {w}.", "How much did {n} pay for the {w}?", "{n} paid"),
    _the("price", "budget of project {r}", "budget"),
    ("date", "{n} was born on {v}.", "When was {n} born?", "{n} was born on"),
    _the("date", "deadline of project {r}", "deadline"),
    ("date", "The {w} must be returned by {v}.", "By when must the {w} be returned?", "It must be returned by"),
    ("time", "The train to the coast departs at {v}.", "When does the train to the coast depart?", "It departs at"),
    ("time", "{n} has an appointment at {v}.", "At what time is the appointment of {n}?", "The appointment is at"),
    ("quote", '{n} whispered: "{v}."', "What did {n} whisper?", "{n} whispered that"),
    ("quote", 'On the {w} somebody had written "{v}".', "What was written on the {w}?", "The words were:"),
    (
        "quote",
        "The best thing to do with a {w} in {p} is this: {v}.",
        "What is the best thing to do with a {w} in {p}?",
        "The best thing to do is this:",
    ),
)
HELD_FACTS: tuple[Template, ...] = (
    _the("digits", "extension of the front desk"),
    ("digits", "Locker {v} is kept for {n}.", "Which locker is kept for {n}?", "{n} has locker"),
    (
        "digits5",
        "Whoever calls the lift has to type {v}.",
        "What has to be typed to call the lift?",
        "The code to type is",
    ),
    ("code", "The parcel of {n} is marked {v}.", "How is the parcel of {n} marked?", "The parcel is marked"),
    ("hex", "revision {k} -> {v}", "Which hash does revision {k} have?", "Revision {k} has the hash"),
    _the("word", "watchword at {p}", "watchword"),
    ("words", "{n} recited three words: {v}.", "Which three words did {n} recite?", "{n} recited"),
    ("job", "Before the war, {n} was a {v}.", "What was {n} before the war?", "{n} was a"),
    ("name", "The keys to {p} are with {v}.", "Who has the keys to {p}?", "The keys are with"),
    ("place", "{n} hid the {w} near {v}.", "Where did {n} hide the {w}?", "{n} hid it near"),
    ("price", "Repairing the {w} came to {v}.", "What did it cost to repair the {w}?", "The repair came to"),
    ("date", "Project {r} was called off on {v}.", "When was project {r} called off?", "It was called off on"),
    ("saying", "{n} used to say that {v}.", "What did {n} use to say?", "{n} used to say that"),
)


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
