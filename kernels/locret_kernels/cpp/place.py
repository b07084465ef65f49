"""The folder of compiled code. What is loaded from there runs as this process, so nobody else may be able to put it there."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

LOG = logging.getLogger("locret_kernels")
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def preferred() -> Path:
    """``$XDG_CACHE_HOME/locret_kit``, by default in ``~/.cache``; in the temporary folder for users without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base) / "locret_kit" if base else Path.home() / ".cache" / "locret_kit"
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / f"locret_kit-{os.geteuid()}"


@cache
def folder() -> Path:
    """Where compiled code is kept: ``preferred``, or where others could put files there a folder of this process alone, which is
    said in a line of the log.

    Raises:
        OSError: others could put files there too, or it cannot be made.
    """
    path = preferred().absolute()
    path = path.parent.resolve() / path.name  # whoever owns a link above may turn it elsewhere, later
    try:
        made(path)
        return path
    except OSError as error:
        private = Path(_private().name).resolve()
        made(private)
        LOG.warning("compiled code is not kept, and each process compiles anew: %s", error)
        return private


@cache
def _private() -> tempfile.TemporaryDirectory[str]:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="locret_kit.")


def made(folder: Path) -> None:
    """Make a folder, and what is missing above it, for this user alone.

    Args:
        folder: an absolute path without links above its last part.

    Raises:
        OSError: it cannot be made, or somebody else than this user and root can put files there: it is a link or another's,
            others may write there, or to a folder above it that is not sticky.
    """
    for path in (*reversed(folder.parents), folder):
        if not os.path.lexists(path):
            path.mkdir(0o700, exist_ok=True)
        found, last = path.lstat(), path == folder
        if not stat.S_ISDIR(found.st_mode):
            raise OSError(f"{path} is no folder, or a link to one")
        if found.st_uid != os.geteuid() and (last or found.st_uid != 0):
            raise OSError(f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if found.st_mode & OTHERS and (last or not found.st_mode & stat.S_ISVTX):
            raise OSError(f"others may write to {path}: chmod go-w takes that away")


def is_ours(file: Path) -> bool:
    """Whether a file of ``folder`` is a regular one of this user, to which nobody else may write."""
    if not os.path.lexists(file):
        return False
    found = file.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS
