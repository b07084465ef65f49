"""Facts to hide in synthetic training data, each with its question and answer.

A fact's template is (kind of value, statement, question, first words of the answer); {v} is the value, {n} a name,
{w} a thing, {p} a place, {r} a project, {k} a key. To add one, add a line to `FACTS`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from .wording import COLOURS, JOBS, MONTHS, NAMES, PLACES, PROJECTS, QUOTES, THINGS, WORDS

FACTS = (
    ("digits5", "The pass key is {v}.", "What is the pass key?", "The pass key is"),
    ("digits", "The sequence of digits is {v}.", "What is the sequence of digits?", "The sequence of digits is"),
    ("digits", "The secret number is {v}.", "What is the secret number?", "The secret number is"),
    (
        "digits",
        "One of the special magic numbers for {w} is: {v}.",
        "What is the special magic number for {w}?",
        "The special magic number for {w} is",
    ),
    ("digits", "Please remember this number: {v}.", "Which number should be remembered?", "The number to remember is"),
    (
        "digits",
        "The telephone number of {n} is {v}.",
        "What is the telephone number of {n}?",
        "The telephone number of {n} is",
    ),
    ("digits", "The account number of {n} is {v}.", "What is the account number of {n}?", "The account number is"),
    (
        "digits",
        "The combination of the safe is {v}.",
        "What is the combination of the safe?",
        "The combination of the safe is",
    ),
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
    ("code", "The access code for {p} is {v}.", "What is the access code for {p}?", "The access code is"),
    ("code", "The Wi-Fi password at {p} is {v}.", "What is the Wi-Fi password at {p}?", "The Wi-Fi password is"),
    (
        "code",
        "The booking reference of {n} is {v}.",
        "What is the booking reference of {n}?",
        "The booking reference is",
    ),
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
    ("uuid", "The identifier of the {w} is {v}.", "What is the identifier of the {w}?", "The identifier is"),
    ("hex", "The checksum of archive {k} is {v}.", "What is the checksum of archive {k}?", "The checksum is"),
    ("number", "{k}={v}", "What is {k} set to?", "{k} is set to"),
    ("word", "The password is {v}.", "What is the password?", "The password is"),
    ("word", "The magic word of {n} is {v}.", "What is the magic word of {n}?", "The magic word is"),
    ("word", "The code name of the meeting is {v}.", "What is the code name of the meeting?", "The code name is"),
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
    ("price", "The budget of project {r} is {v}.", "What is the budget of project {r}?", "The budget is"),
    ("date", "{n} was born on {v}.", "When was {n} born?", "{n} was born on"),
    ("date", "The deadline of project {r} is {v}.", "What is the deadline of project {r}?", "The deadline is"),
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


@dataclass(frozen=True)
class Fact:
    """One fact with its question and answer."""

    statement: str
    question: str
    prefix: str
    """First words of the full-sentence answer, without a blank at the end."""
    value: str


def make_fact(rng: random.Random) -> Fact:
    """A random fact; said a second time at once in half of the cases."""
    kind, statement, question, prefix = rng.choice(FACTS)
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

    match kind:
        case "digits5":
            return letters("0123456789", 5)
        case "digits":
            return letters("0123456789", rng.randint(4, 12))
        case "number":
            return str(rng.randrange(10, 100000))
        case "code":
            return letters("ABCDEFGHJKLMNPQRSTUVWXYZ", rng.randint(2, 4)) + "-" + str(rng.randint(10, 99999))
        case "hex":
            return letters("0123456789abcdef", rng.choice((8, 12, 16)))
        case "uuid":
            return "-".join(letters("0123456789abcdef", n) for n in (8, 4, 4, 4, 12))
        case "word":
            return f"{rng.choice(WORDS)}{rng.choice(('', '-', ' '))}{rng.choice(WORDS)}"
        case "words":
            return ", ".join(rng.sample(WORDS, 3))
        case "price":
            return f"{rng.randrange(2, 5000)}{rng.choice((' euros', ' dollars', ' crowns'))}"
        case "date":
            return f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1900, 2040)}"
        case "time":
            return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"
    return rng.choice({"job": JOBS, "name": NAMES, "place": PLACES, "colour": COLOURS, "quote": QUOTES}[kind])


def _again(prefix: str, value: str, said: str, rng: random.Random) -> str:
    """The second saying: turned round where grammar allows, else the answer's words or the same words."""
    if prefix.startswith("The ") and prefix.endswith(" is") and rng.random() < 0.6:
        return f"{value} is the {prefix[4:-3]}."
    return rng.choice((said, f"{prefix} {value}."))
