"""Random answers of every family and form, of words, marks and halves of marks: read whole and with random cuts."""

import random
from copy import copy
from itertools import pairwise

import pytest
import regex
from families import FAMILIES, TOOL, family_tokenizer, read_pieces

from locret_kit.answers.forms import FORMS, answer_form, example
from locret_kit.answers.reader import Reader

SCHEMAS = {"depth": TOOL["function"]["parameters"], "now": {}}
SIGNS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<answer>", "</answer>", "<response>", "</response>", "{", "}", "[", "]", '"',
    "'", "\\", ",", ":", "=", "(", ")", "<", ">", "</", "<|", "\n", " ", "\n\n", "```", "```json\n", "; ",
]  # fmt: skip
STOPS = [[], [], ["\n\n"], ["w1z"], ["z<", "w2z w"]]
CASES = {name: (family_tokenizer, name, "", family.answer) for name, family in FAMILIES.items()}
CASES |= {f"{form.name} {more}": (family_tokenizer, "granite-4", f"{{{{ tools }}}}{form.marks[0]}{more}", "")
          for form in FORMS for more in ("<think></think>", "<answer></answer>")}  # fmt: skip
ANSWERS = 30
"""Random answers of each case."""


def read(make, pieces: list[str]):
    """Events, thoughts, the stop text and its place, and arguments of the calls."""
    reader = make()
    events, calls = read_pieces(reader, pieces), [call.arguments for call in reader.calls]
    return events, reader.thoughts, reader.stop, reader.stopped_at, calls


def new_answer(chance: random.Random, marks: list[str], wholes: list[str]) -> tuple[str, list[str]]:
    """An answer, and the words in it."""
    answer, words = "", list[str]()
    for _ in range(chance.randint(1, 14)):
        kind = chance.random()
        words += [f"w{len(words)}z"] if kind < 0.3 else []
        answer += words[-1] if kind < 0.3 else chance.choice(marks if kind < 0.65 else SIGNS if kind < 0.9 else wholes)
    return answer, words


@pytest.mark.parametrize("case", CASES)
def test_a_random_answer_is_read_the_same_in_whatever_pieces_and_whole(case):
    make, name, template, answer = CASES[case]
    tokenizer = copy(make(name))
    tokenizer.chat_template = template or tokenizer.chat_template
    form, chance = answer_form(tokenizer, tools=True), random.Random(case)
    wholes = [answer, *(example(form.calls, tool, ["place"] * (tool != "now")) for tool in ("depth", "now", "other"))]
    marks = [part for text in wholes for part in regex.findall(r"<\|?[^\s<>]*\|?>|\[/?[A-Z_]+\]|[^\s<>\[\]]+", text)]
    for _ in range(ANSWERS):
        said, words = new_answer(chance, [*marks, *(form.words or ())], wholes)
        thinks, stops = form.thinks and chance.random() < 0.5, chance.choice(STOPS)

        def make_reader(thinks=thinks, stops=stops) -> Reader:
            return Reader(form, SCHEMAS, thinks=thinks, stops=stops)

        whole = read(make_reader, [said])
        for pieces in range(3):
            cuts = sorted(chance.randint(0, len(said)) for _ in range(pieces + 1)) if pieces else range(1, len(said))
            cut = [said[a:b] for a, b in pairwise([0, *cuts, len(said)])]
            assert read(make_reader, cut) == whole, (said, thinks, stops, cut)
        shown = "".join(text for _, text in whole[0])
        assert whole[2] is not None or all(word in shown for word in words), (said, thinks, whole[0])
        if whole[2] is not None:
            assert said[whole[3] :].startswith(whole[2]) and whole[2] not in "".join(
                text for kind, text in whole[0] if kind == "text"
            )
