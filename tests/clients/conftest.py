"""One server for all of these tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from demo_server import served


@pytest.fixture(scope="session")
def url():
    with served() as address:
        yield address
