"""Python processes that this one starts."""

from __future__ import annotations

import sys

RUN = """import sys
if sys.path[:1] == [""]:
    del sys.path[0]
{before}
import runpy
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
"""Runs a module. ``-c`` puts the current folder first in ``sys.path`` as ``''``, unless PYTHONSAFEPATH is set; nothing but
``sys``, which is built in, is imported before it is gone."""


def python(module: str, *words: str, before: str = "") -> list[str]:
    """The command that runs a module as ``python -m`` does, but imports nothing from the current folder: a file called
    ``json.py`` in a download folder is not ours. PYTHONPATH holds.

    Args:
        words: ``sys.argv`` behind the module's name. before: statements that run before the module is imported.
    """
    return [sys.executable, "-c", RUN.format(module=module, before=before), *words]
