"""Word files: prepared so that the converter sees all of their text, and compared with what came out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from io import BytesIO
from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from zipfile import ZIP_STORED, ZipFile

import mammoth
from defusedxml.ElementTree import fromstring
from mammoth.documents import Image

from .losses import loss_lines, missing, stored
from .numbering import VALUE, Numbering, Styles, W, formed, integer, on, value
from .web_page import markdown

STRICT = b"http://purl.oclc.org/ooxml/wordprocessingml/main"
MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
SAME = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
BLANK = "{http://www.w3.org/XML/1998/namespace}space"
READ = ("document", "footnotes", "endnotes")
"""Root elements of the parts that are converted."""
WRAPPERS = {W + name for name in ("moveTo", "bdo", "dir", "customXml", "fldSimple", "ruby", "rubyBase", "rt", "subDoc")}
"""Elements whose content is text, though the converter passes them over."""
APART = (
    ("header", "header"), ("footer", "footer"), ("comments", "comment"), ("footnotes", "note"), ("endnotes", "note"),
    ("charts/chart", "chart"), ("diagrams/data", "diagram"), ("document", "passage"),
)  # fmt: skip
"""Beginnings of parts' names beside the main document's folder, and what their text is called."""
BETWEEN = ("tab", "br", "sym", "noBreakHyphen", "footnoteReference", "endnoteReference")
"""Elements that stand between two runs in the text."""
RELATED = (
    "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}",
    "{http://purl.oclc.org/ooxml/officeD",
)
"""Beginnings of attributes that refer to other parts."""
LOOKS = ("vertAlign", "strike", "b", "i", "u")
"""Properties of a run that leave marks in the text."""
LINKED = ("/oleObject", "/chart", "/header", "/footer", "/subDocument", "/aFChunk")
"""Kinds of parts whose text is lost if they are linked, not embedded."""
FILES = r"(?:^|/)(?:embeddings/|afchunk)[^/]+$"
"""Names of parts that are files of other formats."""
ElementTree.register_namespace("w", W[1:-1])  # markitdown asks for tags by this name


def word_text(data: bytes, name: str, limit: int, losses: list[str]) -> str:
    """The text of a Word file as Markdown; its losses are added to ``losses``."""
    out, texts, files, linked, wild, hidden, flat = BytesIO(), [], 0, 0, 0, 0, 0
    with ZipFile(stored(data, name, limit)) as archive, ZipFile(out, "w", ZIP_STORED) as copy:
        entries = archive.namelist()

        def part_of(called: str) -> Element | None:
            """A part of the main document's folder, by its root element."""
            there = (one for one in entries if re.fullmatch(rf"word/{called}\d*\.xml", one))
            return next((fromstring(archive.read(one).replace(STRICT, W[1:-1].encode())) for one in there), None)

        styles, lists, settings = Styles(part_of("styles")), part_of("numbering"), part_of("settings")
        notes = [] if settings is None else list(settings)
        for entry in entries:
            part = archive.read(entry)
            files += bool(re.search(FILES, entry, re.IGNORECASE))
            called = next((noun for start, noun in APART if re.match(rf"word/{start}", entry)), "")
            if entry.endswith(".xml") and called:
                root = fromstring(part.replace(STRICT, W[1:-1].encode()))
                numbering = Numbering(lists, styles)
                hidden += _prepare(root, styles, numbering)
                relations = re.sub(r"([^/]+)$", r"_rels/\1.rels", entry)
                related = fromstring(archive.read(relations)) if relations in entries else ()
                known = {one.get("Id") for one in related}
                for one in root.iter():  # the converter would refuse a document whose references lead nowhere
                    for key in [key for key in one.attrib if key.startswith(RELATED) and one.attrib[key] not in known]:
                        del one.attrib[key]
                if _name(root) in READ:
                    part = ElementTree.tostring(root, "utf-8", xml_declaration=True)
                    wild, flat = wild + numbering.unknown, flat + numbering.flat
                    notes += root.iter(f"{W}sectPr")
                texts.append((called, root))
            elif entry.endswith(".rels"):
                elsewhere = (one for one in fromstring(part) if one.get("TargetMode") == "External")
                linked += sum(one.get("Type", "").endswith(LINKED) for one in elsewhere)
            copy.writestr(entry, part)
    made = mammoth.convert_to_html(out, style_map="u => u", convert_image=mammoth.images.img_element(_picture))
    text, _, lines = markdown(_numbered_notes(made.value, notes))
    lost: Counter[str] = Counter()
    for called, root in texts:
        if called == "passage":
            lost[called] += len(missing(_passages(root), text))
        else:  # a comment or a note is one thing, and so are whole parts
            things = root if called in ("comment", "note") else [root]
            lost[called] += sum(bool(missing(list(_passages(one)), text)) for one in things)
    losses += loss_lines(*((number, f"# {called}* left out") for called, number in lost.items()))
    losses += [line for line in lines if "picture" in line]  # what else is lost is counted by Word's parts
    symbols = sum("w:sym" in message.message for message in made.messages) + len(re.findall("[\ue000-\uf8ff]", text))
    losses += loss_lines(
        (hidden, "# hidden passage* left out"), (flat, "# equation* without its form"),
        (symbols, "# symbol* without Unicode left out"),
        (wild, "# automatic number* or equation fields (some in digits) left out"), (files, "# embedded file* left out"),
        (linked, "# linked part* left out"),
    )  # fmt: skip
    return text


def _picture(image: Image) -> dict[str, str]:
    """A picture as an address that says whether it is there; its content is not read."""
    try:
        with image.open() as content:
            return {"src": "data:image," + "x" * bool(content.read(1))}
    except (KeyError, OSError):
        return {"src": "data:image,"}


def _numbered_notes(html: str, properties: Iterable[Element]) -> str:
    """A page of the converter's, with notes numbered as Word does: its footnotes and endnotes each from the first one on."""
    for kind, form in (("footnote", "decimal"), ("endnote", "lowerRoman")):
        given = [one for part in properties for one in part.iter(f"{W}{kind}Pr")]
        form = next((found for one in given if (found := value(one, "numFmt"))), form)
        first = next((integer(found, 1) for one in given if (found := value(one, "numStart"))), 1)
        notes = dict.fromkeys(re.findall(rf'id="{kind}-ref-([^"]+)"', html))
        labels = {note: f"[{formed(number, form)}]" for number, note in enumerate(notes, first)}
        for note, label in labels.items():
            html = html.replace(f'<li id="{kind}-{note}"', f'<li locret-label="{label}" id="{kind}-{note}"', 1)
            html = re.sub(rf'(id="{kind}-ref-{re.escape(note)}">)\[\d+\]', rf"\g<1>{label}", html)
    return html


def _name(element: Element) -> str:
    """An element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]


def _prepare(root: Element, styles: Styles, numbering: Numbering) -> int:
    """Rearrange a part so that the converter finds all of its text.

    Moved text goes to its new place, text boxes after their paragraph. Equations become LaTeX, breaks stay, wrappers are
    replaced by their content, and automatic numbers are written out.

    Returns:
        the number of hidden passages, which are removed.
    """
    for ruby in root.iter(f"{W}ruby"):
        for reading in ruby.findall(f"{W}rt"):  # drawn above its word, and said behind it
            ruby.remove(reading)
            ruby.append(reading)
            for at, bracketed in ((0, "({}"), (-1, "{})")):
                for word in list(reading.iter(f"{W}t"))[at:][:1]:
                    word.text = bracketed.format(word.text)
    for element in root.iter():
        if element.tag in (f"{W}cr", f"{W}br"):
            element.tag = f"{W}br"
            element.attrib.clear()
        elif element.tag == f"{W}ptab":
            element.tag = f"{W}tab"
        elif element.tag in WRAPPERS:
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
        chain = [box]  # and what holds it, from the inside out
        while chain[-1] in parents:
            chain.append(parents[chain[-1]])
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
        latex = _latex(equation)
        numbering.flat += not latex
        words = " ".join(one.text or "" for one in equation.iter(f"{MATH}t"))
        ElementTree.SubElement(run, f"{W}t", {BLANK: "preserve"}).text = latex or f" {words} "
        above[list(above).index(equation)] = run
        if _name(above) == "oMathPara":
            above.tag = W + ("ins" if parents[above].tag == f"{W}p" else "p")
    hidden = _prepare_runs(root, styles, numbering)
    _number(root, numbering)
    return hidden


def _prepare_runs(root: Element, styles: Styles, numbering: Numbering) -> int:
    """Make runs say by themselves what their styles say: raised, lowered, struck out, hidden. The number of hidden ones."""
    hidden, before = 0, False
    named: dict[Element, str | None] = {}
    for paragraph in root.iter(f"{W}p"):
        named |= dict.fromkeys(paragraph.iter(f"{W}r"), value(paragraph.find(f"{W}pPr"), "pStyle"))
    for run in root.iter(f"{W}r"):
        own = run.find(f"{W}rPr")
        given = [*styles.chain(value(own, "rStyle")), *styles.chain(named.get(run) or styles.default)]
        chain = [own, *(style.find(f"{W}rPr") for style in given)]
        words = run.findall(f"{W}t")
        if next((gone for one in chain if (gone := on(one, "vanish")) is not None), False):
            for word in words:
                word.tag = f"{W}delText"
            hidden += bool(words) and not before
        before = bool(words) and words[0].tag == f"{W}delText"
        place = next((found for one in chain if (found := value(one, "vertAlign"))), None)
        shift = next((int(found) for one in chain if re.fullmatch(r"-?\d+", found := value(one, "position") or "")), 0)
        place = place or ("superscript" if shift > 0 else "subscript" if shift < 0 else None)
        struck = any(on(one, name) for one in chain for name in ("strike", "dstrike"))
        if (place or struck) and words:
            if own is None:
                own = Element(f"{W}rPr")
                run.insert(0, own)
            for name, kind in (("vertAlign", place), ("strike", "1" if struck else None)):
                for one in own.findall(W + name):
                    own.remove(one)
                if kind:
                    ElementTree.SubElement(own, W + name, {VALUE: kind})
        for field in run.iter(f"{W}ddList"):  # a list to choose from: what is chosen stands in no run
            choices = [one.get(VALUE, "") for one in field.findall(f"{W}listEntry")]
            at = integer(value(field, "result") or value(field, "default"))
            ElementTree.SubElement(run, f"{W}t").text = choices[at] if at < len(choices) else ""
        for code in run.iter(f"{W}instrText"):
            numbering.unknown += bool(re.match(r"\s*(LISTNUM|AUTONUM|EQ\b)", code.text or ""))
    return hidden


def _number(root: Element, numbering: Numbering) -> None:
    """Write automatic numbers before their paragraphs, which are then in no list of the converter's."""
    again = {id(one) for choice in root.iter(f"{SAME}Choice") for one in choice.iter(f"{W}p")}
    begun: Element | None = None  # a paragraph that goes on with the next one, as its mark was deleted
    for paragraph in root.iter(f"{W}p"):
        mark = paragraph.find(f"{W}pPr/{W}rPr")
        deleted = mark is not None and any(_name(one) in ("del", "moveFrom") for one in mark)
        gone = deleted or on(mark, "vanish") or id(paragraph) in again
        place = None if gone else numbering.of(paragraph)
        label = place and numbering.label(*place)
        if deleted:
            begun = paragraph if begun is None else begun
            continue
        start, begun = paragraph if begun is None else begun, None
        if label is None:
            continue
        properties = paragraph.find(f"{W}pPr")
        if properties is None:
            properties = Element(f"{W}pPr")
            paragraph.insert(0, properties)
        for one in properties.findall(f"{W}numPr"):
            properties.remove(one)
        none = ElementTree.SubElement(properties, f"{W}numPr")
        for name in ("ilvl", "numId"):
            ElementTree.SubElement(none, W + name, {VALUE: "0"})
        run = Element(f"{W}r")
        ElementTree.SubElement(run, f"{W}t", {BLANK: "preserve"}).text = label
        start.insert(start.find(f"{W}pPr") is not None, run)


def _latex(equation: Element) -> str:
    """An equation as LaTeX; '' where it has a form that the converter does not know."""
    from markitdown.converter_utils.docx.math.omml import oMath2Latex

    for fraction in equation.iter(f"{MATH}f"):
        if fraction.find(f"{MATH}fPr") is None:
            fraction.insert(0, Element(f"{MATH}fPr"))
    words = [one.text or "" for one in equation.iter(f"{MATH}t")]
    try:
        latex = str(oMath2Latex(equation).latex)
    except Exception:  # it raises whatever it stumbles over
        return ""
    return "" if missing([("\n".join(words), words)], latex) else f"${latex}$"


def _passages(root: Element) -> Iterable[tuple[str, list[str]]]:
    """Paragraphs of a part, whole and in runs, without deleted or moved text; the words of a chart."""
    hidden = {id(one) for gone in root.iter() if _name(gone) in ("del", "moveFrom", "Choice") for one in gone.iter()}
    looks = {
        id(word): [(one.tag, one.get(VALUE)) for name in LOOKS for one in run.findall(f"{W}rPr/{W}{name}")]
        for run in root.iter(f"{W}r") for word in run
    }  # fmt: skip
    for paragraph in [one for one in root.iter() if _name(one) in ("p", "v")]:
        inner = {
            id(one) for deep in paragraph.iter() if deep is not paragraph and _name(deep) == "p" for one in deep.iter()
        }
        runs: list[str] = []
        before: object = ""  # the look of the last run; what looks otherwise is no part of its number
        for one in paragraph.iter():
            if id(one) in hidden or id(one) in inner:
                continue
            if _name(one) in BETWEEN:
                before = ""
            elif _name(one) in ("t", "v") and one.text and one.text.strip():
                look = looks.get(id(one))
                if look == before and runs and runs[-1][-1:].isdigit() and one.text[:1].isdigit():
                    runs[-1] += one.text
                else:
                    runs.append(one.text)
                before = look
        if runs:
            yield "\n".join(runs), runs
