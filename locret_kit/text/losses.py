"""Shared parts of the converters of documents: refusals, losses, archives of strangers, and marks for raised and lowered text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

NEAR = 4096
"""Letters behind a passage within which the next one is looked for first, so that long documents take no square of time."""

_BASE64 = re.compile(r"(?<![A-Za-z0-9+/])(?:(?:[A-Za-z0-9+/]{60,80}={0,2}(?:\\n|\s){1,4}){10}|[A-Za-z0-9+/]{2000})")
"""Ten lines of base64, or a long one: an attachment of a mail, a picture in a notebook."""
ENCODED = "it holds base64, such as pictures or attachments, which is read letter by letter: take the text out first"


class Refusal(ValueError):
    """A refusal of a document whose words are complete."""


def loss_lines(*counts: tuple[int, str]) -> list[str]:
    """Lines that report losses with their number: "#" is replaced by the number, "*" by the plural s."""
    return [words.replace("#", str(n)).replace("*", "s" * (n != 1)) for n, words in counts if n]


def is_encoded(text: str) -> bool:
    """Whether a text holds base64: long runs of capitals, small letters and digits alike."""
    return any(all(re.search(kind, run[0]) for kind in ("[A-Z]", "[a-z]", "[0-9]")) for run in _BASE64.finditer(text))


def letters(text: str) -> str:
    """The letters and digits of a text, with a mark where digits are apart: converters change blanks and marks."""
    return re.sub(r"[^\w\0]|_", "", re.sub(r"(?<=\d)[\W_]+(?=\d)", "\0", text))


def missing(passages: Iterable[tuple[str, list[str]]], text: str) -> list[str]:
    """Passages that are missing in a text. A number must occur as a whole, without neighbouring digits.

    Args:
        passages: each as a whole, and in pieces that need not be adjacent in the text. Their order is mostly the
            text's.
    """
    shown, at, lost = letters(text), 0, []

    def joined(place: int) -> bool:
        """Whether digits stand on both sides of a place."""
        return 0 < place < len(shown) and shown[place - 1 : place + 1].isdecimal()

    def find(passage: str, start: int, end: int | None = None) -> int:
        place = shown.find(passage, start, end)
        while place >= 0 and passage and (joined(place) or joined(place + len(passage))):
            place = shown.find(passage, place + 1, end)
        return place

    for whole, pieces in passages:
        for passage in [letters(whole)] if letters(whole) in shown[at : at + NEAR] else map(letters, pieces):
            place = find(passage, at, at + NEAR + len(passage))
            place = find(passage, at) if place < 0 else place
            if place >= 0:
                at = place + len(passage)
            elif find(passage, 0) < 0:
                lost.append(whole)
                break
    return lost


def stored(data: bytes, name: str, limit: int) -> BytesIO:
    """A copy of a zip archive with its entries stored, not compressed.

    Entries are decompressed here in pieces, up to their declared sizes. A converter would decompress an entry at
    once, whatever its header declares.
    """
    out, locked = BytesIO(), Refusal(f"{name} is encrypted: only a copy without protection can be read")
    with ZipFile(BytesIO(data)) as archive, ZipFile(out, "w", ZIP_STORED) as copy:
        entries = archive.infolist()
        if (total := sum(entry.file_size for entry in entries)) > limit:
            raise Refusal(f"{name} holds {total} bytes unpacked, more than limit={limit}")
        for entry in entries:
            if entry.flag_bits & 1:
                raise locked
            if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise Refusal(f"{name} has an unsupported compression method ({entry.filename}): compress it again")
            # Of no text; Word misspells some of them.
            if entry.is_dir() or entry.filename.lower().startswith("customxml/"):
                continue
            with archive.open(entry) as packed, copy.open(entry.filename, "w") as unpacked:
                while piece := packed.read(1 << 16):
                    if entry.filename == "META-INF/encryption.xml" and b"xmlenc#aes" in piece:  # text, not fonts
                        raise locked
                    unpacked.write(piece)
    out.seek(0)
    return out


ORDINAL = "st|nd|rd|th|er|TM|SM"
"""Raised letters that are read as a part of the word before them."""


def marks(mark: str, script: str, before: str, after: str) -> tuple[str, str]:
    """The text before and after a raised or lowered text that separates it from its neighbours.

    Args:
        mark: "^" for a raised text, "_" for a lowered one.
        before, after: neighbouring characters in the line; '' if there are none.
    """
    bare = script.strip()
    beside = before.strip() or re.match(r"[^\W_]", after)
    if not re.search(r"\w", bare) or bare.startswith("[") or not beside:
        return "", ""
    if re.fullmatch(ORDINAL, bare) and mark == "^":
        return "", ""
    if mark == "_" and bare.isdigit() and before.isalpha() and not after.isdigit():  # H2O, CO2
        return "", ""
    simple = re.fullmatch(r"[+\-\u2212\u2013]?\w+(?:[.,]\w+)*", bare) and not after.isalnum()
    return (mark, "") if simple else (f"{mark}(", ")")


def fraction(above: str, below: str) -> str:
    """A stacked fraction in a line: 1/2, (a+b)/2."""
    return "/".join(one if one.isalnum() else f"({one})" for one in (above.strip(), below.strip()))
