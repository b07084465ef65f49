"""The wording of synthetic training data: facts to hide, sentences to hide them in, prompts to ask with.

A fact's template is (kind of value, statement, question, first words of the answer); {v} is the value, {n} a name,
{w} a thing, {p} a place. To add one, add a line to `FACTS`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES = [
    "Anna",
    "Weber",
    "Tomas",
    "Priya",
    "Mei",
    "Oluwaseun",
    "Clara",
    "Dmitri",
    "Fatima",
    "Hugo",
    "Ingrid",
    "Jamal",
    "Keiko",
    "Liam",
    "Marta",
    "Nadia",
    "Oscar",
    "Paula",
    "Quentin",
    "Rosa",
    "Samir",
    "Tara",
    "Ulrich",
    "Vera",
    "Wendell",
    "Ximena",
    "Yusuf",
    "Zoe",
    "Albert",
    "Beatrice",
]
THINGS = [
    "bicycle",
    "suitcase",
    "umbrella",
    "lantern",
    "teapot",
    "piano",
    "notebook",
    "kayak",
    "violin",
    "ladder",
    "clock",
    "blanket",
    "mailbox",
    "scarf",
    "telescope",
    "drawer",
    "helmet",
    "curtain",
    "bench",
    "tractor",
    "vase",
    "wallet",
    "kettle",
    "jacket",
]
PLACES = [
    "the old harbour",
    "the north gate",
    "the botanical garden",
    "the railway museum",
    "the bakery on Mill Street",
    "the third floor lobby",
    "the lighthouse",
    "the university library",
    "the town hall steps",
    "the ferry terminal",
    "the rooftop cafe",
    "the stone bridge",
    "the observatory",
    "the flower market",
    "Platform 9",
    "the hotel bar",
]
PROJECTS = [
    "Falcon",
    "Aurora",
    "Granite",
    "Lotus",
    "Meridian",
    "Orchid",
    "Pelican",
    "Saturn",
    "Tundra",
    "Velvet",
    "Walnut",
    "Zephyr",
    "Cobalt",
]
COLOURS = [
    "red",
    "blue",
    "green",
    "yellow",
    "purple",
    "orange",
    "black",
    "white",
    "turquoise",
    "crimson",
    "silver",
    "brown",
    "pink",
    "olive",
]
JOBS = [
    "carpenter",
    "surgeon",
    "baker",
    "pilot",
    "librarian",
    "plumber",
    "violinist",
    "judge",
    "gardener",
    "chemist",
    "welder",
    "translator",
    "dentist",
    "geologist",
    "tailor",
    "beekeeper",
]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
WORDS = [
    "amber",
    "anchor",
    "basil",
    "canyon",
    "cedar",
    "cinder",
    "comet",
    "copper",
    "coral",
    "delta",
    "ember",
    "falcon",
    "fern",
    "flint",
    "harbor",
    "hazel",
    "indigo",
    "ivory",
    "jasper",
    "lagoon",
    "lilac",
    "maple",
    "marble",
    "meadow",
    "nectar",
    "onyx",
    "opal",
    "pepper",
    "pine",
    "quartz",
    "raven",
    "river",
    "saffron",
    "sage",
    "sierra",
    "slate",
    "spruce",
    "thistle",
    "timber",
    "topaz",
    "velvet",
    "violet",
    "willow",
    "winter",
]
QUOTES = [
    "the kettle always whistles twice",
    "never trust a quiet printer",
    "bring the blue folder on Monday",
    "the owls know where the road ends",
    "a good map forgets nothing",
    "we leave before the second bell",
    "salt first, then the lemons",
    "keep the small key under the fern",
    "rain is only late sunshine",
    "the tallest ladder has no shadow",
    "count the windows, not the doors",
    "tomorrow the bridge will open",
]

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

SENTENCES = (
    "The river runs past the mill.",
    "It is cold today.",
    "Birds sing.",
    "A cart rolls by.",
    "The door is open.",
    "Nobody said a word about the weather.",
    "Snow falls on the quiet hills.",
    "One more time.",
    "The bread is warm.",
    "Leaves turn brown and drop to the ground one after another.",
    "Up and down.",
    "The road goes on.",
    "We wait.",
    "A dog sleeps in the shade of the old wall.",
    "The moon is round.",
    "Waves come in and waves go out.",
    "And again.",
    "Trees are tall.",
    "There is nothing to see here.",
    "The bell rings at noon.",
    "The fields are wide and empty.",
    "Someone left the light on in the hall.",
    "Clouds drift over the valley.",
    "Time passes slowly.",
    "The tea is hot.",
    "This line says nothing of interest.",
    "The cat sits on the fence and looks at the street.",
    "Round it goes.",
    "A boat is on the lake.",
    "Stones are hard.",
    "The sand is white and the sea is grey.",
    "Left, then right.",
    "Wind moves the grass.",
    "The fire burns low.",
    "Every day is much like the day before it.",
    "Back to the start.",
)

_INFO = "There is an important info hidden inside a lot of irrelevant text."
PROMPTS = (
    _INFO + " Find it and memorize it. I will quiz you about it.\n\n{c}\n\n{q}",
    "Some facts are hidden in the following text. Remember them.\n\n{c}\n\n{q}",
    "Read the text and answer the question.\n\n{c}\n\nQuestion: {q}",
    "Read the text and answer the question. Be very concise.\n\n{c}\n\nQuestion: {q}\nAnswer:",
    "{c}\n\n{q}",
    "{c}\n\nQuestion: {q}",
    "{c}\n\nBased on the text above: {q}",
    "{c}\n\n---\n\n{q}",
    "Text:\n{c}\n\nTask: {q}",
    "### Document\n{c}\n\n### Question\n{q}",
    "<document>\n{c}\n</document>\n\n{q}",
    "Here is a long document.\n\n{c}\n\nAccording to the document: {q}",
    "{c}\n\nNow tell me: {q}",
    "Below are my notes. I will ask about them later.\n\n{c}\n\nMy question: {q}",
    "Some special information is hidden within the following text. Make sure to memorize it.\n{c}\n{q}",
    "Context:\n{c}\n\nAnswer with the help of the context only. {q}",
    "Study this.\n\n{c}\n\nEnd of the text. {q}",
    "I lost a detail in this text, please help me to find it.\n\n{c}\n\n{q}",
    "```\n{c}\n```\n{q}",
    "You are given a long text.\n\n{c}\n\nWithout explaining anything: {q}",
    "{c}\n\n{q} Answer briefly.",
    "Pay attention to unusual sentences.\n\n{c}\n\n{q}",
    "Article:\n\n{c}\n\nReader's question: {q}",
    # the question before the text too
    "{q}\n\n{c}\n\n{q}",
    "Find out: {q}\n\n{c}\n\nOnce more, the question: {q}",
    "You will be asked this: {q}\n\n{c}\n\n{q}",
    "Question: {q}\n\nText: {c}\n\nQuestion: {q}",
    "Read the text with this question in mind. {q}\n\n{c}\n\nNow answer. {q}",
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
