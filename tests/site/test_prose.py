"""The checker of pages and docstrings: what it complains about, where, and what it passes over."""

import pytest
from scripts_loaded import load_script

CHECKER = load_script("scripts/check_prose.py")
LONG = " ".join(["word"] * 36)
PAGE = f"# Beside\n\nFine, says `beside`.\n\n```\nbeside\n```\n\nRows\nof which.\n\n- {LONG}. {'More ' * 5}\n\n| {LONG} |\n"
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
OF_PAGE = ["9: 'of which'", "12: bullet of 42", "12: sentence of 37"]
OF_MODULE = ["6: 'beside'", "11: 'As code'", "14: 'of which'", "16: sentence of 38", "18: 'Beside'"]


@pytest.mark.parametrize(("name", "text", "lines"), [("a.md", PAGE, OF_PAGE), ("a.py", MODULE, OF_MODULE)])
def test_complaints_name_file_and_line(tmp_path, name, text, lines):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    found = CHECKER.report(file)
    places = [f"{file}:{line}" for line in lines]
    assert [said[: len(place)] for said, place in zip(found, places, strict=True)] == places
