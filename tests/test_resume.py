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
from locret_kit.training import fit, observer
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


@pytest.fixture
def random_losses(monkeypatch):
    """Every loss is weighed at random, by PyTorch's generator and Python's: both must go on where they were."""
    loss = observer.cis_loss

    def weighed(*args, **settings):
        regression, smooth = loss(*args, **settings)
        return regression * (0.5 + torch.rand(())), smooth * random.random()

    monkeypatch.setattr(observer, "cis_loss", weighed)


def test_a_run_killed_at_ten_random_moments_resumes_to_the_uninterrupted_curve(
    backbone, random_losses, tmp_path, monkeypatch
):
    """Seven moments lie behind a step or two, three anywhere: while it loads, too. LOCRET_KILL_SEED chooses others."""
    more = ["optim.steps=32", "optim.accumulate=2", "trainer.save_every=2", "trainer.val_every=5", "resume=auto"]
    whole, part, seed = tmp_path / "whole", tmp_path / "part", os.environ.get("LOCRET_KILL_SEED", "0")
    assert status_of(start(lambda: main(arguments(backbone, whole, *more)), tmp_path / "whole.log")) == 0
    heard, said = os.pipe()
    step, rng = HeadTraining._log_step, random.Random(f"kill {seed}")

    def tell(self, *args):
        step(self, *args)
        os.write(said, b".")

    monkeypatch.setattr(HeadTraining, "_log_step", tell)
    for steps in rng.sample([0] * 3 + [1] * 3 + [2] * 4, 10):
        seconds = rng.uniform(0, 0.15 if steps else 1.0)
        print(f"LOCRET_KILL_SEED={seed}: killed {seconds:.3f} s after {steps} steps")  # pytest shows it on failure
        child = start(lambda: main(arguments(backbone, part, *more)), tmp_path / "part.log")
        for _ in range(steps):
            assert select([heard], [], [], 60)[0], (tmp_path / "part.log").read_text()[-3000:]
            os.read(heard, 1)
        until = time.monotonic() + seconds
        for _ in range(steps or 1):  # no more steps than these, or a quick machine would end the run
            if select([heard], [], [], max(0.0, until - time.monotonic()))[0]:
                os.read(heard, 1)
        os.kill(child, signal.SIGKILL)
        assert status_of(child) == -signal.SIGKILL
        while select([heard], [], [], 0)[0]:
            os.read(heard, 1)
    assert status_of(start(lambda: main(arguments(backbone, part, *more)), tmp_path / "part.log")) == 0
    assert "Traceback" not in (tmp_path / "part.log").read_text()
    same_run(whole, part)
    assert [path.name for path in (part / "state").iterdir()] == ["step=32.ckpt"]


def test_a_kill_between_writing_and_renaming_loses_nothing(backbone, tmp_path, monkeypatch):
    """Child n is killed before its n-th rename, of a state, of the best heads or of what is exported."""
    more = ["optim.steps=6", "trainer.save_every=2", "trainer.val_every=3", "trainer.keep_best=1", "resume=auto"]
    whole, part, log = tmp_path / "whole", tmp_path / "part", tmp_path / "part.log"
    assert status_of(start(lambda: main(arguments(backbone, whole, *more)), tmp_path / "whole.log")) == 0
    rename, reached = os.replace, []

    def die_before(source, target, last):
        reached.append(target)
        if len(reached) == last:
            print(f"killed before {Path(target).relative_to(part)} was there")
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    for n in range(1, 20):
        monkeypatch.setattr(os, "replace", lambda source, target, n=n: die_before(source, target, n))
        status = status_of(start(lambda: main(arguments(backbone, part, *more)), log))
        if status == 0:
            break
        assert status == -signal.SIGKILL, log.read_text()[-3000:]
    text = log.read_text()
    assert status == 0 and "cannot be read" not in text and "Traceback" not in text
    assert all(f"killed before {place}" in text for place in ("state/step=", "best/recall=", "heads")), text
    same_run(whole, part)


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
