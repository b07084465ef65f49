"""List where pages break docs/writing.md: long sentences, long bullets, and phrases with a plain form.

    scripts/check_prose.py [PAGES ...]     # those of the top and of docs/ by default

It advises: exit status 0 unless a page cannot be read. Tables, code and generated pages are left out.
"""

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
}


def blocks(text: str) -> Iterator[tuple[int, str]]:
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


def complaints(block: str) -> Iterator[str]:
    """Complaints about one paragraph or bullet."""
    plain = re.sub(r"`[^`]*`", "code", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", block))
    if re.match(r"([-*]|\d+\.) ", plain) and (n := len(plain.split())) > BULLET + 1:
        yield f"bullet of {n} words: at most {BULLET}"
    for sentence in re.split(r"(?<=[.?!:])\s+(?=[A-Z*`(])", plain):
        if (n := len(sentence.split())) > SENTENCE:
            yield f"sentence of {n} words: at most {SENTENCE}: {sentence[:60]} ..."
    for pattern, better in PHRASES.items():
        for found in re.finditer(pattern, plain, re.I):
            yield f"'{found[0].strip()}': {better}"


def main(pages: list[Path]) -> None:
    """Print a line for each complaint, and their number."""
    found = [
        f"{page.relative_to(ROOT)}:{n}: {said}"
        for page in pages
        for n, block in blocks(page.read_text(encoding="utf-8"))
        for said in complaints(block)
    ]
    print(*found, f"{len(found)} in {len(pages)} pages", sep="\n")


if __name__ == "__main__":
    default = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    main([Path(name).resolve() for name in sys.argv[1:]] or [page for page in default if page.name != "models.md"])
