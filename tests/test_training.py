"""``locret-train`` end to end on a tiny backbone: it learns, resumes to the same curve, and loses nothing on Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_tokenizer import save_tiny_backbone

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.training.fit import newest_state

SETTINGS = ["recipe=tiny", "data.max_tokens=512", "trainer.accelerator=cpu", "data.val_samples=2"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


def curve(out: Path, tag: str = "loss") -> dict[int, float]:
    events: dict[int, float] = {}
    for folder in sorted({file.parent for file in out.rglob("events.*")}):
        accumulator = EventAccumulator(str(folder))
        accumulator.Reload()
        events |= {event.step: event.value for event in accumulator.Scalars(tag)}
    return events


def train(backbone: Path, out: Path, *more: str) -> int:
    return main([*SETTINGS, f"backbone.model={backbone}", f"out={out}", *more])


def test_it_learns_and_exports(backbone, tmp_path):
    assert train(backbone, tmp_path, "optim.steps=60", "optim.lr=0.01", "trainer.val_every=20") == 0
    assert len(curve(tmp_path)) == 60
    losses = list(curve(tmp_path, "val/loss").values())
    assert len(losses) == len(curve(tmp_path, "val/recall")) == 3
    assert losses[-1] < 0.9 * losses[0]
    folder, file = (
        RetainingHeads.from_pretrained(str(tmp_path / "heads")),
        RetainingHeads.from_pretrained(str(tmp_path / "heads.pt")),
    )
    assert folder.config == file.config
    assert folder.config.backbone == str(backbone)
    assert folder.config.inference["budget"] == 128
    for a, b in zip(folder.parameters(), file.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_same_seed_gives_the_same_curve_and_another_does_not(backbone, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(backbone, tmp_path / name, "optim.steps=3", f"seed={seed}") == 0
    assert curve(tmp_path / "a") == curve(tmp_path / "b") != curve(tmp_path / "c")


def test_resume_follows_the_uninterrupted_curve(backbone, tmp_path):
    more = ["optim.steps=6", "optim.accumulate=2", "trainer.save_every=3", "trainer.val_every=2"]
    assert train(backbone, tmp_path / "whole", *more) == 0
    # The same schedule (6 steps), stopped after the checkpoint of step 3.
    script = (
        "import os, sys, lightning as L\n"
        "from locret_kit.cli.train import main\n"
        "class Stop(L.Callback):\n"
        "    def on_train_batch_end(self, trainer, *a):\n"
        "        if trainer.global_step == 4: os._exit(9)\n"
        "real = L.Trainer.__init__\n"
        "L.Trainer.__init__ = lambda self, *a, callbacks=(), **k: real(self, *a, callbacks=[*callbacks, Stop()], **k)\n"
        "main(sys.argv[1:])\n"
    )
    part = tmp_path / "part"
    arguments = [*SETTINGS, f"backbone.model={backbone}", f"out={part}", *more]
    killed = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert killed.returncode == 9, killed.stderr[-2000:]
    assert newest_state(part).name == "step=3.ckpt"
    assert main([*arguments, "resume=auto"]) == 0
    whole, resumed = curve(tmp_path / "whole"), curve(part)
    assert whole.keys() == resumed.keys()
    assert all(abs(whole[step] - resumed[step]) < 1e-6 for step in whole)
    a, b = (RetainingHeads.from_pretrained(str(p / "heads")) for p in (tmp_path / "whole", part))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_ctrl_c_saves_and_prints_the_command(backbone, tmp_path):
    arguments = [
        *SETTINGS,
        f"backbone.model={backbone}",
        f"out={tmp_path}",
        "optim.steps=100000",
        "trainer.save_every=100000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "locret_kit.cli.train", *arguments],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.rglob("events.*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr[-2000:]
    assert "resume=auto" in stderr
    assert "Traceback" not in stderr
    assert newest_state(tmp_path).name == "interrupted.ckpt"


def test_a_full_disk_keeps_the_previous_checkpoint(backbone, tmp_path, monkeypatch, capsys):
    from locret_kit.training import fit

    real, calls = torch.save, []

    def full(obj, path):
        calls.append(path)
        if len(calls) == 2:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return real(obj, path)

    monkeypatch.setattr(fit.torch, "save", full)
    assert train(backbone, tmp_path, "optim.steps=6", "trainer.save_every=2") == 1
    assert "No space left" in capsys.readouterr().err
    monkeypatch.undo()
    kept = list((tmp_path / "state").iterdir())
    assert [path.name for path in kept] == ["step=2.ckpt"]
    assert torch.load(kept[0], weights_only=True)["global_step"] == 2


def test_errors_are_one_line(backbone, tmp_path, capsys):
    for arguments, said in (
        (["recipe=smolm2-135m"], "smollm2-135m"),
        ([*SETTINGS, "backbone.model=checkpoints/nothing"], "no such folder"),
        ([*SETTINGS, f"backbone.model={backbone}", "optim.learning=1"], "optim.lr"),
        ([*SETTINGS, f"backbone.model={backbone}", "data.sources=[nowhere.jsonl]"], "nowhere.jsonl"),
    ):
        assert main([*arguments, f"out={tmp_path}"] if "recipe=smolm2-135m" not in arguments else arguments) == 1
        error = [e for e in capsys.readouterr().err.splitlines() if e.startswith("locret-train:")]
        assert len(error) == 1 and said in error[0], error
