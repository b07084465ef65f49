"""Numbers that Word and browsers draw before paragraphs and items: "2.1", "(a)", "iv."."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple
from xml.etree.ElementTree import Element

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
VALUE = f"{W}val"
CHAIN = 20
"""Styles that are based on one another, at most: those of a damaged file may form a ring."""
_ROMAN = (
    (1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl"), (10, "x"), (9, "ix"),
    (5, "v"), (4, "iv"), (1, "i"),
)  # fmt: skip


def _roman(number: int) -> str:
    said = ""
    for value, letters in _ROMAN:
        said += letters * (number // value)
        number %= value
    return said


def _ordinal(number: int) -> str:
    return f"{number}{'th' if number // 10 % 10 == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


FORMS: dict[str, Callable[[int], str]] = {
    "decimal": str, "none": lambda n: "", "decimalZero": "{:02}".format, "ordinal": _ordinal, "lowerRoman": _roman,
    "upperRoman": lambda n: _roman(n).upper(), "lowerLetter": lambda n: chr(97 + (n - 1) % 26) * ((n + 25) // 26),
    "upperLetter": lambda n: chr(65 + (n - 1) % 26) * ((n + 25) // 26), "numberInDash": "- {} -".format, "hex": "{:X}".format,
}  # fmt: skip
"""Forms of a number by Word's names (ECMA-376, part 1, 17.18.59)."""


def formed(number: int, form: str) -> str:
    """A number in one of the forms; in digits if the form is unknown or does not have the number."""
    return FORMS.get(form, str)(number) if 0 < number < 5000 or form == "none" else str(number)


def integer(given: object, default: int = 0) -> int:
    """A number that an attribute gives, such as one of a damaged file."""
    return int(str(given)) if re.fullmatch(r"[+-]?\d{1,9}", str(given).strip()) else default


def on(element: Element | None, name: str) -> bool | None:
    """A property that is on, off, or not there."""
    one = None if element is None else element.find(W + name)
    return None if one is None else one.get(VALUE, "1") not in ("0", "false", "off", "none")


class Styles:
    """Styles of a Word file, each with those that it is based on."""

    def __init__(self, root: Element | None) -> None:
        styles = [] if root is None else root.findall(f"{W}style")
        self._by_id = {style.get(f"{W}styleId"): style for style in styles}
        kinds = [style for style in styles if style.get(f"{W}type") == "paragraph"]
        default = (style.get(f"{W}styleId") for style in kinds if style.get(f"{W}default") in ("1", "true"))
        self.default = next(default, None)

    def chain(self, name: str | None) -> list[Element]:
        """A style, followed by its base styles."""
        found: list[Element] = []
        while name in self._by_id and len(found) < CHAIN:
            found.append(self._by_id[name])
            name = value(found[-1], "basedOn")
        return found


def value(element: Element | None, name: str) -> str | None:
    """The value of an element's child."""
    one = None if element is None else element.find(W + name)
    return None if one is None else one.get(VALUE)


class _Level(NamedTuple):
    start: int
    form: str
    text: str | None
    restart: int | None
    legal: bool
    after: str
    style: str | None


class Numbering:
    """Counters of a Word file's lists (ECMA-376, part 1, 17.9), which go on from paragraph to paragraph."""

    def __init__(self, root: Element | None, styles: Styles) -> None:
        self._styles, self.unknown, self.flat = styles, 0, 0
        parts = [] if root is None else root.findall(f"{W}abstractNum")
        self._lists = {one.get(f"{W}abstractNumId"): one for one in parts}
        self._nums = {} if root is None else {one.get(f"{W}numId"): one for one in root.findall(f"{W}num")}
        self._levels: dict[str, tuple[str, dict[int, _Level], dict[int, int]]] = {}
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)
        self._begun: set[tuple[str, int]] = set()

    def of(self, paragraph: Element) -> tuple[str, int] | None:
        """The list of a paragraph and its level in it, by itself or by its style."""
        properties = paragraph.find(f"{W}pPr")
        own = None if properties is None else properties.find(f"{W}numPr")
        chain = self._styles.chain(value(properties, "pStyle") or self._styles.default)
        given = [(None, own), *((style.get(f"{W}styleId"), style.find(f"{W}pPr/{W}numPr")) for style in chain)]
        number = next((found for _, one in given if (found := value(one, "numId"))), None)
        if number is None or number == "0":
            return None
        level = value(own, "ilvl")
        if level is None:
            levels = self._list(number)[1]
            named = (at for style, _ in given for at, one in levels.items() if style and one.style == style)
            inherited = next((found for _, one in given if (found := value(one, "ilvl"))), "0")
            return number, next(named, integer(inherited))
        return number, integer(level)

    def label(self, number: str, at: int) -> str | None:
        """The next number of a list at a level, with its suffix; None for a bullet or an undefined list."""
        key, levels, starts = self._list(number)
        level, counts = levels.get(at), self._counts[key]
        if level is None or level.text is None:
            self.unknown += level is not None and level.form != "bullet"
            return None
        if at in starts and (number, at) not in self._begun:
            counts.pop(at, None)
        self._begun.add((number, at))
        counts[at] = counts[at] + 1 if at in counts else starts.get(at, level.start)
        for n in [n for n in counts if n > at]:
            restart = levels[n].restart if n in levels else None
            if restart is None or at < restart:
                del counts[n]
        if level.form == "bullet":
            return None

        def shown(mark: re.Match[str]) -> str:
            n = int(mark[1]) - 1
            form = "decimal" if level.legal and levels[n].form != "none" else levels[n].form
            self.unknown += form not in FORMS
            return formed(counts.get(n, starts.get(n, levels[n].start)), form)  # a higher one may be still to come

        text = re.sub(r"%([1-9])", lambda mark: shown(mark) if int(mark[1]) - 1 in levels else "", level.text).strip()
        return text and text + level.after

    def _list(self, number: str) -> tuple[str, dict[int, _Level], dict[int, int]]:
        """Counting of a list: the name of its counters, its levels, and where they start anew."""
        if number not in self._levels:
            num, key, linked = self._nums.get(number), "", None
            for _ in range(CHAIN):
                key = value(num, "abstractNumId") or ""
                linked = value(self._lists.get(key), "numStyleLink")
                if linked is None:
                    break
                links = (value(one.find(f"{W}pPr/{W}numPr"), "numId") for one in self._styles.chain(linked))
                num = self._nums.get(next((one for one in links if one), None))
            there = self._lists.get(key)
            found = [] if there is None else there.findall(f"{W}lvl")
            starts = {}
            for one in [] if number not in self._nums else self._nums[number].findall(f"{W}lvlOverride"):
                found += one.findall(f"{W}lvl")
                if (start := value(one, "startOverride")) is not None:
                    starts[integer(one.get(f"{W}ilvl", 0))] = integer(start)
            self._levels[number] = key, {integer(one.get(f"{W}ilvl", 0)): _level(one) for one in found}, starts
        return self._levels[number]


def _level(element: Element) -> _Level:
    form = next(element.iter(f"{W}numFmt"), None)  # in a choice of forms the first, which newer programs take
    kind, pattern = ("decimal", "") if form is None else (form.get(VALUE, "decimal"), form.get(f"{W}format", ""))
    zeros = re.match(r"0*1\b", pattern)
    if kind == "custom" and zeros:
        kind = f"zeros{len(zeros[0])}"
        FORMS.setdefault(kind, f"{{:0{len(zeros[0])}}}".format)
    restart = value(element, "lvlRestart")
    hidden = on(element.find(f"{W}rPr"), "vanish")
    return _Level(
        integer(value(element, "start") or 0), kind, "" if hidden else value(element, "lvlText"),
        integer(restart) if restart else None,
        bool(on(element, "isLgl")), "" if value(element, "suff") == "nothing" else " ", value(element, "pStyle"),
    )  # fmt: skip
