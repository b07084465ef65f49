import os
import signal
import sys
from pathlib import Path

# One thread a process: OpenMP's threads do not survive `os.fork`, and a forked process would wait for them forever.
os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it once, so here; torch.set_num_threads fails in threads of a fork
sys.path.insert(0, str(Path(__file__).parent))

import interpreted  # noqa: F401  (before any other module imports Triton, whose own functions are decorated then too)
import pytest
import torch
from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal: a shell's background job ignores it
settings.register_profile("locret", deadline=None, derandomize=True)  # the same examples on every machine, however slow
settings.load_profile("locret")


def pytest_collection_modifyitems(items):
    """The longest first, so that no process waits for them at the end: those that run the demo backbone."""
    items.sort(key=lambda item: item.get_closest_marker("backbone") is None)


@pytest.fixture
def poisoned():
    """Memory that nobody has written yet is NaN (integers: the largest), so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
