"""Word files: prepared so that the converter sees all of their text, and compared with what came out."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from io import BytesIO
from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from zipfile import ZIP_STORED, ZipFile

from .archive import stored
from .losses import counted, missing
from .web_page import markdown

W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
STRICT = "{http://purl.oclc.org/ooxml/wordprocessingml/main}"
MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
SAME = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
BLANK = "{http://www.w3.org/XML/1998/namespace}space"
READ = ("document", "footnotes", "endnotes")
"""Root elements of the parts that are converted."""
WRAPPERS = ("moveTo", "bdo", "dir", "customXml", "fldSimple", "ruby", "rubyBase", "rt", "subDoc")
"""Elements whose content is text, though the converter passes them over."""
APART = (
    ("header", "header"), ("footer", "footer"), ("comments", "comment"), ("footnotes", "note"), ("endnotes", "note"),
    ("charts/chart", "chart"), ("diagrams/data", "diagram"), ("document", "passage"),
)  # fmt: skip
"""Beginnings of parts' names beside the main document's folder, and what their text is called."""
FILES = r"(?:^|/)(?:embeddings/|afchunk)[^/]+$"
"""Names of parts that are files of other formats."""
ElementTree.register_namespace("w", W[1:-1])  # markitdown asks for tags by this name


def word_text(data: bytes, name: str, limit: int, losses: list[str]) -> str:
    """The text of a Word file as Markdown; its losses are added to ``losses``."""
    import mammoth
    from defusedxml.ElementTree import fromstring

    out, texts, files = BytesIO(), [], 0
    with ZipFile(stored(data, name, limit)) as archive, ZipFile(out, "w", ZIP_STORED) as copy:
        for entry in archive.namelist():
            part = archive.read(entry)
            files += bool(re.search(FILES, entry, re.IGNORECASE))
            called = next((noun for start, noun in APART if re.match(rf"word/{start}", entry)), "")
            if entry.endswith(".xml") and called:
                root = fromstring(part)
                _prepare(root)
                if _name(root) in READ:
                    part = ElementTree.tostring(root, "utf-8", xml_declaration=True)
                texts.append((called, root))
            copy.writestr(entry, part)
        pictures = _missing_pictures(archive)
        for picture in pictures:
            copy.writestr(picture, b"")  # the converter would refuse the document
    text = markdown(mammoth.convert_to_html(out, style_map="u => u").value)[0]
    lost: dict[str, int] = {}
    for called, root in texts:
        several = called in ("comment", "note", "passage")  # others are one thing, in as many passages as they like
        pieces = [passages for one in (root if several else [root]) if (passages := list(_passages(one)))]
        number = sum(bool(missing(one, text)) for one in pieces) if called != "passage" else 0
        number += len(missing((one for each in pieces for one in each), text)) if called == "passage" else 0
        lost[called] = lost.get(called, 0) + number
    losses += [f"{counted(number, called)} left out" for called, number in lost.items() if number]
    if pictures:
        losses.append(f"{counted(len(pictures), 'picture')} that it names not in the file")
    if files:
        losses.append(f"{counted(files, 'file')} within it left out")
    return text


def _missing_pictures(archive: ZipFile) -> list[str]:
    """Names of pictures that a part refers to and that are not in the file."""
    from defusedxml.ElementTree import fromstring

    there, named = set(archive.namelist()), []
    for entry in archive.namelist():
        folder, relations = posixpath.split(entry)
        if relations.endswith(".rels") and posixpath.basename(folder) == "_rels":
            for one in fromstring(archive.read(entry)):
                if one.get("Type", "").endswith("/image") and one.get("TargetMode") != "External":
                    target = posixpath.join("/", posixpath.dirname(folder), one.get("Target", ""))
                    named.append(posixpath.normpath(target).lstrip("/"))
    return sorted(set(named) - there)


def _name(element: Element) -> str:
    """An element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]


def _prepare(root: Element) -> None:
    """Make a part say all of its text where the converter looks for it: moved text where it was moved to, text boxes behind
    their paragraph, equations as LaTeX, breaks as breaks, the content of wrappers in their place."""
    for element in root.iter():
        if isinstance(element.tag, str):
            element.tag = element.tag.replace(STRICT, W)
            if element.tag == f"{W}cr" or element.tag == f"{W}br":
                element.tag = f"{W}br"
                element.attrib.clear()
            elif element.tag == f"{W}ptab":
                element.tag = f"{W}tab"
            elif element.tag in [W + wrapper for wrapper in WRAPPERS]:
                element.tag = f"{W}ins"
    parents = {child: parent for parent in root.iter() for child in parent}
    for choice in list(root.iter(f"{SAME}AlternateContent")):
        old = choice.find(f"{SAME}Fallback")
        if old is None or (not list(old.iter(f"{W}txbxContent")) and list(choice.iter(f"{W}txbxContent"))):
            for one in choice.findall(f"{SAME}Choice")[:1]:
                if old is not None:
                    choice.remove(old)
                one.tag = f"{SAME}Fallback"  # the only form that is read
    for box in [one for one in root.iter() if _name(one) == "txbx"]:
        chain = list(_above(box, parents))
        paragraphs = [one for one in chain if one.tag == f"{W}p"]
        if not paragraphs or any(_name(one) == "Choice" for one in chain):  # it is there once more, for older programs
            continue
        outer = parents[paragraphs[-1]]
        place = list(outer).index(paragraphs[-1]) + 1
        for content in box.iter(f"{W}txbxContent"):
            for offset, paragraph in enumerate(list(content)):
                outer.insert(place + offset, deepcopy(paragraph))
            place += len(content)
            content.clear()
    parents = {child: parent for parent in root.iter() for child in parent}
    for equation in list(root.iter(f"{MATH}oMath")):
        above = parents[equation]
        run = Element(f"{W}r")
        ElementTree.SubElement(run, f"{W}t", {BLANK: "preserve"}).text = _latex(equation)
        block = _name(above) == "oMathPara"
        above[list(above).index(equation)] = run
        if block:
            above.tag = f"{W}ins"
            if parents[above].tag != f"{W}p":
                above.tag = f"{W}p"


def _above(element: Element, parents: dict[Element, Element]) -> Iterator[Element]:
    """The elements that hold one, from the inside out."""
    above = parents.get(element)
    while above is not None:
        yield above
        above = parents.get(above)


def _latex(equation: Element) -> str:
    """An equation as LaTeX, or its characters where it has a form that the converter does not know."""
    from markitdown.converter_utils.docx.math.omml import oMath2Latex

    plain = "".join(one.text or "" for one in equation.iter(f"{MATH}t"))
    try:
        latex = str(oMath2Latex(equation).latex)
    except Exception:  # it raises whatever it stumbles over
        return f" {plain} "
    return (
        f"${latex}$"
        if not missing([(plain, [one.text or "" for one in equation.iter(f"{MATH}t")])], latex)
        else f" {plain} "
    )


def _passages(root: Element) -> Iterable[tuple[str, list[str]]]:
    """Paragraphs of a part, whole and in runs, without what was deleted or moved away; of a chart its words."""
    hidden = {id(one) for gone in root.iter() if _name(gone) in ("del", "moveFrom", "Choice") for one in gone.iter()}
    for paragraph in [one for one in root.iter() if _name(one) in ("p", "v")]:
        inner = {
            id(one) for deep in paragraph.iter() if deep is not paragraph and _name(deep) == "p" for one in deep.iter()
        }
        words = (one for one in paragraph.iter() if _name(one) in ("t", "v"))
        shown = (one for one in words if id(one) not in hidden and id(one) not in inner)
        runs = [text for one in shown if (text := one.text or "").strip()]
        if runs:
            yield "".join(runs), runs
