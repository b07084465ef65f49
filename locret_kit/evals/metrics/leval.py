"""L-Eval's own rules for closed-ended answers.

Source: github.com/OpenLMLab/LEval, Evaluation/auto_eval.py (what counts as the answer) and em.py (when it is right). Each
function is a metric of `metrics.METRICS`.
"""

from __future__ import annotations

import re

from . import Answer, Extra
from .normalisation import without_articles


def leval_choice(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """Letters of the right options; a part of several right ones is worth 0.25 (L-Eval's QuALITY, TPO, Coursera).

    ``extra['several']``: more than one option may be right (Coursera).
    """
    wanted = re.sub("[^A-D]", "", str(answer).split()[0]) or "A"
    return {"accuracy": _exact(_leval_letters(output, several=bool(extra.get("several"))), wanted)}


def _exact(given: str, wanted: str) -> float:
    """An answer of letters A to D: 1, or 0.25 for a part of them; else equal as numbers, or contained, spaces and case
    aside. An answer of punctuation alone (an empty list that code prints) counts as letters, as published."""
    letters, wanted_letters = map(without_articles, (given, wanted))
    if set(wanted_letters) <= set("ABCD"):
        return 1.0 if letters == wanted_letters else 0.25 * (set(letters) <= set(wanted_letters))
    try:
        return float(float(given) == float(wanted))
    except ValueError:
        return float(wanted.lower().replace(" ", "") in given.lower().replace(" ", ""))


def _leval_letters(output: str, several: bool) -> str:
    """The letters that an answer names; L-Eval's rules in their order."""
    if not output.strip():
        return "None"
    if output in "ABCD":
        return output
    if not several and (match := re.search("[ABCD]", output)):
        return match.group()
    run = re.match("[ABCD]*", output)
    head = run.group() if run else ""
    if len(head) > 1:
        return "".join(sorted(set(head)))
    rest = output[len(head) :].split("Question")[0]
    letters = set(head) | set(re.sub("[^A-D]", "", "".join(re.findall(r"\s*[A-Z](?=[\s.)])", rest))))
    if not letters and (match := re.search("[ABCD]+", rest)):
        return match.group()
    return "".join(sorted(letters)) or "A"


def leval_match(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """Equal as numbers, else the answer occurs in the output, spaces and case aside (L-Eval's topic retrieval)."""
    return {"match": _exact(output, str(answer))}


def leval_math(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """The number of "The answer is ...", else the first paragraph's last (L-Eval's GSM)."""
    return {"match": _exact(_leval_number(output), _leval_number(str(answer)))}


def _leval_number(text: str) -> str:
    match = re.search(r"The answer is (\S+)", text)
    words = [match.group(1)] if match else text.split("\n\n")[0].split(" ")[::-1]
    word = next((word for word in words if any(map(str.isdigit, word))), "")
    return "".join(filter(str.isdigit, word.split(".")[0]))


def leval_code(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """The printed value stands among the output's last words, or after "the final output" (L-Eval's CodeU)."""
    wanted = _plain_code(str(answer))
    text = _plain_code(output)
    for phrase in ("will be", "of the code", "is", "would be", "the value of", "the result of", "printed"):
        text = text.replace(phrase, "")
    some = len(str(answer).split()) + 3
    behind = text.split("the final output")
    words = re.split(r"\s+", behind[-1])[:some] if len(behind) > 1 else re.split(r"\s+", text)[-some:]
    return leval_match(" ".join(words), wanted, extra)


def _plain_code(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    for old, new in ((",", ""), ("'", ""), ("\\", ""), (".0", ""), ("] [", "]["), ("[ [", "[["), ("] ]", "]]")):
        text = text.replace(old, new)
    return text


def leval_judge(output: str, answer: Answer, extra: Extra) -> dict[str, float]:
    """Loyalty to the document: the first of true and false (L-Eval's SFcition; its second figure, the fact asked for
    without the document, does not depend on the cache and is not measured)."""
    wanted = str(answer).lower().split("[fact:")[0].strip()
    words = output.lower().split("[fact:")[0].split()
    given = next((name for word in words for name in ("true", "false") if name in word), "")
    return {"match": float(given == wanted)}
