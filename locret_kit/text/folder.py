"""A folder as one text: its files in order of their paths, each under a heading with its path."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ..files import POINTER, read_utf8
from ..naming import valid_unicode
from .converters import ENCODED, LIMIT, is_encoded

HEADING = "# File: {path}\n"
"""The line above a file; heads are trained with it too (samples/wording.yaml)."""
OTHERS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
"""Variables that name another repository than the folder's: git sets them for its hooks."""
NAMED = 5
"""Files that a note names; the others are counted."""


def read_folder(
    folder: str | Path, include: Sequence[str] = (), note: Callable[[str], object] = print
) -> Iterator[str]:
    """The files of a folder, a piece each: its heading, its text, and a blank line.

    Hidden files and those that git ignores are left out. So are links, Git LFS pointers and files that are not UTF-8
    text: ``note`` is told their names.

    Args:
        include: patterns as of a shell, such as ``*.py`` or ``src/**/*.py``, for a file's name or its path in the folder; none
            takes all.
        note: called after the last piece, with a line each for patterns that match nothing, for files that are left out, and for
            those that hold base64.

    Raises:
        ValueError: no file of the folder is text, or matches ``include``. OSError: it cannot be read.
    """
    folder = Path(folder)
    every = sorted({*_listed(folder)})
    chosen = [path for path in every if not include or any(_matches(path, pattern) for pattern in include)]
    if every and not chosen:
        raise ValueError(f"include={' '.join(include)!r} matches none of the {len(every)} files in {folder}")
    idle = [pattern for pattern in include if not any(_matches(path, pattern) for path in every)]
    left_out, encoded, texts = [], [], 0
    for path in chosen:
        if (text := _text(folder / path)) is None:
            left_out.append(path)
        elif text.strip():
            texts += 1
            encoded += [path] * is_encoded(text)
            name = valid_unicode(path)  # halves of surrogate pairs have no tokens
            yield f"{HEADING.format(path=name)}{text.rstrip()}\n\n"
    if not texts:
        among = f" among {len(chosen)}" if chosen else ", or git ignores all"
        raise ValueError(f"{folder} has no file with text{among}")
    if idle:
        note(f"{folder}: include={' '.join(idle)!r} matches no file")
    if left_out:
        note(f"{folder}: left out, since they are not plain text: {_names(left_out)}")
    if encoded:
        note(f"{folder}: {_names(encoded)}: {ENCODED}")


def _names(paths: list[str]) -> str:
    """The first paths, and the number of the others."""
    return ", ".join(paths[:NAMED]) + (f" and {len(paths) - NAMED} more" if len(paths) > NAMED else "")


def _listed(folder: Path) -> Iterator[str]:
    """Paths of the files in a folder and in repositories within it, with slashes. Where git is missing, ``.gitignore`` is not
    read."""
    if shutil.which("git"):
        where, root = tuple[str, ...](), folder.resolve()
        with tempfile.TemporaryDirectory() as empty:
            # git reads .gitignore without a repository of the folder's own, too. One that ignores the folder says nothing of it.
            _git(folder, "init", "--quiet", "--bare", empty)
            if _git(folder, "rev-parse", "--is-inside-work-tree") != "true\n":
                # A bare repository, .git, or another user's, which git refuses: its rules hold too.
                tops = (up for up in (root, *root.parents) if (up / ".git").exists() and ".git" not in root.parts)
                where = (f"--git-dir={empty}", f"--work-tree={next(tops, root)}")
            if _git(folder, *where, "check-ignore", "--quiet", ".") is not None:
                where = (f"--git-dir={empty}", f"--work-tree={root}")
            words = "ls-files", "-z", "--cached", "--others", "--exclude-standard"
            paths = (_git(folder, *where, *words) or "").split("\0")
    else:
        paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    for path in (path for path in paths if path and not any(part.startswith(".") for part in path.split("/"))):
        place = folder / path
        if place.is_dir() and not place.is_symlink():  # a repository of its own, whose files git does not list
            yield from (f"{path.rstrip('/')}/{inner}" for inner in _listed(place))
        else:
            yield path


def _git(folder: Path, *words: str) -> str | None:
    """The output of git in a folder; None where it fails."""
    own = "-c", "core.fsmonitor=false"  # a program that the folder's own configuration may name
    env = {name: value for name, value in os.environ.items() if name not in OTHERS}
    done = subprocess.run(["git", *own, "-C", str(folder), *words], capture_output=True, env=env)
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


def _matches(path: str, pattern: str) -> bool:
    """Whether a file's path or name has a pattern, in which ``**/`` stands for any folders, or none."""
    names = path, path.rpartition("/")[2]
    fewer = (pattern[: at.start()] + pattern[at.end() :] for at in re.finditer(r"\*\*/", pattern))
    return any(fnmatchcase(name, pattern) for name in names) or any(_matches(path, one) for one in fewer)


def _text(path: Path) -> str | None:
    """A file's text; None for links, Git LFS pointers and what is no UTF-8 text or too large. '' where the file is gone."""
    if path.is_symlink():
        return None
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        first = stream.read(1 << 16)
        if first.startswith(POINTER) or path.stat().st_size > LIMIT:
            return None
        try:
            return "".join(read_utf8(stream, first=first))
        except ValueError:
            return None
