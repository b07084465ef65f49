"""A training that is killed, interrupted or out of disk goes on, and follows the curve of one that was not."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from select import select

import pytest
import torch
from forked import start, status_of
from tiny_tokenizer import save_tiny_backbone

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.training import fit
from locret_kit.training.curves import read_curves
from locret_kit.training.fit import newest_state
from locret_kit.training.module import HeadTraining

SETTINGS = ["recipe=tiny", "data.max_tokens=512", "trainer.accelerator=cpu", "data.val_samples=2"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


def arguments(backbone: Path, out: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"backbone.model={backbone}", f"out={out}", *more]


def same_run(a: Path, b: Path) -> None:
    """Equal curves and equal heads."""
    first, second = read_curves(a), read_curves(b)
    for tag in ("loss", "recall", "train/lr", "val/loss", "val/recall", "val/recall_layer/02"):
        assert first[tag] == second[tag], tag
    mine, theirs = (RetainingHeads.from_pretrained(str(path / "heads")) for path in (a, b))
    assert all(torch.equal(x, y) for x, y in zip(mine.parameters(), theirs.parameters(), strict=True))
    assert sorted(path.name for path in (a / "best").iterdir()) == sorted(path.name for path in (b / "best").iterdir())


def test_a_run_killed_at_ten_random_moments_resumes_to_the_uninterrupted_curve(backbone, tmp_path, monkeypatch):
    more = ["optim.steps=30", "optim.accumulate=2", "trainer.save_every=2", "trainer.val_every=5", "resume=auto"]
    whole, part, rng = tmp_path / "whole", tmp_path / "part", random.Random(0)
    assert status_of(start(lambda: main(arguments(backbone, whole, *more)), tmp_path / "whole.log")) == 0
    heard, said = os.pipe()
    step = HeadTraining._log_step

    def tell(self, *args):
        step(self, *args)
        os.write(said, b".")

    monkeypatch.setattr(HeadTraining, "_log_step", tell)
    for _ in range(10):
        child = start(lambda: main(arguments(backbone, part, *more)), tmp_path / "part.log")
        for _ in range(rng.randint(1, 2)):
            assert select([heard], [], [], 60)[0], (tmp_path / "part.log").read_text()[-3000:]
            os.read(heard, 1)
        time.sleep(rng.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        assert status_of(child) == -signal.SIGKILL
        while select([heard], [], [], 0)[0]:
            os.read(heard, 1)
    assert status_of(start(lambda: main(arguments(backbone, part, *more)), tmp_path / "part.log")) == 0
    assert "Traceback" not in (tmp_path / "part.log").read_text()
    same_run(whole, part)
    assert [path.name for path in (part / "state").iterdir()] == ["step=30.ckpt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_step_finish_saves_and_prints_the_command(backbone, tmp_path, monkeypatch, number):
    more = ["optim.steps=8", "optim.accumulate=2", "trainer.save_every=100", "trainer.val_every=3"]
    whole, part, log = tmp_path / "whole", tmp_path / "part", tmp_path / "part.log"
    assert status_of(start(lambda: main(arguments(backbone, whole, *more)), tmp_path / "whole.log")) == 0

    observe, forwards = HeadTraining.observe, []

    def interrupt(self, *args, **more):  # in the middle of a step, between two of its samples
        forwards.append(self.global_step)
        if forwards.count(4) == 2:
            os.kill(os.getpid(), number)
        return observe(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTraining, "observe", interrupt)
        assert status_of(start(lambda: main(arguments(backbone, part, *more)), log)) == 130
    text = log.read_text()
    assert f"{number.name}: stopping after this step" in text and "stopped at step 5; state saved" in text
    assert "locret-train recipe=tiny" in text and "resume=auto" in text and "Traceback" not in text
    assert newest_state(part).name == "interrupted.ckpt"
    assert status_of(start(lambda: main(arguments(backbone, part, *more, "resume=auto")), log)) == 0
    same_run(whole, part)


def test_a_second_signal_stops_at_once_and_leaves_the_checkpoint(backbone, tmp_path, monkeypatch):
    observe = HeadTraining.observe

    def interrupt(self, *args, **more):
        if self.global_step == 3:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
        return observe(self, *args, **more)

    monkeypatch.setattr(HeadTraining, "observe", interrupt)
    more = ["optim.steps=8", "trainer.save_every=2"]
    assert status_of(start(lambda: main(arguments(backbone, tmp_path, *more)), tmp_path / "log")) == 130
    assert "stopped at step" not in (tmp_path / "log").read_text()
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step=2.ckpt"]


def test_a_full_disk_keeps_the_previous_checkpoint(backbone, tmp_path, monkeypatch, capsys):
    real, calls = torch.save, []

    def full(obj, path):
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return real(obj, path)

    monkeypatch.setattr(fit.torch, "save", full)
    assert main(arguments(backbone, tmp_path, "optim.steps=6", "trainer.save_every=2")) == 1
    assert "No space left" in capsys.readouterr().err
    monkeypatch.undo()
    kept = list((tmp_path / "state").iterdir())
    assert [path.name for path in kept] == ["step=2.ckpt"]
    assert torch.load(kept[0], weights_only=True)["global_step"] == 2
