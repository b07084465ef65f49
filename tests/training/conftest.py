"""A tiny backbone, which no training changes, and a run that others are compared with."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import words
from tiny_tokenizer import save_tiny_backbone

from locret_kit.cli.train import main
from locret_kit.training.module import HeadTraining


@pytest.fixture(scope="module", autouse=True)
def show() -> Iterator[Callable[..., None]]:
    """Pictures of a run's board are switched off here: to draw them takes longer than the run."""
    own = HeadTraining._show
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeadTraining, "_show", lambda *given: None)
        yield own


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def alone(request, backbone, tmp_path_factory) -> Path:
    """The run of this process by the ``SETTINGS`` of a file: those that are forked from it have imported what a run imports."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert main(words(request.module.SETTINGS, backbone, out, 1)) == 0
    return out
