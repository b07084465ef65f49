"""RULER's tasks, made to any length: needles, variable tracking, common words, frequent words. And InfiniteBench's R.KV and
Math.Find, likewise.

Source: github.com/NVIDIA/RULER, scripts/data/synthetic (construction and prompts), scripts/eval (scoring). Differences:
real text comes from ``haystacks`` instead of the essays, and words from `words` instead of the package wonderwords. A
single needle has a given depth. The example in front of variable tracking has five lines of noise. And
github.com/OpenBMB/InfiniteBench, data/construct_synthetic_dataset.py and src/prompt.py (those for open models).
"""

import itertools
import math
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from ...samples.haystack import NOISE, TooShort, next_start, ring, starts
from ..metrics import Answer
from .document_tasks import read_table
from .task import Example, Task, count_ids, span_of, spread_depth, wrap

# ---- prompts that are fitted to a length, and InfiniteBench's two -----------------------------------------------------


TOLERANCE = 0.01
TRIES = 400


LIST_MAX = 99
RANKS = ("", "second ", "third ")
FINDS = [*(f"{rank}{end} number" for end in ("largest", "smallest") for rank in RANKS), "median number"]


@dataclass(frozen=True)
class Draft:
    """A prompt's text before it is wrapped, and its answer."""

    text: str
    answer: Answer
    depth: float | None = None
    prefix: str = ""
    """Beginning of the answer."""
    context: str = ""
    """The part of the text that is asked about; '' where it does not say."""


Build = Callable[[Example, random.Random, int], Draft]
"""Makes a draft of n items for a request."""


def fit(request: Example, chat: bool, name: str, build: Callable[[random.Random, int], Draft], least: int) -> Draft:
    """``build(rng, n)`` for the ``n`` whose prompt has the requested length, or at most 1% fewer tokens.

    One item may be longer than 1%. Then other random items are tried, with a further number in the generator's seed,
    until the total fits. The result depends only on the arguments.

    Args:
        build: makes a candidate with ``n`` items; more items make a longer prompt. least: the smallest useful ``n``.

    Raises:
        TooShort: the fixed parts are longer than the length. ValueError: no candidate is near enough.
    """
    length, seed = request.length, f"{name}:{request.length}:{request.sample}:{request.seed}"

    def measured(salt: int, n: int) -> tuple[Draft, int]:
        draft = build(random.Random(f"{seed}|{salt}"), n)
        return draft, count_ids(request.tokenizer, *wrap(request, draft.text, draft.prefix, chat=chat))

    smallest = measured(0, least)[1]
    if smallest > length:
        raise TooShort(length, smallest)
    tolerance = max(1, int(TOLERANCE * length))
    n, per_item = least, max(1.0, (measured(0, 2 * least + 8)[1] - smallest) / (least + 8))
    n = max(least, least + int((length - smallest) / per_item))
    for salt in range(TRIES):
        low, high = least, None
        for _ in range(24):
            candidate, size = measured(salt, n)
            if length - tolerance <= size <= length:
                return candidate
            low, high = (n, high) if size <= length else (low, n)
            step = int((length - size) / per_item)
            guess = n + (step or (1 if size <= length else -1))
            if high is not None:
                if high - low <= 1:
                    break
                guess = min(guess, high - 1)
            n = max(guess, low + 1 if size <= length else low)
        n = low
    raise ValueError(f"length={length} is too small to be met within 1% by this task's items")


def synthetic_task(
    name: str, build: Build, metric: str, max_new_tokens: int, haystack: str = "-", *, seed: str = "", least: int = 1,
    begins_alike: bool = False,
) -> Task:  # fmt: skip
    """A task whose draft ``build(request, rng, n)`` is fitted to the length asked for, see `fit`."""

    def make(request: Example) -> Example:
        chat = request.wants_chat(False)
        draft = fit(request, chat, seed or name, partial(build, request), least)
        prompt, special = wrap(request, draft.text, draft.prefix, chat=chat)
        text = span_of(prompt, draft.context) if draft.context else None
        return replace(request, prompt=prompt, answer=draft.answer, special=special, depth=draft.depth, text=text)

    return Task(name, make, metric, max_new_tokens, haystack, begins_alike=begins_alike)


def random_uuid(rng: random.Random) -> str:
    """A version-4 UUID from the generator's bits."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _key_values(request: Example, rng: random.Random, n: int) -> Draft:
    """A JSON object of random identifiers; the value of one key is asked for."""
    pairs = [(random_uuid(rng), random_uuid(rng)) for _ in range(n)]
    asked = min(n - 1, int(spread_depth(request.sample) * n))
    body = ", ".join(f'"{key}": "{value}"' for key, value in pairs)
    return Draft(PROMPTS["kv"].format(body=body, key=pairs[asked][0]), pairs[asked][1], round(asked / max(1, n - 1), 4))


def _find(request: Example, rng: random.Random, n: int) -> Draft:
    """A long list of numbers; its largest, smallest or median one is asked for."""
    which = FINDS[request.sample % len(FINDS)]
    low = rng.randint(0, LIST_MAX // 5) if "smallest" in which or rng.random() < 0.5 else 0
    high = rng.randint(4 * LIST_MAX // 5, LIST_MAX) if "largest" in which or low == 0 else LIST_MAX
    numbers = [rng.randint(low, high) for _ in range(n)]
    return Draft(PROMPTS["find"].format(which=which, numbers=numbers), find(numbers, which))


def find(numbers: list[int], which: str) -> float:
    """The number asked for: the second largest is the largest of those below the largest.

    Raises:
        ValueError: the list has too few different numbers.
    """
    if which == "median number":
        middle = median(numbers)
        return int(middle) if middle == int(middle) else middle
    order = sorted(set(numbers), reverse="largest" in which)
    rank = FINDS.index(which) % len(RANKS)
    if rank >= len(order):
        raise ValueError(f"a list with a {which} must have {rank + 1} different numbers, it has {len(order)}")
    return order[rank]


# ---- RULER's tasks ----------------------------------------------------------------------------------------------------


_WORDS = read_table("words")
ADJECTIVES, NOUNS, VERBS = (tuple(_WORDS[name].split()) for name in ("adjectives", "nouns", "verbs"))
PROMPTS = _WORDS["prompts"]


def distinct(rng: random.Random, n: int) -> list[str]:
    """``n`` different words in random order; where there are not enough, words run together ("rivergate").

    Raises:
        ValueError: more words are asked for than pairs of nouns give.
    """
    words = list(dict.fromkeys((*NOUNS, *ADJECTIVES, *VERBS)))
    if n <= len(words):
        return rng.sample(words, n)
    pairs = sorted({a + b for a in NOUNS for b in NOUNS}.difference(words))
    if n - len(words) > len(pairs):
        raise ValueError(f"n={n} must be at most {len(words) + len(pairs)} different words")
    chosen = words + rng.sample(pairs, n - len(words))
    rng.shuffle(chosen)
    return chosen


SENTENCES = tuple(sentence.rstrip(".") + "." for sentence in NOISE.strip().split(". "))
DEPTHS = 40
"""Positions in a text for several needles."""
UNIT = 6
"""Characters of real text that count as one item."""
COMMON = 10
"""Common words that are asked for."""
SHOWN_VALUE = "12345"
"""The value that the variables of 'ruler.vt' have in the chain that is shown with its answer, and there alone."""


@dataclass(frozen=True)
class Niah:
    """One of RULER's needle tasks. Kinds of keys and values: words, numbers, uuids."""

    name: str
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1
    own_haystack: bool = False
    """The haystack is made of further needles."""


NIAHS = (
    Niah("ruler.niah_single"),  # niah_single_1 over noise, niah_single_2 over text
    Niah("ruler.niah_single_uuid", values="uuids"),  # niah_single_3
    Niah("ruler.niah_multikey", n_keys=4),  # niah_multikey_1
    Niah("ruler.niah_multikey_line", own_haystack=True),  # niah_multikey_2
    Niah("ruler.niah_multikey_uuid", keys="uuids", values="uuids", own_haystack=True),  # niah_multikey_3
    Niah("ruler.niah_multivalue", n_values=4),
    Niah("ruler.niah_multiquery", n_keys=4, n_queries=4),
)


def niah_task(niah: Niah, haystack: str, text: str | None) -> Task:
    """Sentences such as "One of the special magic numbers for calm-river is: 1234567." in a haystack.

    ``text`` None is RULER's noise.
    """
    alone = niah.n_keys * niah.n_values == 1

    def build(request: Example, rng: random.Random, n: int) -> Draft:
        draw = _Draw(rng)
        lines = _noise(n)
        if niah.own_haystack:
            lines = [_needle(niah, draw.one(niah.keys), draw.one(niah.values)) for _ in range(n)]
        body = "\n".join(lines) if text is None or niah.own_haystack else _piece(rng, text, n)
        draw.avoid = body
        keys = [draw.one(niah.keys) for _ in range(niah.n_keys)]
        values = {key: [draw.one(niah.values) for _ in range(niah.n_values)] for key in keys}
        needles = [_needle(niah, key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        places = [spread_depth(request.sample)] if alone else _places(rng, len(needles))
        context, depths = insert(body, needles, places)
        asked = rng.sample(keys, niah.n_queries)
        question, prefix = _wording(niah, asked, context)
        answer = [value for key in asked for value in values[key]]
        return Draft(question, answer, round(depths[0], 4) if alone else None, prefix, context)

    return synthetic_task(
        niah.name, build, "has_all", 128, haystack, seed=f"{niah.name}:{haystack}",
        begins_alike=text is None and not niah.own_haystack,
    )  # fmt: skip


def variable_tracking_task(haystack: str, text: str | None, hops: int = 4) -> Task:
    """A chain "VAR B = VAR A": all variables that have the first one's value are asked for."""

    def build(request: Example, rng: random.Random, n: int) -> Draft:
        draw = _Draw(rng)
        draw.used.add(SHOWN_VALUE)
        example = _chain(draw, "\n".join(_noise(5 * len(SENTENCES))), hops, SHOWN_VALUE)
        body = "\n".join(_noise(n)) if text is None else _piece(rng, text, n)
        draw.avoid = body
        task = _chain(draw, body, hops, draw.one("values"))
        shown = f"{example.text} {example.prefix} {' '.join(example.answer)}\n\n"
        return Draft(shown + task.text, task.answer, None, task.prefix)

    return synthetic_task("ruler.vt", build, "has_all", 30, haystack, seed=f"ruler.vt:{haystack}")


def _common_words(request: Example, rng: random.Random, n: int) -> Draft:
    """A numbered list of words, ten of them more frequent than the others."""
    (n_shown, often, seldom), frequencies = ((20, 3, 1), (6, 1)) if request.length < 4096 else ((40, 10, 3), (30, 3))
    words = distinct(rng, n_shown + COMMON + n)
    shown = _word_list(rng, words[:n_shown], often, seldom)
    task = _word_list(rng, words[n_shown:], *frequencies)
    listed = " ".join(f"{i}. {word}" for i, word in enumerate(shown.answer, 1))
    return Draft(f"{shown.text} {shown.prefix} {listed}\n{task.text}", task.answer, None, task.prefix)


def _frequent_words(request: Example, rng: random.Random, n: int) -> Draft:
    """Coded words whose frequency falls with the square of their rank; the first three after the dots are asked for."""
    draw = _Draw(rng)
    vocabulary = ["...", *(draw.one("codes") for _ in range(max(8, request.length // 50)))]
    zeta = math.pi**2 / 6
    counts = [int(n / (rank**2 * zeta)) for rank in range(1, len(vocabulary) + 1)]
    words = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    rng.shuffle(words)
    text, prefix = PROMPTS["fwe"]
    return Draft(text.format(words=" ".join(words)), vocabulary[1:4], None, prefix)


# ---- parts ---------------------------------------------------------------------------------------------------------


class _Draw:
    """Random keys and values, none twice and none that the text to avoid has already."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.used, self.avoid = rng, set[str](), ""
        self._make: dict[str, Callable[[], str]] = {
            "words": lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}",
            "numbers": lambda: str(rng.randint(10**6, 10**7 - 1)),
            "uuids": lambda: random_uuid(rng),
            "names": lambda: "".join(rng.choices(string.ascii_uppercase, k=5)),
            "values": lambda: str(rng.randint(10000, 99999)),
            "codes": lambda: "".join(rng.choices(string.ascii_lowercase, k=6)),
        }

    def one(self, kind: str) -> str:
        while (made := self._make[kind]()) in self.used or made in self.avoid:
            pass
        self.used.add(made)
        return made


def _needle(niah: Niah, key: str, value: str) -> str:
    return f"One of the special magic {niah.values} for {key} is: {value}."


def _wording(niah: Niah, asked: Sequence[str], context: str) -> tuple[str, str]:
    """RULER's prompt and answer prefix; one value is asked for in the singular."""
    one = niah.n_queries * niah.n_values == 1
    kind = niah.values[:-1] if one else niah.values
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    text, prefix = PROMPTS["niah" if one else "niahs"]
    return text.format(kind=kind, context=context, query=query), prefix.format(kind=kind, query=query)


def _noise(n: int) -> list[str]:
    """``n`` sentences of RULER's noise, five a line."""
    lines = [" ".join(SENTENCES)] * (n // len(SENTENCES))
    return [*lines, " ".join(SENTENCES[: n % len(SENTENCES)])] if n % len(SENTENCES) else lines


def _piece(rng: random.Random, text: str, n: int) -> str:
    """``n`` units of a text, from a random line or sentence on, to the end of a word; goes on at the beginning."""
    start, size = next_start(text, rng.randrange(len(text))), UNIT * n
    piece = ring(text, start, size)
    return piece[: max(piece.rfind(" "), piece.rfind("\n"))].rstrip() if size > UNIT else piece


def _places(rng: random.Random, n: int) -> list[float]:
    """Ascending different depths within [0, 1]."""
    return sorted(place / (DEPTHS - 1) for place in rng.sample(range(DEPTHS), n))


def insert(body: str, sentences: Sequence[str], depths: Sequence[float]) -> tuple[str, list[float]]:
    """The body with each sentence at the line or sentence start nearest to its depth; and the depths they have."""
    places = [*starts(body), len(body)]
    at = [min(places, key=lambda place: abs(place - depth * len(body))) for depth in depths]
    for place, _, sentence in sorted(zip(at, range(len(at)), sentences, strict=True), reverse=True):
        before, after = body[:place], body[place:]
        if before and not before[-1].isspace():
            before += "\n"
        body = f"{before}{sentence}{' ' if before.endswith(' ') else chr(10)}{after}"
    return body, [place / max(1, places[-1]) for place in at]


def _chain(draw: _Draw, body: str, hops: int, value: str) -> Draft:
    names = [draw.one("names") for _ in range(hops + 1)]
    steps = [f"VAR {names[0]} = {value}.", *(f"VAR {b} = VAR {a}." for a, b in itertools.pairwise(names))]
    context, _ = insert(body, steps, _places(draw.rng, len(steps)))
    text, prefix = (part.format(context=context, value=value, names=len(names)) for part in PROMPTS["vt"])
    return Draft(text, names, None, prefix)


def _word_list(rng: random.Random, words: Sequence[str], often: int, seldom: int) -> Draft:
    common = list(words[:COMMON])
    listed = common * often + list(words[COMMON:]) * seldom
    rng.shuffle(listed)
    context = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
    text, prefix = PROMPTS["cwe"]
    return Draft(text.format(context=context), common, None, prefix)


STANDALONE_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        synthetic_task("R.KV", _key_values, "has_word", 50),
        synthetic_task("Math.Find", _find, "equal_number", 4, least=8),
        *(niah_task(niah, "-", None) for niah in NIAHS if niah.own_haystack),
        synthetic_task("ruler.cwe", _common_words, "has_all", 120),
        # Fewer words: the third and the fourth may be as many.
        synthetic_task("ruler.fwe", _frequent_words, "has_all", 50, least=73),
    )
}
"""Synthetic tasks that make all of their text."""
