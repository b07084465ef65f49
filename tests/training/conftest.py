"""A tiny backbone, which no training changes, and a run that others are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import train
from tiny_tokenizer import save_tiny_backbone


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def alone(request, backbone, tmp_path_factory) -> Path:
    """The run of one process by the ``SETTINGS`` of a file."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train(request.module.SETTINGS, backbone, out, 1)
    return out
