"""Pages of the Web, and chapters of books, as Markdown."""

from __future__ import annotations

import codecs
import re

from .losses import Refusal, counted, missing

OPTIONS: dict[str, bool] = {"escape_asterisks": False, "escape_underscores": False, "escape_misc": False}
"""Options of the converter: characters stay as they are."""
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
"""Elements that stand in lines of their own, which converters take for parts of a line."""


def page_text(data: bytes, name: str, losses: list[str]) -> str:
    """The text of a file of HTML, after its title where the page itself does not say it.

    Raises:
        Refusal: it is not UTF-8 and names no other encoding.
    """
    html, encoding, wrong, named = decoded(data)
    if wrong and not named:
        raise Refusal(f"{name} names no encoding and is not UTF-8: save it as UTF-8")
    if wrong:
        losses.append(f"{counted(wrong, 'character')} not in {encoding}, the encoding that it names, left out")
    text, title, left = markdown(html)
    losses += left
    if title and missing([(title, [title])], text) and text:
        text = f"**Title:** {title}\n\n{text}"
    return text


def decoded(data: bytes) -> tuple[str, str, int, bool]:
    """A page's characters, its encoding, the number of its characters that are not in it, and whether the page names it.

    The encoding is that of its mark, else what it names, else UTF-8. What is UTF-8 is not read as one byte a character,
    whatever it names.
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
    if _bytewise(encoding):
        try:
            return data.decode("utf-8"), "utf-8", 0, True
        except UnicodeDecodeError:
            pass
    text = data.decode(encoding, "replace")
    return text, encoding, text.count("\ufffd") - data.count(b"\xef\xbf\xbd"), label is not None


def _bytewise(encoding: str) -> bool:
    """Whether each byte is a character: then text of another encoding decodes without an error."""
    try:
        return len(b"\xe9\xe8".decode(encoding)) == 2
    except UnicodeDecodeError:
        return False


def markdown(html: str) -> tuple[str, str, list[str]]:
    """A page as Markdown, its title, and its losses."""
    from markdownify import MarkdownConverter  # the first import, by whose name the extra is found
    from bs4 import BeautifulSoup, CData, NavigableString  # isort: skip

    page = BeautifulSoup(_prepared(html), "lxml")
    title = " ".join(page.title.get_text().split()) if page.title else ""
    for code in page(["script", "style", "template", "head"]):
        code.extract()
    strings = [str(one) for one in page.descendants if type(one) in (NavigableString, CData) and one.strip()]
    fields = [str(one.get("value", "")) for one in page("input") if one.get("type", "text") in _TYPED]
    frames = len(page(_FRAMES))
    for picture in page("img", src=re.compile("^data:", re.IGNORECASE)):
        picture["src"] = str(picture["src"]).partition(",")[0] + "..."
    for link in page("a", href=re.compile(r"^(?!https?:|file:)[a-z][\w+.-]*:", re.IGNORECASE)):
        link.unwrap()
    for box in page("input", type="checkbox"):
        box.replace_with("[x] " if box.has_attr("checked") else "[ ] ")
    shown = page.body or page
    try:
        text = MarkdownConverter(heading_style="ATX", **OPTIONS).convert_soup(shown).strip()
    except RecursionError:
        text = shown.get_text("\n", strip=True)
    losses = []
    if lost := missing(((one, [one]) for one in strings), text):
        losses.append(f"{counted(len(lost), 'passage')} left out, such as {' '.join(lost[0].split())[:40]!r}")
    if lost := missing(((one, [one]) for one in fields if one.strip()), text):
        losses.append(f"{counted(len(lost), 'field')} of a form left out, such as {lost[0][:40]!r}")
    if frames:
        losses.append(f"{counted(frames, 'frame')} with other pages left out")
    return text, title, losses


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
