"""The checker of pages and docstrings: what it complains about, where, and what it passes over."""

import pytest
from scripts_loaded import load_script

CHECKER = load_script("scripts/check_prose.py")
LONG = " ".join(["word"] * 36)
MODULE = f'''"""A module.

    a command that hangs on nothing, as far as beside
"""

SIZE = 1
"""Slots beside
the others."""


def read(size):
    """As ``attend``.

    Args:
        size: rows of a text, of which
            some stay
        other: {LONG}.

    Beside the arguments.
    """
    return "beside"  # beside
'''


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("page.md", "# Beside\n\nFine, says `beside`.\n\n```\nbeside\n```\n\nRows\nof which.\n", ["9: 'of which'"]),
        ("page.md", f"- {LONG}. More more more more more.\n", ["1: bullet of 42 words", "1: sentence of 37 words"]),
        ("page.md", f"| {LONG} |\n", []),
        (
            "module.py",
            MODULE,
            ["7: 'beside'", "12: 'As code'", "15: 'of which'", "17: sentence of 38 words", "19: 'Beside'"],
        ),
    ],
)
def test_complaints_name_file_and_line(tmp_path, name, text, lines):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    found = CHECKER.report(file)
    assert len(found) == len(lines)
    assert all(said.startswith(f"{file}:{line}") for said, line in zip(found, lines, strict=True)), found
