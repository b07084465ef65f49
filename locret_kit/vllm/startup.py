"""The first error of an engine's start, as one sentence for the command that waits for it.

vLLM logs it with its traceback in each process of the engine, 60 to 100 lines, and the command learns only that there was one.
``VLLM_LOGGING_LEVEL=DEBUG`` leaves it so. Nothing of vLLM is imported.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import NamedTemporaryFile

from ..naming import first_line

FILE = "LOCRET_VLLM_REFUSAL"
"""Environment variable: name of a file that is there while engines start, and takes a line per error."""
WORKER, ENGINE = "vllm.v1.executor.multiproc_executor", "vllm.v1.engine.core"
"""Loggers of the errors."""
REFUSED = (ValueError, OSError, ImportError, RuntimeError, TypeError)
"""Errors with a sentence for the user. Others are bugs, whose traceback stays."""


def is_logged(record: logging.LogRecord) -> bool:
    """Whether a record goes to the log. An error of a start goes into the file, and the engine's process ends."""
    error, name = record.exc_info and record.exc_info[1], os.environ.get(FILE, "")
    starting, debug = os.path.exists(name), logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
    kinds = Exception if starting and os.path.getsize(name) else REFUSED  # what follows says no more
    if debug or not starting or not isinstance(error, kinds):
        return True
    with open(name, "a", encoding="utf-8") as file:
        print(first_line(error), file=file)
    if record.name == ENGINE:
        raise SystemExit(1)  # its error would print the traceback again
    return False


def watch() -> None:
    """Watch the start of engines in this process."""
    for name in (WORKER, ENGINE):
        logging.getLogger(name).addFilter(is_logged)


@contextmanager
def refusals() -> Iterator[Callable[[], None]]:
    """A call for when engines are ready. Raises ValueError: the sentence of one that is not."""
    with NamedTemporaryFile("r", encoding="utf-8") as file:
        os.environ[FILE] = file.name
        watch()  # processes may be forked
        try:
            yield file.close  # removes the file
        except RuntimeError:
            if not file.closed and (words := file.readline().strip()):
                raise ValueError(words) from None
            raise
