"""Endless synthetic samples: facts hidden in real or repetitive text, a question, a short answer.

Sample number `index` depends on (seed, index) and the arguments alone, so any worker can build any sample.
"""

import bisect
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..text.tokens import encode, token_span
from . import Sample, encode_chat
from .haystack import WORDS, cut, starts, take

Template = tuple[str, str, str, str]
"""A fact's: kind of value, statement, question, first words of the answer; {v} is the value, {n} a name, {w} a thing, {p} a
place, {r} a project, {k} a key. To add one, add a line to ``wording.yaml``: to ``facts``, which are trained on, or to
``held_facts``, which are for validation alone."""


def _template(kind: str, what: str, *rest: str) -> Template:
    """The template of a line of ``wording.yaml``: whole, or of "The ... is {v}.", whose answer may say ``rest`` instead."""
    if len(rest) == 2:
        return kind, what, *rest
    return kind, f"The {what} is {{v}}.", f"What is the {what}?", f"The {rest[0] if rest else what} is"


FACTS, HELD_FACTS = (tuple(_template(*line) for line in WORDS[name]) for name in ("facts", "held_facts"))


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
    kinds = {"n": "names", "w": "things", "p": "places", "r": "projects"}
    names = {letter: rng.choice(WORDS[kind]) for letter, kind in kinds.items()}
    names["k"] = f"{rng.choice(WORDS['words'])}_{rng.randrange(1000)}"
    value = make_value(kind, rng)
    said, first = (part.format(v=value, **names) for part in (statement, prefix))
    if rng.random() < 0.5:
        said += rng.choice((" Remember it. ", " ", " Again: ")) + _again(first, value, said, rng)
    return Fact(said, question.format(**names), first, value)


def make_value(kind: str, rng: random.Random) -> str:
    """A random value of a `kind` in `FACTS`."""
    words = WORDS["words"]

    def letters(alphabet: str, n: int) -> str:
        return "".join(rng.choice(alphabet) for _ in range(n))

    drawn: dict[str, Callable[[], str]] = {
        "digits5": lambda: letters("0123456789", 5),
        "digits": lambda: letters("0123456789", rng.randint(4, 12)),
        "number": lambda: str(rng.randrange(10, 100000)),
        "code": lambda: letters("ABCDEFGHJKLMNPQRSTUVWXYZ", rng.randint(2, 4)) + "-" + str(rng.randint(10, 99999)),
        "hex": lambda: letters("0123456789abcdef", rng.choice((8, 12, 16))),
        "uuid": lambda: "-".join(letters("0123456789abcdef", n) for n in (8, 4, 4, 4, 12)),
        "word": lambda: f"{rng.choice(words)}{rng.choice(('', '-', ' '))}{rng.choice(words)}",
        "words": lambda: ", ".join(rng.sample(words, 3)),
        "price": lambda: f"{rng.randrange(2, 5000)}{rng.choice((' euros', ' dollars', ' crowns'))}",
        "date": lambda: f"{rng.randint(1, 28)} {rng.choice(WORDS['months'])} {rng.randint(1900, 2040)}",
        "time": lambda: f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}",
    }
    return drawn[kind]() if kind in drawn else rng.choice(WORDS["held_quotes" if kind == "saying" else f"{kind}s"])


def _again(prefix: str, value: str, said: str, rng: random.Random) -> str:
    """The second saying: turned round where grammar allows, else the answer's words or the same words."""
    if prefix.startswith("The ") and prefix.endswith(" is") and rng.random() < 0.6:
        return f"{value} is the {prefix[4:-3]}."
    return rng.choice((said, f"{prefix} {value}."))


COPY = 0.1
"""Share of copy tasks among the samples over real text."""
_ANSWER_PREFIXES = ("Answer:", "The answer:", "A:")

REPETITIVE = 0.3
"""Share of the haystacks that repeat a few short sentences."""


@dataclass(frozen=True)
class Wording:
    """The words of samples, their real text aside."""

    facts: Sequence[Template]
    prompts: Sequence[str]
    sentences: Sequence[str]
    """Sentences that repetitive haystacks repeat."""


TRAINING = Wording(FACTS, WORDS["prompts"], WORDS["sentences"])
VALIDATION = Wording(HELD_FACTS, WORDS["held_prompts"], WORDS["held_sentences"])


def synthetic_sample(
    tokenizer, texts: Sequence[str], n_tokens: int, seed: int | str, index: int, wording: Wording = TRAINING
) -> Sample:
    """Sample number `index`: a prompt with one answer, 0.9 to 1.0 times `n_tokens` tokens in all.

    Half of the samples are conversations (`encode_chat`). The others are plain text whose prompt ends with the answer's
    first words ("... The pass key is" -> " 12345.").

    Args:
        texts: real texts to take pieces from.
        n_tokens: upper bound of the sample in tokens.
        wording: `TRAINING` or `VALIDATION`, which have nothing in common.

    Raises:
        ValueError: no text, or an `n_tokens` too small for a question and its facts.
    """
    rng = random.Random(f"{seed}|{index}")
    real = rng.random() >= REPETITIVE
    facts = _facts(rng, wording.facts)
    # Most often all are asked for: of a fact that nobody asks for, no head can know that it may go.
    asked = rng.sample(facts, len(facts) if rng.random() < 0.8 else 1)
    chat, template, copy = rng.random() < 0.5, rng.choice(wording.prompts), real and rng.random() < COPY
    length = rng.random()
    places = [rng.random() for _ in facts]
    question, prefix, answer = _ask(asked, chat, length)

    # 1. what is there without a haystack decides the haystack's size; facts nobody asks for go if there is no room
    while True:
        bare = _finish(tokenizer, template, "\n".join(fact.statement for fact in facts), question, prefix, answer, chat)
        fixed = len(bare.ids) + (150 if copy else 0)
        if fixed <= 0.6 * n_tokens:
            break
        spare = [fact for fact in facts if fact not in asked]
        if copy:
            copy = False
        elif spare:
            facts = [fact for fact in facts if fact is not spare[0]]
        elif len(asked) > 1:
            asked = asked[:1]
            facts = [fact for fact in facts if fact in asked]
            question, prefix, answer = _ask(asked, chat, length)
        else:
            break
    room = n_tokens - fixed - max(4, math.ceil(0.03 * n_tokens))
    if room < 8:
        raise ValueError(f"n_tokens={n_tokens} is too small: question and facts of sample {index} take {fixed} tokens")

    # 2. the haystack: a little more than needed, so that it can be shortened or left longer
    state = rng.getstate()
    size = room
    for _ in range(20):
        rng.setstate(state)  # a second try keeps the place and changes the length alone
        body = (
            cut(rng.choice(texts), tokenizer, size, rng) if real else _repeated(tokenizer, size, wording.sentences, rng)
        )
        context = _hide([fact.statement for fact in facts], places, body, rng)
        if copy and (passage := _passage(context, rng)):
            question, answer = rng.choice(WORDS["copies"]).format(lead=passage[0]), passage[1]
            prefix = None if chat else rng.choice(("The text goes on:", "Answer:", f"{passage[0]}"))
        sample = _finish(tokenizer, template, context, question, prefix, answer, chat)
        if 0.9 * n_tokens <= len(sample.ids) <= n_tokens:
            return sample
        size = max(1, size + math.floor(0.97 * n_tokens) - len(sample.ids))
    raise ValueError(f"n_tokens={n_tokens} is not met within 10% by sample {index}, which has {len(sample.ids)}")


def _facts(rng: random.Random, templates: Sequence[Template]) -> list[Fact]:
    """One to six facts with different questions."""
    facts: dict[str, Fact] = {}
    for _ in range(rng.randint(1, 6)):
        fact = make_fact(rng, templates)
        facts.setdefault(fact.question, fact)
    return list(facts.values())


def _ask(asked: list[Fact], chat: bool, length: float) -> tuple[str, str | None, str]:
    """Question, answer prefix (of a plain prompt, else None) and answer. `length` in [0, 1) picks short or full."""
    question = " ".join(fact.question for fact in asked)
    full = " ".join(f"{fact.prefix} {fact.value}." for fact in asked)
    if len(asked) > 1:  # a list of bare values would leave open which of them comes next
        return (question, None, full) if chat else (question, asked[0].prefix, full[len(asked[0].prefix) + 1 :])
    short = asked[0].value + ("." if length * 10 % 1 < 0.5 else "")
    if chat:
        return question, None, full if length < 0.5 else short
    if length < 0.7:
        return question, asked[0].prefix, full[len(asked[0].prefix) + 1 :]
    return question, _ANSWER_PREFIXES[int(length * 100) % 3], full if length < 0.85 else short


def _finish(
    tokenizer, template: str, context: str, question: str, prefix: str | None, answer: str, chat: bool
) -> Sample:
    """The sample of one prompt and its answer."""
    prompt = re.sub(r"\{([qc])\}", lambda match: question if match[1] == "q" else context, template)
    if chat:
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}])
    if prompt.endswith("Answer:"):
        prompt = prompt[: -len("Answer:")].rstrip()
    prompt = f"{prompt}\n\n{prefix}"
    text = f"{prompt} {answer}"
    ids, offsets = encode(tokenizer, text, special=True)
    return Sample(tuple(ids), (token_span(offsets, len(prompt), len(text)),))


def _repeated(tokenizer, n_tokens: int, sentences: Sequence[str], rng: random.Random) -> str:
    """A few short sentences over and over, in lines or in one paragraph."""
    few = rng.sample(sentences, rng.choice((1, 2, 3, 4, 5, 6)))
    unit = rng.choice((" ", " ", "\n")).join(few) + rng.choice(("\n", "\n", " "))
    return take(unit * (6 * n_tokens // len(unit) + 2), 0, tokenizer, n_tokens)


def _hide(statements: list[str], places: list[float], body: str, rng: random.Random) -> str:
    """`body` with each statement at the line or sentence start nearest to its place (a fraction of the body)."""
    all_starts = starts(body)
    found = (bisect.bisect(all_starts, place * len(body)) for place in places)
    at = [all_starts[min(len(all_starts) - 1, place)] for place in found]
    for statement, position in sorted(zip(statements, at, strict=False), key=lambda pair: -pair[1]):
        before, after = body[:position], body[position:]
        line = not before or before.endswith("\n") or rng.random() < 0.3
        joined = before.rstrip(" ") + "\n" if line and before and not before.endswith("\n") else before
        body = joined + statement + ("\n" if line else " ") + after
    return body


def _passage(context: str, rng: random.Random) -> tuple[str, str] | None:
    """Eight to twelve words of the context that occur once in it, and the 20 to 40 words after them."""
    words = context.split()
    flat = " ".join(words)
    for _ in range(8):
        lead, length = rng.randint(8, 12), rng.randint(20, 40)
        if len(words) < lead + length:
            return None
        at = rng.randrange(len(words) - lead - length + 1)
        start = " ".join(words[at : at + lead])
        if flat.count(start) == 1 and '"' not in start:
            return start, " ".join(words[at + lead : at + lead + length])
    return None
