"""Some hundred documents with known facts: each is in the text, or its loss is said, or the file is refused."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest
from made_documents import WORD, at, book, docx_files, drawn, item, level, lists, looks, pdf, said, word, zipped

from locret_kit.cli.command import text_of
from locret_kit.text.reader import convert, read_stream

FACT = "The rent is 4711 euros"
OTHER = "Heating costs 815 euros"
REL = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
Case = tuple[str, bytes, list[str], list[str]]
"""A document's name, its bytes, facts in its text, and words of its losses."""
LONG = [
    "The rent of the house is 4711 euros", "a month, and it is due on the first", "of each month at the latest, in full,",
    "and it never grows by more than two", "of a hundred in any year of the term.",
]  # fmt: skip
RIGHT = [
    "Heating is paid by the tenant and", "costs 815 euros in winter months,", "which is read on the meters there by",
    "the landlord, who shows his figures", "to the tenant before the year ends.",
]  # fmt: skip
WIDTHS = {"T": 6.11, "R": 7.22, "H": 7.22, "c": 5, "t": 2.78}
"""Widths of Helvetica's letters of ten points; others are 5.56 wide."""
LEASE = "The rent of the house is 4711 euros a month, and it is due on the first of each month at the latest"
METER = "costs 815 euros in winter months, which is read on the meters there by the landlord"


def pdfs() -> Iterator[Case]:
    lines = [at(50, 760 - 12 * i, line) for i, line in enumerate(LONG)]
    for turn in (0, 90, 180, 270):
        yield f"page{turn}.pdf", drawn("".join(lines), page=f"/Rotate {turn}"), [LEASE], []
    matrices = {"0 1 -1 0": lambda i: (100 + 12 * i, 50), "-1 0 0 -1": lambda i: (500, 100 + 12 * i)}
    matrices["0 -1 1 0"] = lambda i: (500 - 12 * i, 700)
    for number, (matrix, place) in enumerate(matrices.items()):
        made = drawn("".join(at(*place(i), line, matrix) for i, line in enumerate(LONG)))
        yield f"letters{number}.pdf", made, [LEASE], []
    pairs = list(enumerate(zip(LONG, RIGHT, strict=True)))
    both = [at(50, 760 - 12 * i, a) + at(320, 760 - 12 * i, b) for i, (a, b) in pairs]
    yield "rows.pdf", drawn("".join(both)), [LEASE, METER], []
    turned = [at(100 + 12 * i, 50, a, "0 1 -1 0") + at(100 + 12 * i, 320, b, "0 1 -1 0") for i, (a, b) in pairs]
    yield "rows-turned.pdf", drawn("".join(turned)), [LEASE, METER], []
    apart = [at(50, 760 - 12 * i, a[0]) + at(50 + WIDTHS.get(a[0], 5.56), 760 - 12 * i, a[1:]) for i, (a, _) in pairs]
    apart = [one + at(320, 760 - 12 * i, b) for one, (i, (_, b)) in zip(apart, pairs, strict=True)]
    heading = at(50, 780, "2") + at(55.56, 780, "0") + at(61.12, 780, "07 rent")
    yield "apart.pdf", drawn(heading + "".join(apart)), ["2007 rent", LEASE, METER], []
    yield "digits.pdf", drawn(at(50, 720, "Rents") + at(50, 700, "1") + at(60, 700, "13")), ["1 13"], []
    line = "about 10|^6| metres, costs 700|^3| or 800.|^4| CO|_2| H|_2|O log|_2|8 10|^-6| m, 1|^1|/|_2"
    places = [(part.lstrip("^_"), {"^": 3.5, "_": -1.5}.get(part[:1], 0)) for part in line.split("|")]
    places = "".join(f"/F {6.5 if rise else 10} Tf {rise} Ts ({words}) Tj " for words, rise in places)
    raised = "about 10^6 metres, costs 700^3 or 800.^4 CO2 H2O log_(2)8 10^-6 m, 1 1/2"
    for turn in (0, 90):
        yield f"raised{turn}.pdf", drawn(f"BT 50 700 Td {places} ET", page=f"/Rotate {turn}"), [raised], []
    notes = "^1|2010 was x|^2| n, 2|^n+1| and y|_i|, 5|^1|\\244|_2| L|^A|TE"
    places = [(part.lstrip("^_"), {"^": 3.5, "_": -1.5}.get(part[:1], 0)) for part in notes.split("|")]
    places = "".join(f"/F {6.5 if rise else 10} Tf {rise} Ts ({words}) Tj " for words, rise in places)
    slash = "/Encoding << /BaseEncoding /WinAnsiEncoding /Differences [164 /fraction] >>"
    told = ["^(1)2010 was x^2 n, 2^(n+1) and y_i, 5 1/2"]
    yield "raised-words.pdf", drawn(f"BT 50 700 Td {places} ET", font=slash), told, []
    logo = at(50, 700, "L") + at(52, 702, "A").replace("F 10", "F 7") + at(57, 700, "T and")
    logo += at(50, 600, "A").replace("F 10", "F 30")
    logo += at(71, 610, "fter it") + at(300, 500, "big") + at(315.6, 503, "\\225").replace("F 10", "F 7")
    yield "unraised.pdf", drawn(logo), ["LAT and", "After it"], []
    stacked = at(50, 700, "x is") + at(80, 706, "47") + at(80, 694, "11") + at(95, 700, "euros")
    yield "stacked.pdf", drawn(stacked), ["x is 47/11 euros"], []
    small = at(50, 712, "Rent in euros") + at(50, 700, "12").replace("F 10", "F 7") + at(62, 700, "a month")
    yield "small.pdf", drawn(small), ["12 a month"], []
    grey = "/Type /XObject /Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray /BitsPerComponent 8 /Length 1"
    shown = {
        "page": "/Resources << /Font << /F 3 0 R >> /XObject << /I 6 0 R >> >>",
        "objects": (f"<< {grey} >>\nstream\nx\nendstream",),
    }
    for size, line in (
        (100, "1 picture left out"),
        (9, ""),
        (900, ""),
    ):  # a list's mark, and a scan with its text over it
        data = drawn(f"q {size} 0 0 {size} 0 0 cm /I Do Q {at(50, 700, FACT)}", **shown)
        made = data.replace(b"/Resources << /Font << /F 3 0 R >> >> ", b"")
        yield f"picture{size}.pdf", made, [FACT], [line] if line else []
    bars = "".join(f"{50 + 30 * i} 400 20 {high} re f " for i, high in enumerate((40, 90, 60)))
    curve = "".join(f"50 {300 + 9 * i} m 90 {340 + i} 120 200 200 300 c S " for i in range(3))
    for name, chart in (("bars", bars), ("curves", curve)):
        yield f"{name}.pdf", drawn(chart + at(50, 700, FACT)), [FACT], ["drawings, such as charts, on 1 page left out"]
    frame = "".join(f"50 {300 + 20 * i} 400 20 re S 50 {300 + 20 * i} 400 20 re f " for i in range(5))
    yield "frame.pdf", drawn(frame + at(50, 700, FACT)), [FACT], []
    even = f"/Encoding /WinAnsiEncoding /FirstChar 32 /LastChar 126 /Widths [{'600 ' * 95}]"
    for turn in ("1 0 0 1", "0 1 -1 0"):  # a row by one operator, its gutter of blanks or of none
        places = [(50, 760 - 12 * i) if turn[0] == "1" else (100 + 12 * i, 50) for i, _ in pairs]
        blanks = [at(*place, f"{a:<46}{b}", turn) for place, (_, (a, b)) in zip(places, pairs, strict=True)]
        none = [
            at(*place, f"{a}) {600 * (len(a) - 46)} ({b}", turn).replace("(", "[(", 1).replace(") Tj", ")] TJ")
            for place, (_, (a, b)) in zip(places, pairs, strict=True)
        ]
        for name, drawn_rows in (("blanks", blanks), ("none", none)):
            yield f"{name}{turn[0]}.pdf", drawn("".join(drawn_rows), font=even), [LEASE, METER], []
    table = "".join(at(50, 760 - 12 * i, f"{f'Item {i}':<20}{i}00 euros") for i in range(8))
    yield "table-rows.pdf", drawn(table, font=even), ["Item 3 300 euros", "Item 7 700 euros"], []
    columns = "".join(lines) + "".join(at(320, 760 - 12 * i, line) for i, line in enumerate(RIGHT))
    yield "columns.pdf", drawn(columns), [LEASE, METER], []
    table = "".join(at(50, 760 - 12 * i, f"Item {i}") + at(200, 760 - 12 * i, f"{i}00 euros") for i in range(8))
    yield "table.pdf", drawn(table), ["Item 3 300 euros", "Item 7 700 euros"], []
    yield "number.pdf", drawn(at(50, 60, "well insu-") + at(300, 40, "17"), at(50, 760, "lated")), ["insulated 17"], []
    beside = drawn(at(50, 60, "the last words") + at(500, 60, "17"), at(50, 760, "next"))
    yield "number2.pdf", beside, ["last words 17 next"], []
    broken = drawn(at(50, 760, "a state-of-") + at(50, 748, "the-art X-") + at(50, 736, "Ray"))
    yield "hyphens.pdf", broken, ["state-of-the-art X-Ray"], []
    differences = "/Encoding << /BaseEncoding /WinAnsiEncoding /Differences [1 /fi /fl /ffi] >>"
    yield "ligature.pdf", drawn(at(50, 700, r"the o\003ce \002oor \001ve"), font=differences), ["office floor five"], []
    cmap = (
        "begincmap 1 begincodespacerange <00> <ff> endcodespacerange 3 beginbfchar <01> <fb01> <02> <fb02> <03> <e003> "
        "endbfchar endcmap"
    )
    objects = (f"<< /Length {len(cmap)} >>\nstream\n{cmap}\nendstream",)
    font = "/Encoding /WinAnsiEncoding /ToUnicode 6 0 R"
    unicode = drawn(at(50, 700, r"\002oor \001ve \003\003"), font=font, objects=objects)
    yield "unicode.pdf", unicode, ["floor five"], ["2 characters without Unicode, the first on page 1"]
    form = (
        "<< /Type /Annot /Subtype /Widget /FT /Tx /T (rent) /V (4711 euros) /Rect [50 600 200 620] >>",
        "<< /Type /Annot /Subtype /Widget /FT /Ch /Ff 131072 /Opt [(yearly)] /T (due) /V (yearly) /Rect [50 5 200 20] >>",
        "<< /Type /Annot /Subtype /Text /Contents (Heating costs 815 euros) /Rect [50 400 60 410] >>",
    )
    fields = {"page": "/Annots [6 0 R 7 0 R 8 0 R]", "catalog": "/AcroForm << /Fields [6 0 R 7 0 R] >>"}
    filled = drawn(at(50, 760, "Lease"), objects=form, **fields)
    yield "form.pdf", filled, ["Lease", "rent: 4711 euros", "due: yearly", OTHER], []
    whole = pdf([[FACT]])
    begin, last = (int(re.search(rb"startxref\n(\d+)", whole)[1]), len(whole))
    update = b"1 0 obj\n<< /Type /Catalog /Pages 2 0 R >>\nendobj\nxref\n1 1\n%010d 00000 n \n"
    update += b"trailer << /Size 6 /Root 1 0 R /Prev %d >>\n"
    update = update % (last, begin) + b"startxref\n%d\n%%%%EOF" % (last + update.index(b"xref"))
    around = {
        "zeros": whole + bytes(6000), "html": whole + b"<html>" + b"x" * 3000, "line": whole.rstrip(), "update": whole + update,
        "http": b"HTTP/1.1 200 OK\r\n\r\n" + whole,
        "mail": b"x" * 3000 + b"\n" + whole + bytes(3000), "padded": whole + update + bytes(3000),
    }  # fmt: skip
    for name, data in around.items():
        yield f"{name}.pdf", data, [FACT], []
    cuts = {"": whole[:-60], "-padded": whole[:-60] + bytes(5000), "-html": whole[:-60] + b"<html>"}
    cuts["-update"] = whole + update[:-9]
    for name, data in (cuts | {"-update-padded": whole + update[:40] + bytes(3000)}).items():
        yield f"cut{name}.pdf", data, [], ["its end is missing"]
    yield "blank.pdf", drawn(at(50, 700, FACT), *[""] * 9), [FACT], ["9 of 10 pages have no text", "run OCR"]
    made = drawn(at(50, 700, FACT), at(300, 40, "2"), at(300, 40, "iii"))
    yield "numbered.pdf", made, [FACT], ["2 of 3 pages have no text"]


def words() -> Iterator[Case]:
    fact = f"<w:p>{said(FACT)}</w:p>"
    for kind in ("ins", "moveTo", "bdo", "dir", "smartTag", "fldSimple", "customXml", "hyperlink"):
        yield f"{kind}.docx", word(f"<w:p><w:{kind}>{said(FACT)}</w:{kind}></w:p>"), [FACT], []
    for kind in ("ins", "moveTo", "customXml"):
        yield f"{kind}-block.docx", word(f"<w:{kind}>{fact}</w:{kind}>"), [FACT], []
    yield "sdt.docx", word(f"<w:sdt><w:sdtContent>{fact}</w:sdtContent></w:sdt>"), [FACT], []
    content = f"<w:txbxContent>{fact}<w:p>{said(OTHER)}</w:p></w:txbxContent>"
    box = f"<wps:txbx>{content}</wps:txbx>"
    old = f"<w:pict><v:shape><v:textbox>{content}</v:textbox></v:shape></w:pict>"
    choice = f"<mc:Choice>{box}</mc:Choice>"
    for name, inner in {
        "new": f"<w:drawing>{box}</w:drawing>", "old": old,
        "both": f"<mc:AlternateContent>{choice}<mc:Fallback>{old}</mc:Fallback></mc:AlternateContent>",
        "no-old": f"<mc:AlternateContent>{choice}</mc:AlternateContent>",
        "picture": f"<mc:AlternateContent>{choice}<mc:Fallback><w:pict/></mc:Fallback></mc:AlternateContent>",
    }.items():  # fmt: skip
        yield f"box-{name}.docx", word(f"<w:p>{said('Around.')}<w:r>{inner}</w:r></w:p>"), ["Around.", FACT, OTHER], []
    cell = f"<w:tbl><w:tr><w:tc><w:p><w:r><w:drawing>{box}</w:drawing></w:r></w:p></w:tc></w:tr></w:tbl>"
    yield "box-cell.docx", word(cell), [FACT, OTHER], []
    number = "<m:r><m:t>%s</m:t></m:r>"
    for name, properties in (("whole", "<m:fPr/>"), ("bare", "")):
        fraction = f"<m:f>{properties}<m:num>{number % 47}</m:num><m:den>{number % 11}</m:den></m:f>"
        equation = f"<w:p><m:oMath>{number % 'x=815+'}{fraction}</m:oMath></w:p>"
        yield f"equation-{name}.docx", word(equation), ["x=815+", "47", "11"], []
    alone = f"<m:oMathPara><m:oMath>{number % 'y=4711'}</m:oMath></m:oMathPara>"
    yield "equation-block.docx", word(f"<w:p>{alone}</w:p>" + alone.replace("y=4711", "z=42")), ["y=4711", "z=42"], []
    breaks = '<w:t>4711</w:t><w:cr/><w:t>euros</w:t><w:br w:type="page"/><w:t>rent</w:t><w:ptab/><w:t>due</w:t>'
    yield "breaks.docx", word(f"<w:p><w:r>{breaks}</w:r></w:p>"), ["4711 euros rent due"], []
    parts = {
        "header1": ("hdr", fact, "1 header left out"), "footer3": ("ftr", fact, "1 footer left out"),
        "comments": ("comments", "".join(f'<w:comment w:id="{n}">{fact}</w:comment>' for n in "12"), "2 comments left out"),
        "footnotes": ("footnotes", f'<w:footnote w:id="3">{fact}</w:footnote>', "1 note left out"),
    }  # fmt: skip
    for name, (root, inner, loss) in parts.items():
        yield f"{name}.docx", word("", **{name: f"<w:{root} {WORD}>{inner}</w:{root}>"}), ["Before."], [loss]
    again = f"<w:hdr {WORD}><w:p>{said('Before.')}</w:p></w:hdr>"
    yield "header-again.docx", word("", header1=again), ["Before."], []
    chart = f"<c:chartSpace {WORD}><a:p><a:r><a:t>{FACT}</a:t></a:r></a:p></c:chartSpace>"
    yield "chart.docx", word("", **{"charts/chart1": chart}), ["Before."], ["1 chart left out"]
    unknown = word(f"<w:p><w:strange>{said(FACT)}</w:strange></w:p>")
    yield "unknown.docx", unknown, ["Before."], ["1 passage left out"]
    files = docx_files([FACT])
    yield "sheet.docx", zipped(files | {"word/embeddings/a.xlsx": "x"}), [FACT], ["1 embedded file left out"]

    def changed(old: str, new: str) -> dict[str, str]:
        return {name.replace(old, new): str(part).replace(old, new) for name, part in files.items()}

    spaces = "schemas.openxmlformats.org/wordprocessingml/2006/main", "purl.oclc.org/ooxml/wordprocessingml/main"
    yield "strict.docx", zipped(changed(*spaces)), [FACT], []
    renamed = changed("document.xml", "document2.xml")
    moved = f"<w:p><w:moveTo>{said(OTHER)}</w:moveTo></w:p></w:body>"
    renamed["word/document2.xml"] = renamed["word/document2.xml"].replace("</w:body>", moved)
    yield "renamed.docx", zipped(renamed), [FACT, OTHER], []


def numbered() -> Iterator[Case]:
    """Word files whose numbers, heights and strokes decide what they say."""
    clauses = level(0, "Article %1", "upperRoman") + level(1, "%1.%2.", more="<w:isLgl/>")
    clauses += level(2, "(%3)", "lowerLetter")
    clauses += level(3, "%4)", "lowerRoman") + level(4, "x", "bullet")
    body = "".join(item(words, at) for words, at in zip("ABCDEFGHIJ", (0, 1, 2, 2, 3, 0, 1, 2, 4, 2), strict=True))
    said_so = ["Article I A 1.1. B (a) C (b) D i) E Article II F 2.1. G (a) H * I (b) J"]
    yield "levels.docx", word(body, numbering=lists(clauses)), said_so, []
    five = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="5"/></w:lvlOverride>'
    body = item("A", 0) + item("B", 0) + item("C", 0, 2) + item("D", 0, 2)
    yield "again.docx", word(body, numbering=lists(level(0, "%1."), five)), ["1. A 2. B 5. C 6. D"], []
    other = f'<w:lvlOverride w:ilvl="0">{level(0, "%1)", "lowerLetter")}</w:lvlOverride>'
    yield "other.docx", word(body, numbering=lists(level(0, "%1."), other)), ["1. A 2. B c) C d) D"], []
    never = level(0, "%1.") + level(1, "Clause %2", more='<w:lvlRestart w:val="0"/>')
    body = item("A", 0) + item("B", 1) + item("C", 0) + item("D", 1)
    yield "never.docx", word(body, numbering=lists(never)), ["1. A Clause 1 B 2. C Clause 2 D"], []
    made = word(item("B", 1) + item("A", 0), numbering=lists(level(0, "%1") + level(1, "%1.%2")))
    yield "orphan.docx", made, ["1.1 B 1 A"], []
    forms = level(0, "%1", "ordinal") + level(1, "%2", "decimalZero") + level(2, "-", "none")
    forms += level(3, "%4", "upperLetter", "", 28)
    forms += level(4, "Sec%5:", more='<w:suff w:val="nothing"/>')
    made = word("".join(item(x, i) for i, x in enumerate("ABCDE")), numbering=lists(forms))
    yield "forms.docx", made, ["1st A 01 B - C BB D Sec1:E"], []
    unknown = word(item(FACT, 0) + item(OTHER, 0), numbering=lists(level(0, "%1", "ganada")))
    lost = "2 automatic numbers or equation fields (some in digits) left out"
    yield "ganada.docx", unknown, [f"1 {FACT} 2 {OTHER}"], [lost]
    deleted = item("4711 ", 0).replace("</w:pPr>", "<w:rPr><w:del/></w:rPr></w:pPr>")
    deleted = deleted.replace("<w:t>", "<w:t xml:space='preserve'>")
    made = word(item("A", 0) + deleted + item("B", 0), numbering=lists(level(0, "%1.")))
    yield "mark.docx", made, ["1. A 2. 4711 B"], []
    ruby = f"<w:ruby><w:rt>{said('kan')}</w:rt><w:rubyBase>{said(FACT)}</w:rubyBase></w:ruby>"
    yield "ruby.docx", word(f"<w:p><w:r>{ruby}</w:r></w:p>"), [f"{FACT}(kan)"], []
    gone = '<w:style w:type="paragraph" w:styleId="Gone"><w:rPr><w:vanish/><w:strike/></w:rPr></w:style>'
    gone = {"styles": f"<w:styles {WORD}>{gone}</w:styles>"}
    yield "gone.docx", word(item(OTHER, style="Gone"), **gone), ["Before."], ["1 hidden passage left out"]
    equation = said("x").replace("<w:t>x</w:t>", "<w:instrText> EQ \\f(47;11) </w:instrText>")
    yield "eq.docx", word(f"<w:p>{equation}{said(FACT)}</w:p>"), [FACT], ["1 automatic number or equation fields"]
    field = "<w:p><w:r><w:instrText> LISTNUM </w:instrText></w:r>"
    yield "listnum.docx", word(f"{field}{said(FACT)}</w:p>"), [FACT], ["1 automatic number"]
    deep = level(0, "%1", more='<w:pStyle w:val="H1"/>') + level(1, "%1.%2", more='<w:pStyle w:val="H2"/>')
    own = "<w:pPr><w:numPr>%s</w:numPr></w:pPr>"
    name = '<w:style w:type="paragraph" w:styleId="%s"><w:name w:val="%s"/>%s</w:style>'
    base = '<w:basedOn w:val="H1"/>'
    raised = '<w:style w:type="character" w:styleId="Up"><w:rPr><w:vertAlign w:val="superscript"/></w:rPr></w:style>'
    styles = name % ("H1", "heading 1", own % '<w:numId w:val="1"/>') + raised
    styles += name % ("H3", "x", '<w:basedOn w:val="H2"/>')
    styles = f"<w:styles {WORD}>{styles}{name % ('H2', 'heading 2', base)}</w:styles>"
    body = "".join(item(x, style=f"H{n}") for x, n in zip("ABCDE", (1, 2, 3, 1, 2), strict=True)) + item(
        "F", 0, 0, "H1"
    )
    made = word(body, numbering=lists(deep), styles=styles)
    yield "styles.docx", made, ["# 1 A ## 1.1 B 1.2 C # 2 D ## 2.1 E # F"], []
    up, down = (f'<w:vertAlign w:val="{kind}script"/>' for kind in ("super", "sub"))
    places = [("10", ""), ("6", up), (" m, H", ""), ("2", down), ("O, 700", ""), ("3", '<w:rStyle w:val="Up"/>'),
              (", x", ""), ("n+1", up),
              ("; 5", ""), ("2", '<w:position w:val="6"/>'), (" log", ""), ("2", down), ("8", "")]  # fmt: skip
    body = f"<w:p>{''.join(looks(*one) for one in places)}</w:p>"
    yield "places.docx", word(body, styles=styles), ["10^6 m, H2O, 700^3, x^(n+1); 5^2 log_(2)8"], []
    places = (("700", "<w:dstrike/>"), ("800", ""), ("900", "<w:vanish/>"), ("47", ""), ("11", ""))
    struck = "".join(looks(*one) for one in places)
    yield "struck.docx", word(f"<w:p>{struck}</w:p>"), ["~~700~~8004711"], ["1 hidden passage left out"]
    notes = {
        kind: f'<w:{kind} {WORD}><w:{kind[:-1]} w:id="3"><w:p>{said(words)}</w:p></w:{kind[:-1]}></w:{kind}>'
        for kind, words in (("footnotes", FACT), ("endnotes", OTHER))
    }
    marks = "".join(f'{said("700")}<w:r><w:{kind}Reference w:id="3"/></w:r>' for kind in ("footnote", "endnote"))
    made = word(f"<w:p>{marks}</w:p>", **notes)
    yield "notes.docx", made, ["700[[1]](#", "700[[i]](#", f"[1] {FACT}", f"[i] {OTHER}"], []
    number = "<m:r><m:t>%s</m:t></m:r>"
    power = f"<m:sSup><m:e>{number % 10}</m:e><m:sup>{number % 6}</m:sup></m:sSup>"
    half = f"<m:f><m:num>{number % 47}</m:num><m:den>{number % 11}</m:den></m:f>"
    made = word(f"<w:p><m:oMath>{power}{number % '+'}{half}</m:oMath></w:p>")
    yield "equations.docx", made, [r"$10^{6}+\frac{47}{11}$"], []
    before = f"<m:sPre><m:sub>{number % 47}</m:sub><m:sup>{number % 11}</m:sup><m:e>{number % 'C'}</m:e></m:sPre>"
    yield "before.docx", word(f"<w:p><m:oMath>{before}</m:oMath></w:p>"), ["47 11 C"], ["1 equation without its form"]
    menu = '<w:fldChar w:fldCharType="begin"><w:ffData><w:ddList><w:result w:val="1"/><w:listEntry w:val="4"/>'
    menu += '<w:listEntry w:val="5"/>'
    yield "menu.docx", word(f"<w:p><w:r>{menu}</w:ddList></w:ffData></w:fldChar></w:r></w:p>"), ["Before. 5"], []
    for n, (target, line) in enumerate({
        "media/a.png": "1 picture left out", "/word/media/a.png": "1 picture left out",
        "media/b.png": "1 picture missing in",
        'https://192.0.2.1/a.png" TargetMode="External': "1 picture missing in",
        'file:///C:/a.png" TargetMode="External': "1 picture missing in", "": "",
    }.items()):  # fmt: skip
        files = docx_files([FACT])
        main = str(files["word/document.xml"])
        body = main[main.index("<w:p>") :].replace("r:link", "r:embed").replace('"r1"', '"r1"' if target else '"r9"')
        relation = f'<Relationship Id="r1" Type="{REL}/image" Target="{target}"/>'
        files |= {"word/document.xml": main[: main.index("<w:p>")] + body, "word/media/a.png": "x"}
        files["word/_rels/document.xml.rels"] = re.sub(
            r"<Relationship .*/>", relation, str(files["word/_rels/document.xml.rels"])
        )
        yield f"picture{n}.docx", zipped(files), [FACT], [line] if line else []


def books() -> Iterator[Case]:
    page = "<html><body><p>%s</p></body></html>"
    item, ref = '<item id="%s" href="%s"/>', '<itemref idref="%s"/>'

    def of(href: str, entry: str, *, html: str | bytes = page % FACT, **more: str) -> bytes:
        p = f"{more['prefix']}:" if "prefix" in more else ""
        manifest, spine = (one.replace("<", f"<{p}") for one in (item % ("a", href), ref % "a"))
        return book({entry: html}, manifest, spine, **more)

    yield "plain.epub", of("a.xhtml", "a.xhtml"), [FACT], []
    yield "prefix.epub", of("a.xhtml", "a.xhtml", prefix="opf"), [FACT], []
    yield "up.epub", of("../text/a.xhtml", "text/a.xhtml", folder="OEBPS/"), [FACT], []
    yield "case.epub", of("Text/A.XHTML", "OEBPS/text/a.xhtml", folder="OEBPS/"), [FACT], []
    yield "percent.epub", of("a%20%C3%A9.xhtml", "a \u00e9.xhtml"), [FACT], []
    yield "accent.epub", of("e\u0301.xhtml", "\u00e9.xhtml"), [FACT], []
    yield "slash.epub", of(r"text\a.xhtml", "text/a.xhtml"), [FACT], []
    yield "fragment.epub", of("a.xhtml#top", "a.xhtml"), [FACT], []
    space = 'xmlns:h="http://www.w3.org/1999/xhtml"'
    prefixed = f'<?xml version="1.0"?><h:html {space}><h:style>x</h:style><h:body><h:p>{FACT}</h:p></h:body></h:html>'
    yield "xhtml-prefix.epub", of("a.xhtml", "a.xhtml", html=prefixed), [FACT], []
    for encoding in ("utf-16", "iso-8859-1", "shift_jis"):
        word = "\u65e5\u672c" if encoding == "shift_jis" else "caf\u00e9"
        html = f'<?xml version="1.0" encoding="{encoding}"?>' + page % word
        yield f"{encoding}.epub", of("a.xhtml", "a.xhtml", html=html.encode(encoding)), [word], []
    latin = (page % "one caf\u00e9").encode("latin-1")
    yield "wrong.epub", of("a.xhtml", "a.xhtml", html=latin), ["one"], ["1 character not in utf-8"]
    open_comment = f"<html><body><!-- never ends <p>{FACT}</p></body></html>"
    yield "comment.epub", of("a.xhtml", "a.xhtml", html=open_comment), [FACT], []
    two, spine = item % ("a", "a.xhtml") + item % ("b", "b.xhtml"), ref % "a" + ref % "b"
    lost = book({"a.xhtml": page % FACT}, two, spine + ref % "c")
    yield "lost.epub", lost, [FACT], ["2 of 3 chapters of the spine are not in the file"]
    item_a, css = item % ("a", "a.xhtml"), "h1::before { content: counters(a, '.') }"
    styled = book({"a.xhtml": page % FACT, "a.css": css}, item_a, ref % "a")
    yield "styled.epub", styled, [FACT], ["numbers of lists or headings"]
    pictured = {"a.xhtml": page % f"{FACT}<img src='x%20y.png'/>", "x y.png": "x"}
    shown = book(pictured, item_a, ref % "a")
    yield "shown.epub", shown, [FACT], ["1 picture left out"]
    pictures = book({"a.xhtml": page % FACT, "b.xhtml": "<img src='x.png'/>"}, two, spine)
    yield "pictures.epub", pictures, [FACT], ["1 of 2 chapters are pictures without text"]


YEN = "\u5bb6\u8cc3\u306f4711\u5186\u3067\u3059"
TEXTS = {
    "utf-8": f"{YEN} \u0410\u0440\u0435\u043d\u0434\u0430 \u0627\u064a\u062c\u0627\u0631", "utf-16": FACT,
    "utf-16-le": FACT, "utf-16-be": FACT, "utf-32": FACT, "shift_jis": YEN, "euc_jp": YEN, "iso2022_jp": YEN,
    "gb18030": "\u6bcf\u6708\u623f\u79df\u662f\u56db\u5343\u5143", "big5": "\u623f\u79df\u56db\u5343",
    "euc_kr": "\uc6d4\uc138 4711", "koi8_r": "\u0410\u0440\u0435\u043d\u0434\u0430 4711 \u0440\u0443\u0431",
    "cp1252": "le loyer est de 4711 \u20ac, pay\u00e9", "latin-1": "le loyer pay\u00e9",
}  # fmt: skip
"""Texts by their encodings."""


def pages() -> Iterator[Case]:
    for encoding, text in TEXTS.items():
        page = f"<html><head><meta charset='{encoding}'></head><body><p>{text}</p></body></html>"
        if encoding not in ("utf-32", "utf-16-le", "utf-16-be"):  # no page is in UTF-32
            yield f"{encoding}.html", page.encode(encoding), [text], []
    bare = f"<html><body><p>{TEXTS['cp1252']}</p></body></html>"
    yield "bare.html", bare.encode("cp1252"), [], ["names no encoding"]
    yield "false.html", f"<meta charset='iso-8859-1'><p>{TEXTS['utf-8']}</p>".encode(), [TEXTS["utf-8"]], []
    made = b"<meta charset='utf-8'><p>one \xff\xfe two</p>"
    yield "utf8-not.html", made, ["one", "two"], ["2 characters not in utf-8"]
    made = f"<html><head><title>{FACT}</title></head><body>More.</body></html>".encode()
    yield "title.html", made, [FACT, "More."], []
    made = f"<body><p>One.</p></body><body><p>{FACT}</p></body>".encode()
    yield "bodies.html", made, ["One."], ["1 passage left out"]
    form = f"<p>Lease</p><input name='rent' value='{FACT}'><iframe src='x'></iframe>".encode()
    yield "form.html", form, ["Lease"], ["1 field of a form left out", "1 frame with other pages"]
    yield "comment.html", f"<p>One.</p><!-- never ends <p>{FACT}</p>".encode(), ["One.", FACT], []
    yield "labels.html", f"<meta charset=x-sjis><p>{YEN}</p>".encode("shift_jis"), [YEN], []
    head = "<head><!-- <title>Old</title> --><title>New</title><script>'<!--'</script></head>"
    boxes = "<body><nav>Home</nav><details><summary>More</summary>of it</details><p>One.</p><!-- -->"
    yield "boxes.html", f"{head}{boxes}".encode(), ["**Title:** New Home More of it One."], []


def places() -> Iterator[Case]:
    """Pages whose numbers are made by their lists, heights and strokes."""
    for n, (html, fact, line) in enumerate([
        ("10<sup>6</sup> m, H<sub>2</sub>O, log<sub>2</sub>8, 1<sup>st</sup>", "10^6 m, H2O, log_(2)8, 1st", ""),
        ("700<sup><a href='#f'>3</a></sup> and 700<sup>[3]</sup>", "700^[3](#f) and 700[3]", ""),
        ("1<sup>1</sup>/<sub>2</sub> 5<sup>6</sup>/ml 1&frac12;", "1 1/2 5^6/ml 1\u00bd", ""),
        ("10<span style='vertical-align: super'>6</span> <span>47</span>11", "10^6 4711", ""),
        ("<math><msup><mn>10</mn><mn>6</mn></msup><mfrac><mn>47</mn><mn>11</mn></mfrac></math>", "10^(6)47/11", ""),
        ("<ol start=5 type=a><li>x<li>y</ol>", "e. x f. y", ""), ("<ol reversed><li>x<li>y</ol>", "2. x 1. y", ""),
        ("<ol style='list-style-type: upper-roman'><li>x<li value=9>y<li>z</ol>", "I. x IX. y X. z", ""),
        ("<del>700</del>800 <strike>1</strike>2 <span style='text-decoration:line-through'>9</span>8",
         "~~700~~800 ~~1~~2 ~~9~~8", ""),
        ("one<div hidden>two</div><p style='color:red; display:none'>three", "one", "2 hidden passages left out, such as 'two'"),
        ("<style>h1::before{content: counter(s)}</style><h1>A</h1>", "# A", "numbers of lists or headings"),
        ("<style>ol{list-style-type: lower-alpha}</style><ol><li>A</ol>", "a. A", ""),
        ("<style>ol{list-style-type: lower-greek}</style><ol><li>A</ol>", "1. A", "numbers of lists or headings"),
        ("<style>.a,.b {color:red;vertical-align:super} a:hover{vertical-align:sub}</style>10<span class=b>6</span> <a>x</a>",
         "10^6 x", ""),
        ("<style>.s1 {font-size:.6em;position: relative;\ntop:-.3em} .h{display: none} li{list-style:none}</style>10"
         "<span class=s1>6</span><span class=h>x</span><ol><li>1. a</ol><p class=h>b",
         "10^6 * 1. a b", "1 hidden passage left out, such as 'x'"),
        ("10<span style='position:relative;top:-3pt;font-size:8pt'>6</span> 7<font style='vertical-align:-2pt;font-size:8pt'>x",
         "10^6 7_x", ""),
        ("<ruby>A<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>b", "A(kan)b", ""),
        ("<style>a::after{content:''} ul{list-style:none}</style>A", "A", ""),
        ("<img alt=Sales src='data:image/png;base64,AAAA'>x", "![Sales]()x", "1 picture left out"),
    ]):  # fmt: skip
        yield f"places{n}.html", f"<body>{html}</body>".encode(), [fact], [line] if line else []


def texts() -> Iterator[Case]:
    for encoding, text in TEXTS.items():
        facts, losses = ([text], []) if encoding == "utf-8" else ([], ["UTF-"])
        yield f"{encoding}.txt", text.encode(encoding), facts, losses
    yield "crlf.csv", f"a,b\r\n{FACT}\r\n{OTHER}\r".encode(), [f"a,b\n{FACT}\n{OTHER}\n"], []
    yield "old.rtf", b"{\\rtf1 rent}", [], ["save it as .docx"]
    yield "old.doc", b"\xd0\xcf\x11\xe0" + bytes(600), [], ["save it as .docx"]
    yield "deck.pptx", zipped({"ppt/slides/slide1.xml": "<x/>"}), [], ["save it as PDF"]
    yield "sheet.xlsx", zipped({"xl/workbook.xml": "<x/>"}), [], ["save it as PDF"]
    yield "note.odt", zipped({"mimetype": "x", "content.xml": "<x/>"}), [], ["save it as .docx or PDF"]


CASES = [*pdfs(), *words(), *numbered(), *books(), *pages(), *places(), *texts()]


@pytest.mark.parametrize(("name", "data", "facts", "losses"), CASES, ids=[case[0] for case in CASES])
def test_a_fact_is_in_the_text_or_its_loss_is_said(name, data, facts, losses):
    assert len(data) < 8192
    lost: list[str] = []
    try:
        text = read_stream(io.BytesIO(data), name, lost=lost.append)
    except ValueError as error:
        text, lost = "", [str(error)]
    shown = text if name.endswith((".csv", ".txt")) else re.sub(r"\s+", " ", text)
    for fact in facts:
        assert shown.count(fact) == 1, (shown, lost)
    for words in losses:
        assert any(words in line for line in lost), (shown, lost)
    assert facts or not text, text
    assert losses or not lost, lost
    assert all(line.startswith(name) and "\n" not in line for line in lost)


LOOKED = """
import contextlib, io, sys
from locret_kit.cli import chat, documents, infer
mains = {**vars(documents), "chat": chat.main, "infer": infer.main}
for line in sys.stdin.read().splitlines():
    command, *words = line.split("\t")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = mains[command](words)
    print(status, "torch" in sys.modules, said.getvalue().strip(), sep="\t")
"""


def test_a_file_is_looked_at_before_torch_is_imported(tmp_path):
    """A name that is wrong, a scan, an old format: each is said without the seconds that loading takes."""
    files = {
        "scan.pdf": drawn("", ""), "empty.txt": b"", "blank.txt": b" \n", "latin.txt": b"x" * 70000 + b"\xe9",
        "a.rtf": b"{\\rtf1", "a.locret": b"x" * 99, "deck.pptx": zipped({"ppt/slides/slide1.xml": "<x/>"}), "prompts.jsonl": b"",
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    heads = ["--ckpt", "checkpoints/smollm2-135m-locret"]
    told = {
        "scan.pdf": "run OCR", "empty.txt": "no text", "blank.txt": "no text", "latin.txt": "not UTF-8", "a.rtf": "as .docx",
        "deck.pptx": "as PDF", "none.pdf": "No such file",
    }  # fmt: skip
    cases = [(["infer", name, *heads, "--question", "x"], words) for name, words in told.items()]
    cases += [(["read", name, "-o", "new.locret", *heads], words) for name, words in told.items()]
    cases += [
        (["chat", "scan.pdf", *heads], "run OCR"),
        (["infer", "--batch", "none.jsonl", "-o", "out.jsonl", *heads], "No such file"),
        (["infer", "--batch", "prompts.jsonl", "-o", "out.jsonl", *heads], "holds no prompts"),
        *(
            (words, "no saved cache")
            for words in (["ask", "a.locret", "x"], ["kept", "a.locret"], ["chat", "a.locret"])
        ),
        (["read", "scan.pdf", "-o", "a.locret", "--append"], "no saved cache"),
    ]
    lines, code = "\n".join("\t".join(words) for words, _ in cases), [sys.executable, "-c", LOOKED]
    done = subprocess.run(code, input=lines, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (line, words), result in zip(cases, done.stdout.splitlines(), strict=True):
        status, torch, error = result.split("\t")
        assert (status, torch) == ("1", "False") and words in error and len(error) < 200, (line, result)


def test_documents_that_take_a_parser_long_are_short_work_or_end(tmp_path, monkeypatch):
    """The commands convert under limits, as the server does; what took a square of time no longer does."""
    began = time.process_time()
    for name, data in {
        "blanks.html": b"<p>one" + b" " * 300_000 + b"two</p>", "lines.html": b"<p>one" + b"\n" * 300_000 + b"two</p>",
        "comments.html": b"<p>one" + b"<!--" * 40_000 + b"two</p>",
    }.items():  # fmt: skip
        assert read_stream(io.BytesIO(data), name).split() == ["one", "two"]
    assert time.process_time() - began < 5
    (tmp_path / "a.html").write_bytes(b"<p>one two</p>")
    assert list(text_of(str(tmp_path / "a.html"))) == ["one two"]
    monkeypatch.setattr("locret_kit.cli.command.convert", partial(convert, text=3))
    with pytest.raises(ValueError, match="its text has 7 bytes, above the limit of 3"):
        text_of(str(tmp_path / "a.html"))
