"""One server for all of these tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from demo_server import WORDS
from serve_process import Command


@pytest.fixture(scope="session")
def url(tmp_path_factory):
    command = Command(tmp_path_factory.mktemp("served"), *WORDS)
    try:
        yield command.ready()
    finally:
        command.process.terminate()
        command.process.wait(60)
