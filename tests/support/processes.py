"""Trainings of several processes over gloo: started, killed after a step, and compared with that of one."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from forked import ranks, start, status_of

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.training.fit import SaveEvery, read_curves

SETTINGS = ("recipe=tiny", "trainer.accelerator=cpu", "trainer.val_every=2", "heads.dtype_saved=float32")
"""Of every training here."""
TAGS = ("loss", "recall", "train/regression", "val/loss", "val/recall")


def words(settings: Sequence[str], backbone: Path, out: Path, world: int) -> list[str]:
    """Settings of a training of 4 samples an optimiser step on ``world`` processes."""
    return [*SETTINGS, f"backbone.model={backbone}", f"out={out}", f"optim.accumulate={4 // world}", *settings]


def train(settings: Sequence[str], backbone: Path, out: Path, world: int, *more: str) -> None:
    """Such a training in processes of its own."""
    arguments, log = [*words(settings, backbone, out, world), *more], out.parent / f"{out.name}.log"
    if world == 1:
        statuses = [status_of(start(lambda: main(arguments), log))]
    else:
        statuses = ranks(lambda: main([*arguments, f"trainer.devices={world}"]), world, log)
    assert statuses == [0] * world, f"{statuses} {log.read_text()[-4000:]}"


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """Every process ends with status 9 once the state of a step is saved."""
    save = SaveEvery.on_train_batch_start

    def save_and_die(self, trainer, pl_module, *rest):
        save(self, trainer, pl_module, *rest)
        if trainer.global_step == step:
            trainer.strategy.barrier()
            os._exit(9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SaveEvery, "on_train_batch_start", save_and_die)
        with pytest.raises(AssertionError, match=r"^\[9"):
            yield


def train_to(settings: Sequence[str], backbone: Path, out: Path, *parts: tuple[int, int, str]) -> None:
    """A training in parts: the step after which it is killed, processes and strategy of each. One state file is left."""
    for step, world, strategy in parts:
        with killed_after(step):
            train(settings, backbone, out, world, f"trainer.strategy={strategy}", "resume=auto")
        assert [path.name for path in (out / "state").iterdir()] == [f"step={step}.ckpt"]


def same(a: Path, b: Path, trained: str = "", atol: float = 1e-5) -> None:
    """Equal curves to 1e-5, and equal heads of the layers whose names begin with ``trained``."""
    first, second = read_curves(a), read_curves(b)
    for tag in TAGS:
        assert first[tag].keys() == second[tag].keys(), tag
        for step in first[tag]:
            assert abs(first[tag][step] - second[tag][step]) < 1e-5 * max(1, abs(first[tag][step])), (tag, step)
    mine, theirs = (RetainingHeads.from_pretrained(str(path / "heads")).state_dict() for path in (a, b))
    names = [name for name in mine if name.startswith(trained)]
    assert mine.keys() == theirs.keys() and len(names) >= 2
    assert all(torch.allclose(mine[name], theirs[name], atol=atol, rtol=1e-4) for name in names)
