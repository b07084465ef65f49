"""The first error of an engine's start, as one sentence for the command that waits for it.

vLLM logs it with its traceback in each process of the engine, 60 to 100 lines, and the command learns only that there was one.
``VLLM_LOGGING_LEVEL=DEBUG`` leaves it so. Nothing of vLLM is imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..naming import first_line

FILE = "LOCRET_VLLM_REFUSAL"
"""Environment variable: name of a file that is there while engines start, and takes the sentence."""
WORKER, ENGINE = "vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core"
"""Loggers of the errors."""
REFUSED = (ValueError, OSError, ImportError, RuntimeError, TypeError)
"""Errors with a sentence for the user. Others are bugs, whose traceback stays."""


def is_logged(record: logging.LogRecord) -> bool:
    """Whether a record goes to the log. An error of a start goes into the file, and the engine's process ends."""
    error, file = record.exc_info and record.exc_info[1], Path(os.environ.get(FILE, ""))
    if (
        not isinstance(error, REFUSED)
        or not file.is_file()
        or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
    ):
        return True
    if not file.stat().st_size:
        file.write_text(first_line(error), encoding="utf-8")
    if record.name == ENGINE:
        raise SystemExit(1)  # its error would print the traceback again
    return False


def watch() -> None:
    """Watch the start of engines in this process."""
    for name in (WORKER, ENGINE):
        logging.getLogger(name).addFilter(is_logged)


@contextmanager
def refusals() -> Iterator[Path]:
    """The file, to be removed once engines are ready. Raises ValueError: the sentence of one that is not."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "refusal"
        file.touch()
        os.environ[FILE] = str(file)
        watch()  # processes may be forked
        try:
            yield file
        except RuntimeError:
            if file.is_file() and (words := file.read_text(encoding="utf-8")):
                raise ValueError(words) from None
            raise
