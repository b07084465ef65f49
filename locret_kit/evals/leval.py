"""L-Eval's own rules for closed-ended answers.

Source: github.com/OpenLMLab/LEval, Evaluation/auto_eval.py (what counts as the answer) and em.py (when it is right). Each
function is a metric of `metrics.METRICS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def leval_choice(output: str, answer: Any, extra: Mapping[str, Any]) -> dict[str, float]:
    """Letters of the right options; a part of several right ones is worth 0.25 (L-Eval's QuALITY, TPO, Coursera).

    ``extra['several']``: more than one option may be right (Coursera).
    """
    wanted = re.sub("[^A-D]", "", str(answer).split()[0]) or "A"
    given = _leval_letters(output, several=bool(extra.get("several")))
    if given == wanted:
        return {"accuracy": 1.0}
    return {"accuracy": 0.25 if set(given) <= set(wanted) else 0.0}


def _leval_letters(output: str, several: bool) -> str:
    """Sorted letters that an answer names; L-Eval's rules in their order."""
    if not output.strip():
        return "None"
    if output in "ABCD":
        return output
    if not several and (found := re.search("[ABCD]", output)):
        return found.group()
    run = re.match("[ABCD]*", output)
    head = run.group() if run else ""
    if len(head) > 1:
        return "".join(sorted(set(head)))
    rest = output[len(head) :].split("Question")[0]
    letters = set(head) | set(re.sub("[^A-D]", "", "".join(re.findall(r"\s*[A-Z](?=[\s.)])", rest))))
    if not letters and (found := re.search("[ABCD]+", rest)):
        letters = set(found.group())
    return "".join(sorted(letters)) or "A"


def leval_match(output: str, answer: Any, extra: Mapping[str, Any]) -> dict[str, float]:
    """Equal as numbers, else the answer occurs in the output, spaces and case aside (L-Eval's topic retrieval)."""
    try:
        return {"match": float(float(output) == float(answer))}
    except ValueError:
        return {"match": float(str(answer).lower().replace(" ", "") in output.lower().replace(" ", ""))}


def leval_math(output: str, answer: Any, extra: Mapping[str, Any]) -> dict[str, float]:
    """The number of "The answer is ...", else the first paragraph's last (L-Eval's GSM)."""
    given, wanted = _leval_number(output), _leval_number(str(answer))
    return {"match": float(wanted in given if not given else float(given) == float(wanted))}


def _leval_number(text: str) -> str:
    found = re.search(r"The answer is (\S+)", text)
    words = [found.group(1)] if found else text.split("\n\n")[0].split(" ")[::-1]
    word = next((word for word in words if re.search("[0-9]", word)), "") if not found else words[0]
    return re.sub("[^0-9]", "", word.split(".")[0])


def leval_code(output: str, answer: Any, extra: Mapping[str, Any]) -> dict[str, float]:
    """The printed value stands among the output's last words, or behind "the final output" (L-Eval's CodeU)."""
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


def leval_judge(output: str, answer: Any, extra: Mapping[str, Any]) -> dict[str, float]:
    """Loyalty to the document: the first of true and false (L-Eval's SFcition; its second figure, the fact asked for
    without the document, does not depend on the cache and is not measured)."""
    wanted = str(answer).lower().split("[fact:")[0].strip()
    words = output.lower().split("[fact:")[0].split()
    given = next((name for word in words for name in ("true", "false") if name in word), "")
    return {"match": float(given == wanted)}
