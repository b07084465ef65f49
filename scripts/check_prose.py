"""List where pages and docstrings break docs/writing.md: long sentences, long bullets, and phrases with a plain form.

    scripts/check_prose.py [FILES ...]     # pages of the top and of docs/, docstrings of locret_kit/ and kernels/ by default

It advises: exit status 0 unless a file cannot be read. Tables, code and generated pages are left out.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SENTENCE, BULLET = 35, 40  # words
PHRASES = {
    r"\b(of|by|for|in|on|to|from|with) which\b": "two sentences, or 'whose', 'where'",
    r"(?<=[a-z,] )what (is|was|were|are|it|they|he|she|a|an|the|no|has|had|they)\b": "the noun",
    r"\bso many (tokens|slots|texts|rows|words)\b": "n tokens",
    r"\b(hangs?|hung) on\b": "depends on",
    r"\bbeside\b": "besides, next to, with",
    r"\b(is|are|was|were) (told|said)\b": "reports, warns",
    r"(^|[.:;] )(Nor|Neither) (is|does|do|are|has|can)\b": "subject first",
    r"\bas far as\b": "up to, where, if",
    r"\bnothing but\b": "only",
    r"^As code\b": "a docstring that stands alone",
}
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example|Examples|Note):$")
Block = tuple[int, str]


def blocks(text: str) -> Iterator[Block]:
    """Each paragraph or bullet with its first line's number; code, tables, headings and HTML left out."""
    number, lines, fenced = 0, [], False
    for i, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        skipped = fence or fenced or not line.strip() or line.lstrip()[0] in "|#<!" or line.startswith("    ")
        if lines and (skipped or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield number, " ".join(lines)
            lines = []
        if not skipped:
            number = number if lines else i
            lines.append(line.strip())


def docstrings(source: str) -> Iterator[Block]:
    """Each paragraph of the docstrings of a module, those below an assignment too, with its first line's number."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines, inside = [line.removeprefix(" " * node.col_offset) for line in node.value.value.splitlines()], False
            for i, line in enumerate(lines):  # an entry below "Args:" or the like is a paragraph, not code
                inside = (inside and (not line or line.startswith(" "))) or bool(SECTION.match(line))
                if inside:
                    entry = line.startswith("    ") and not line.startswith("     ")
                    lines[i] = "" if SECTION.match(line) else f"{'- ' * entry}{line.strip()}"
            for number, block in blocks("\n".join(lines)):
                yield node.lineno + number - 1, block


def complaints(block: str) -> Iterator[str]:
    """Complaints about one paragraph or bullet."""
    plain = re.sub(r"(`+)[^`]*\1", "code", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", block))
    if re.match(r"([-*]|\d+\.) ", plain) and (n := len(plain.split())) > BULLET + 1:
        yield f"bullet of {n} words: at most {BULLET}"
    for sentence in re.split(r"(?<=[.?!:])\s+(?=[A-Z*`(])", plain):
        if (n := len(sentence.split())) > SENTENCE:
            yield f"sentence of {n} words: at most {SENTENCE}: {sentence[:60]} ..."
    for pattern, better in PHRASES.items():
        for found in re.finditer(pattern, plain, re.I):
            yield f"'{found[0].strip()}': {better}"


def report(file: Path) -> list[str]:
    """``FILE:LINE: complaint`` for each complaint about a page, or about the docstrings of a Python file."""
    text = file.read_text(encoding="utf-8")
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    found = sorted(docstrings(text)) if file.suffix == ".py" else blocks(text)
    return [f"{name}:{line}: {complaint}" for line, block in found for complaint in complaints(block)]


def main(files: list[Path]) -> None:
    """Print a line for each complaint, and their number."""
    lines = [line for file in files for line in report(file)]
    print(*lines, f"{len(lines)} in {len(files)} files", sep="\n")


if __name__ == "__main__":
    pages = (page for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if page.name != "models.md")
    code = (file for folder in ("locret_kit", "kernels") for file in (ROOT / folder).rglob("*.py"))
    main([Path(name).resolve() for name in sys.argv[1:]] or [*sorted(pages), *sorted(code)])
