"""Pages of the Web, and chapters of books, as Markdown."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from io import BytesIO

from .losses import Refusal, counted, missing

OPTIONS: dict[str, bool] = {"escape_asterisks": False, "escape_underscores": False, "escape_misc": False}
"""Options of markitdown's converters: characters stay as they are."""
_SAME = {
    "ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030",
    "shift_jis": "cp932", "euc_kr": "cp949", "utf-16": "utf-8", "utf-16-le": "utf-8", "utf-16-be": "utf-8",
}  # fmt: skip
"""Encodings that pages mean when they name others (WHATWG Encoding Standard); UTF-16 is seen, not believed."""
_LABELS = {"windows-31j": "cp932", "windows-874": "cp874", "iso-8859-8-i": "iso-8859-8"}
"""Names of encodings that Python does not know; beside them all that begin with ``x-``, such as x-sjis."""
_BOXES = (
    "address|aside|button|center|details|dialog|fieldset|figure|footer|form|header|legend|main|menu|nav|option|summary"
)
"""Tags of what stands apart on a page, whose words the converter joins with those before and after it."""
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_BARE = ((b"<\0", "utf-16-le"), (b"\0<", "utf-16-be"))
"""First bytes of a page in UTF-16 without a mark."""
_TYPED = ("text", "email", "tel", "url", "number", "date")
"""Fields of a form that somebody fills in."""
_FRAMES = ("iframe", "frame", "object", "embed")


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
    html = _prepared(html)
    text, left = markdown(html)
    losses += left
    shown = re.sub("<!--.*?-->", "", html, flags=re.DOTALL)
    begin = re.search(r"<title\b[^>]*>", shown, re.IGNORECASE)
    title = shown[begin.end() :].partition("</")[0] if begin else ""
    if (words := markdown(title)[0]) and missing([(words, [words])], text) and text.strip():
        text = f"**Title:** {' '.join(words.split())}\n\n{text}"
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


def markdown(html: str) -> tuple[str, list[str]]:
    """A page as Markdown, and its losses."""
    from markitdown.converters import HtmlConverter

    html = _prepared(html)
    text = HtmlConverter().convert_string(html, url=None, **OPTIONS).markdown
    return text, list(_losses(html, text))


def _prepared(html: str) -> str:
    """A page without what converters stumble over: prefixes of tags, comments, boxes, thousands of blanks in a row."""
    html = re.sub(r"^\s*<\?xml[^>]*\?>", "", html)
    for prefix in re.findall(r"xmlns:(\w+)\s*=\s*[\"']http://www\.w3\.org/1999/xhtml[\"']", html[:4096]):
        html = re.sub(rf"<(/?){prefix}:", r"<\1", html)
    closed, end, rest = html.rpartition("-->")
    # A comment that has no end would take a square of time, and the text after it.
    html = closed + end + rest.replace("<!--", " ")
    html = re.sub(rf"<(/?)(?:{_BOXES})\b", r"<\1div", html, flags=re.IGNORECASE)
    return re.sub(r"\s{256,}", lambda blanks: "\n" if "\n" in blanks[0] else " ", html)


def _losses(html: str, text: str) -> Iterator[str]:
    """Lines for what a page shows and its text lacks."""
    from bs4 import BeautifulSoup, CData, NavigableString

    page = BeautifulSoup(html, "html.parser")
    for hidden in page(["script", "style", "head", "template"]):
        hidden.extract()
    strings = [str(one) for one in page.descendants if type(one) in (NavigableString, CData)]
    words = [one for one in strings if one.strip()]
    lost = missing(((one, [one]) for one in words), text)
    if lost:
        yield f"{counted(len(lost), 'passage')} left out, such as {' '.join(lost[0].split())[:40]!r}"
    fields = [str(one.get("value", "")) for one in page("input") if one.get("type", "text") in _TYPED]
    if lost := missing(((one, [one]) for one in fields if one.strip()), text):
        yield f"{counted(len(lost), 'field')} of a form left out, such as {lost[0][:40]!r}"
    if frames := len(page(_FRAMES)):
        yield f"{counted(frames, 'frame')} with other pages left out"


def word_page(data: bytes, name: str) -> str:
    """A Word file as Markdown."""
    from markitdown import MissingDependencyException, StreamInfo
    from markitdown.converters import DocxConverter

    try:
        return DocxConverter().convert(BytesIO(data), StreamInfo(extension=".docx"), **OPTIONS).markdown
    except MissingDependencyException as error:
        raise ImportError(f"{name} needs more of markitdown than is installed", name="markitdown") from error
