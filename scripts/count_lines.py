"""Count code lines (no blanks, comments and docstrings), comment lines, and uses of ``Any``, folder by folder.

    python scripts/count_lines.py [FOLDER_OR_FILE ...] [--commit COMMIT]

Without names: ``locret_kit`` and ``kernels``. ``--commit`` counts the files of a commit instead of the working tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKS = ("fmt:", "type: ignore", "noqa")
"""Comments for tools, which are not counted."""
NO_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT)


@dataclass(frozen=True)
class Count:
    """Lines of some files."""

    code: int = 0
    comments: int = 0
    filled: int = 0
    """Lines that are not blank."""
    anys: int = 0
    """The word ``Any`` in code, imports included."""

    def __add__(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def count(text: str) -> Count:
    """The lines of one Python file."""
    prose, code, comments, anys = set(), set(), set(), 0
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not any(mark in token.string for mark in MARKS):
            comments.add(token.start[0])
        elif token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
            anys += token.string == "Any"
    return Count(len(code - prose), len(comments), sum(bool(line.strip()) for line in text.splitlines()), anys)


def texts(place: str, commit: str | None) -> list[str]:
    """The Python files at a path of the working tree or of a commit."""
    if commit is None:
        path = ROOT / place
        return [file.read_text() for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    git = ["git", "-C", str(ROOT)]
    names = subprocess.check_output([*git, "ls-tree", "-r", "--name-only", commit, place], text=True).splitlines()
    return [
        subprocess.check_output([*git, "show", f"{commit}:{name}"], text=True) for name in names if name.endswith(".py")
    ]


def main(argv: list[str] | None = None) -> int:
    """Print a line for each place, and their sum."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("places", nargs="*", default=["locret_kit", "kernels"])
    parser.add_argument("--commit")
    args = parser.parse_args(argv)
    found = {place: sum(map(count, texts(place, args.commit)), Count()) for place in args.places}
    print(f"{'':<32} {'code':>7} {'comments':>9} {'of lines':>9} {'Any':>5}")
    for place, lines in {**found, "all": sum(found.values(), Count())}.items():
        share = lines.comments / max(1, lines.filled)
        print(f"{place:<32} {lines.code:>7} {lines.comments:>9} {share:>9.3f} {lines.anys:>5}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
