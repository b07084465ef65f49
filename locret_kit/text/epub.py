"""Chapters of an EPUB by its spine, whatever the prefixes, paths, case and encodings."""

from __future__ import annotations

import posixpath
import re
import unicodedata
from urllib.parse import unquote
from zipfile import ZipFile

from defusedxml.ElementTree import fromstring

from .losses import Refusal, stored, told
from .web_page import decoded, markdown

_PICTURE = re.compile(r"<(?:\w+:)?ima?ge?\b[^>]*?\s(?:\w+:)?(?:src|href)\s*=\s*[\"']([^\"'#]+)", re.IGNORECASE)
"""A picture that a chapter shows, by its path."""


def book_text(data: bytes, name: str, limit: int, losses: list[str]) -> str:
    """The chapters of an EPUB in the order of its spine, after its title and authors; its losses are added to ``losses``."""
    with ZipFile(stored(data, name, limit)) as archive:
        entries = {_key(entry).casefold(): entry for entry in archive.namelist()}
        entries |= {_key(entry): entry for entry in archive.namelist()}  # two names may differ in their case alone

        def entry_of(path: str) -> str | None:
            return entries.get(_key(path)) or entries.get(_key(path).casefold())

        container = fromstring(archive.read(entry_of("META-INF/container.xml") or ""))
        package = next(unquote(part.get("full-path", "")) for part in container.iterfind(".//{*}rootfile"))
        book = fromstring(archive.read(entry_of(package) or package))
        items = {item.get("id"): item for item in book.iterfind("{*}manifest/{*}item")}
        # Each once: a spine that names a page a thousand times would take minutes.
        spine = list(dict.fromkeys(part.get("idref") for part in book.iterfind("{*}spine/{*}itemref")))
        texts = [
            f"**{head}:** {', '.join(words)}"
            for head, tag in (("Title", "title"), ("Authors", "creator"))
            if (words := [" ".join(one.itertext()).strip() for one in book.iterfind(f"{{*}}metadata/{{*}}{tag}")])
        ]
        sheets = "\n".join(decoded(archive.read(one))[0] for one in archive.namelist() if one.lower().endswith(".css"))
        chapters: list[str] = []
        missing = blank = pictures = 0
        shown: set[str] = set()
        for number, chapter in enumerate(spine, 1):
            item = items.get(chapter)
            href = "" if item is None else unquote(item.get("href", "").partition("#")[0])
            entry = entry_of(posixpath.join(posixpath.dirname(package), href))
            if not href or entry is None:
                missing += 1
                continue
            html, encoding, wrong, _ = decoded(archive.read(entry))
            text, _, left = markdown(html, sheets)
            left = told((wrong, f"# character* not in {encoding}, its encoding, left out")) + left
            named = (entry_of(posixpath.join(posixpath.dirname(entry), unquote(one))) for one in _PICTURE.findall(html))
            shown |= {one for one in named if one}
            losses += [f"chapter {number} ({posixpath.basename(entry)}): {line}" for line in left]
            if re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text).strip():
                chapters.append(text.strip())
            elif re.search(r"<(?:\w+:)?(?:img|image|svg|object)\b", html):
                pictures += 1
            else:
                blank += 1
    of = f"# of {len(spine)} chapters"
    losses += told(
        (missing, f"{of} of the spine are not in the file"), (pictures, f"{of} are pictures without text"),
        (blank, f"{of} have no text"), (len(shown), "# picture* left out"),
    )  # fmt: skip
    if not spine or missing == len(spine):
        raise Refusal(f"{name} has no chapter: its spine names none that is in the file")
    return "\n\n".join([*texts, *chapters])


def _key(path: str) -> str:
    """A path as it is looked for: without dots, with one kind of slash and one form of accents."""
    return unicodedata.normalize("NFC", posixpath.normpath(path.replace("\\", "/")).lstrip("/"))
