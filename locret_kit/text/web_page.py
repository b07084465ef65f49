"""Pages of the Web, and books of them (EPUB), as Markdown."""

from __future__ import annotations

import codecs
import posixpath
import re
import unicodedata
from collections import deque
from contextlib import suppress
from itertools import islice
from urllib.parse import unquote
from zipfile import ZipFile

from bs4 import BeautifulSoup, CData, NavigableString, Tag
from defusedxml.ElementTree import fromstring
from markdownify import MarkdownConverter  # first: by its name the extra is found

from .losses import Refusal, loss_lines, marks, missing, stored
from .numbering import formed, integer

_SAME = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030",
    "shift_jis": "cp932", "euc_kr": "cp949", "utf-16": "utf-8", "utf-16-le": "utf-8", "utf-16-be": "utf-8",
}  # fmt: skip
"""Encodings that pages mean when they name others (WHATWG Encoding Standard); UTF-16 is seen, not believed."""
_LABELS = {"windows-31j": "cp932", "windows-874": "cp874", "iso-8859-8-i": "iso-8859-8"}
"""Names of encodings that Python does not know; beside them all that begin with ``x-``, such as x-sjis."""
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_BARE = ((b"<\0", "utf-16-le"), (b"\0<", "utf-16-be"))
"""First bytes of a page in UTF-16 without a mark."""
_TYPED = ("text", "email", "tel", "url", "number", "date")
"""Fields of a form that somebody fills in."""
_FRAMES = ("iframe", "frame", "object", "embed")
_BLOCKS = (
    "address aside button center details dialog fieldset figure footer form header legend main nav option search summary "
    "textarea"
)
"""Block elements that converters would treat as inline."""


_INLINE = re.compile(
    "a|abbr|b|cite|code|del|dfn|em|i|ins|kbd|mark|math|m[ino]|mrow|mfrac|msqrt|msu[bp]|msubsup|q|s|samp|strike|strong|sub|sup|tt|u|var"
)
"""Elements that are parts of a line."""
_FORMS = {"a": "lowerLetter", "A": "upperLetter", "i": "lowerRoman", "I": "upperRoman"}
"""Forms of a list's numbers, by its type."""
_STYLED = (
    ("decimal-leading-zero", "decimalZero"), ("lower-alpha", "lowerLetter"), ("lower-latin", "lowerLetter"),
    ("upper-alpha", "upperLetter"), ("upper-latin", "upperLetter"), ("lower-roman", "lowerRoman"), ("upper-roman", "upperRoman"),
)  # fmt: skip
"""Forms of a list's numbers, by its style."""
COUNTERS = re.compile(r"\bcounters?\(|list-style[\w-]*\s*:[^;}]*(\w+-greek|\")")
"""Numbers that a style sheet makes."""
_LOOK = re.compile(
    r"vertical-align\s*:\s*(?:super|sub|text-|-?[\d.])|(?<![\w-])top\s*:|line-through|display\s*:\s*none"
    r"|list-style[\w-]*\s*:"
)
"""CSS declarations that raise, lower, strike out or hide text, or number lists."""
MOST = 300
"""Rules of style sheets that are looked at, at most."""
NUMBERS = "numbers of lists or headings from its style sheet left out"
_HIDDEN = re.compile(r"(?:^|;)\s*(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.IGNORECASE)
_SHIFTED = re.compile(r"(?:vertical-align\s*:\s*|(?<![\w-])(?=top))(text-\w+|-?[\d.]*[1-9]|top\s*:\s*-?[\d.]*[1-9])")
_STRUCK = re.compile("line-through", re.IGNORECASE)


def page_text(data: bytes, name: str, losses: list[str]) -> str:
    """The text of a file of HTML, after its title where the page itself does not say it.

    Raises:
        Refusal: it is not UTF-8 and names no other encoding.
    """
    html, encoding, wrong, named = decoded(data)
    if wrong and not named:
        raise Refusal(f"{name} names no encoding and is not UTF-8: save it as UTF-8")
    losses += loss_lines((wrong, f"# character* not in {encoding}, its declared encoding, left out"))
    text, title, left = markdown(html)
    losses += left
    if title and missing([(title, [title])], text) and text:
        text = f"**Title:** {title}\n\n{text}"
    return text


def decoded(data: bytes) -> tuple[str, str, int, bool]:
    """A page's text, its encoding, the number of invalid characters, and whether the page names its encoding.

    The encoding is given by the byte-order mark, or else by the page, or else it is UTF-8. Valid UTF-8 is never read
    as a single-byte encoding, whatever the page says.
    """
    for first, encoding in (*_MARKS, *_BARE):
        if data.startswith(first):
            text = data.decode(encoding, "replace").removeprefix("\ufeff")
            return text, encoding, text.count("\ufffd"), True
    head = data[:2048]
    label = re.search(rb"<\?xml[^>]*\sencoding\s*=\s*[\"']([\w.:-]+)", head) or re.search(
        rb"<meta[^>]*charset\s*=\s*[\"']?\s*([\w.:-]+)", head, re.IGNORECASE
    )
    try:
        name = label[1].decode("ascii").lower() if label else "utf-8"
        found = codecs.lookup(_LABELS.get(name, name.removeprefix("x-"))).name
        b"a".decode(found, "replace")
    except (LookupError, ValueError):  # unknown, or a codec of something else than text
        found, label = "utf-8", None
    encoding = _SAME.get(found, found)
    with suppress(UnicodeDecodeError):
        # Where each byte is a character, text of another encoding decodes without an error.
        if len(b"\xe9\xe8".decode(encoding)) == 2:
            return data.decode("utf-8"), "utf-8", 0, True
    text = data.decode(encoding, "replace")
    return text, encoding, text.count("\ufffd") - data.count(b"\xef\xbf\xbd"), label is not None


def markdown(html: str, sheets: str = "") -> tuple[str, str, list[str]]:
    """A page as Markdown, its title, and its losses; ``sheets`` are the style sheets beside it."""
    page = BeautifulSoup(_prepared(html), "lxml")
    title = " ".join(page.title.get_text().split()) if page.title else ""
    sheets += "".join(sheet.get_text() for sheet in page("style"))
    rules = (rule.rpartition("{") for rule in sheets.split("}") if _LOOK.search(rule))
    for selector, _, look in islice(rules, MOST):
        with suppress(Exception):  # a selector of something else than elements
            for one in page.select(re.split("[{;]", selector)[-1].strip()):
                if one.name == "span" or "display" not in look:  # a page may show other parts, once it runs
                    one["style"] = f"{look};{one.get('style', '')}"
    for code in page(["script", "style", "template", "head"]):
        code.extract()
    hidden = [
        words for one in [*page(hidden=True), *page(style=_HIDDEN)] if (words := one.extract().get_text().strip())
    ]
    for old in page(["span", "font", "big", "small", "strike"]):
        _respell(old)
    with suppress(RecursionError):  # a page that is nested deeply keeps its strings in pieces
        page.smooth()
    strings = [str(one) for one in page.descendants if type(one) in (NavigableString, CData) and str(one).strip()]
    fields = [str(one.get("value", "")) for one in page("input") if one.get("type", "text") in _TYPED]
    frames, (pictures, gone) = len(page(_FRAMES)), _without_pictures(page)
    _write_places(page)
    for table in page("table"):
        _write_spans(table)
    for items in page(["ol", "ul"]):
        _write_numbers(items)
    for link in page("a", href=re.compile(r"^(?!https?:|file:)[a-z][\w+.-]*:", re.IGNORECASE)):
        link.unwrap()
    for box in page("input", type="checkbox"):
        box.replace_with("[x] " if box.has_attr("checked") else "[ ] ")
    shown = page.body or page
    try:
        # Characters stay as they are.
        converter = _Converter(heading_style="ATX", escape_asterisks=False, escape_underscores=False, escape_misc=False)
        text = converter.convert_soup(shown).strip()
    except RecursionError:
        text = shown.get_text("\n", strip=True)
    passages, typed = (missing(((one, [one]) for one in many if one.strip()), text) for many in (strings, fields))
    losses = [
        f"{line}, such as {' '.join(lost[0].split())[:40]!r}"
        for lost, what in ((passages, "passage*"), (typed, "field* of a form"), (hidden, "hidden passage*"))
        for line in loss_lines((len(lost), f"# {what} left out"))
    ]
    losses += loss_lines((frames, "# frame* with other pages left out"), (bool(COUNTERS.search(sheets)), NUMBERS))
    losses += loss_lines((pictures, "# picture* left out"), (gone, "# picture* missing in the file"))
    return text, title, losses


class _Converter(MarkdownConverter):
    """markdownify's converter, with an item's own number where one is written in ``locret-label``."""

    def convert_li(self, el: Tag, text: str, parent_tags: set[str]) -> str:
        said, label = super().convert_li(el, text, parent_tags), el.get("locret-label")  # type: ignore[misc]
        return re.sub(r"^\S+", lambda _: str(label), said, count=1) if label and said.strip() else said


def _respell(element: Tag) -> None:
    """Write a part of a line as the element whose look its style gives it."""
    style = str(element.get("style", ""))
    place = re.search(r"vertical-align\s*:\s*(super|sub)\b", style) or ("font-size" in style and _SHIFTED.search(style))
    if place:
        element.name = "sub" if re.match(r"sub|text-bottom|-?top\s*:\s*\d|-[\d.]", place[1]) else "sup"
    elif element.name == "strike" or _STRUCK.search(style):
        element.name = "s"
    else:
        element.unwrap()


def _without_pictures(page: BeautifulSoup) -> tuple[int, int]:
    """Replace embedded pictures by their alternative text. Returns the number of pictures, and of those without
    content."""
    pictures = gone = 0
    for picture in page("img", src=re.compile("^data:", re.IGNORECASE)):
        if picture.get("data-src"):  # what is shown once the page has been scrolled there
            picture["src"] = picture["data-src"]
            continue
        there = bool(str(picture["src"]).partition(",")[2])
        pictures, gone = pictures + there, gone + (not there)
        picture["src"] = ""
        if not picture.get("alt"):
            picture.extract()
    return pictures, gone


def _write_places(page: BeautifulSoup) -> None:
    """Write positions as text: raised, lowered, fractions, roots."""
    for bracket in page("rp"):
        bracket.extract()
    for reading in page("rt"):
        reading.insert(0, "(")
        reading.append(")")
    for fraction in page("mfrac"):
        top, *rest = fraction(True, recursive=False)
        for part in (top, *rest):
            if len(part.get_text().strip()) > 1 and not part.get_text().strip().isalnum():
                part.insert(0, "(")
                part.append(")")
        top.insert_after("/")
    for root in page("msqrt"):
        root.insert(0, "\u221a(")
        root.append(")")
    for base in page(["msup", "msub", "msubsup", "munder", "mover", "munderover", "mmultiscripts"]):
        scripts = base(True, recursive=False)[1:]
        names = ("sub", "sup") if len(scripts) > 1 else ("sup" if base.name in ("msup", "mover") else "sub",)
        for script, name in zip(scripts, names, strict=False):
            script.name = name
    for script in page(["sup", "sub"]):
        if script.parent is None:
            continue
        slash = script.next_sibling
        below = slash.next_sibling if isinstance(slash, str) and slash.strip() in ("/", "\u2044") else None
        before, after = _beside(script, "previous_sibling"), _beside(script, "next_sibling")
        if script.name == "sup" and isinstance(below, Tag) and below.name == "sub":
            below.unwrap()
            begin, end = " " * before.isdigit(), ""
        else:
            begin, end = marks("^" if script.name == "sup" else "_", script.get_text(), before, after)
        if begin:  # not an empty string, which the converter takes for the beginning of a line
            script.insert(0, begin)
        if end:
            script.append(end)
        script.unwrap()


def _beside(element: Tag | None, side: str) -> str:
    """The character next to an element in its line; '' where it begins or ends there."""
    while element is not None:
        other = getattr(element, side)
        if other is None:
            element = element.parent if element.parent is not None and _INLINE.fullmatch(element.parent.name) else None
            continue
        name = getattr(other, "name", None)
        text = str(other) if name is None else other.get_text() if _INLINE.fullmatch(name) else " "
        if text:
            return text[-1] if side == "previous_sibling" else text[0]
        element = other
    return ""


def _write_numbers(items: Tag) -> None:
    """Write the numbers of a list's items as a page shows them. A list that is all of another one's text takes its place."""
    while (above := items.parent) is not None and above.name == "li" and above.get_text() == items.get_text():
        if above.parent is None or len(above.parent("li", recursive=False)) > 1:
            break
        above.parent.replace_with(items)
    if items.name == "ul":
        return
    entries = items("li", recursive=False)
    style = str(items.get("style", "")).lower()
    form = next((form for name, form in _STYLED if name in style), _FORMS.get(str(items.get("type", "")), "decimal"))
    step = -1 if items.has_attr("reversed") else 1
    number = integer(items.get("start"), len(entries) if step < 0 else 1)
    for entry in entries:
        number = integer(entry.get("value"), number)
        own = _FORMS.get(str(entry.get("type", "")), form)
        bare = re.search(r"list-style[\w-]*\s*:[^;]*\b(?:none|disc)", f"{entry.get('style', '') or style}")
        if not entry.get("locret-label"):
            entry["locret-label"] = "*" if bare else formed(number, own) + "."
        number += step


def _write_spans(table: Tag) -> None:
    """Put an empty cell where one of a row above reaches down, so that the cells after it stay in their columns."""
    section, above = None, dict[int, tuple[int, int]]()
    # above: by column, the rows that a cell still reaches down, and its columns
    for row in table("tr"):
        if row.find_parent("table") is not table:
            continue
        cells, column, below = deque(row(["td", "th"], recursive=False)), 0, dict[int, tuple[int, int]]()
        above = above if row.parent is section else {}
        while cells or any(at >= column for at in above):
            if cells and column not in above:
                cell = cells.popleft()
                rows, columns = (max(1, min(integer(cell.get(name), 1), 1000)) for name in ("rowspan", "colspan"))
            else:
                rows, columns = above.get(column) or (1, min(at for at in above if at > column) - column)
                empty = Tag(name="td", attrs={"colspan": str(columns)})
                cells[0].insert_before(empty) if cells else row.append(empty)
            if rows > 1:
                below[column] = rows - 1, columns
            column += columns
        section, above = row.parent, below


def _prepared(html: str) -> str:
    """A page without what parsers stumble over: prefixes of tags, comments, boxes, thousands of blanks in a row."""
    html = re.sub(r"^\s*<\?xml[^>]*\?>", "", html)
    for prefix in re.findall(r"xmlns:(\w+)\s*=\s*[\"']http://www\.w3\.org/1999/xhtml[\"']", html[:4096]):
        html = re.sub(rf"<(/?){prefix}:", r"<\1", html)
    closed, end, rest = html.rpartition("-->")
    # A comment that has no end would take a square of time, and the text after it.
    html = closed + end + rest.replace("<!--", " ")
    html = re.sub(r"\s{256,}", lambda blanks: "\n" if "\n" in blanks[0] else " ", html)
    return re.sub(rf"<(/?)(?:{_BLOCKS.replace(' ', '|')})(?=[\s/>])", r"<\1div", html, flags=re.IGNORECASE)


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
            left = loss_lines((wrong, f"# character* not in {encoding}, its encoding, left out")) + left
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
    losses += loss_lines(
        (missing, f"{of} of the spine are not in the file"), (pictures, f"{of} are pictures without text"),
        (blank, f"{of} have no text"), (len(shown), "# picture* left out"),
    )  # fmt: skip
    if not spine or missing == len(spine):
        raise Refusal(f"{name} has no chapter: its spine names none that is in the file")
    return "\n\n".join([*texts, *chapters])


def _key(path: str) -> str:
    """A path as it is looked for: without dots, with one kind of slash and one form of accents."""
    return unicodedata.normalize("NFC", posixpath.normpath(path.replace("\\", "/")).lstrip("/"))
