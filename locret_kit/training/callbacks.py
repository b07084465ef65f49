"""Lightning callbacks: progress, seeds, saved states, signals, and the best retaining heads in validation."""

from __future__ import annotations

import random
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from torch import nn

from ..files import write_json
from ..heads import RetainingHeads
from .frozen_training import TRAINING, FrozenTraining, trained_with


def gather(trainer: L.Trainer) -> nn.Module | None:
    """The whole trained module on the CPU; None in every process but the first. All processes must call it."""
    state = trainer.strategy.lightning_module_state_dict()
    if not trainer.is_global_zero:
        return None
    module = cast(FrozenTraining, trainer.lightning_module)
    return module.rebuilt({name: weight.cpu() for name, weight in state.items()})


class Bar(TQDMProgressBar):
    """Progress in optimiser steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    @property
    def total_train_batches(self) -> int:
        return self._steps

    def on_train_start(self, trainer: L.Trainer, *rest: object) -> None:
        """A run that goes on does so inside Lightning's one epoch, at whose beginning alone a bar is given its total."""
        super().on_train_start(trainer, *rest)
        bar = self.train_progress_bar
        bar.total, bar.initial, bar.n = self._steps, trainer.global_step, trainer.global_step

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict:
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}


class SeedSteps(Callback):
    """Seed the generators from the run's seed and the step's number, as samples are. A resumed run then draws what the
    uninterrupted one drew, and no generator's state has to be saved."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        drawn = random.Random(f"{self.seed}:{trainer.global_step}").getrandbits(63)
        random.seed(drawn)
        torch.manual_seed(drawn)


class SaveEvery(Callback):
    """The state of every ``steps``-th optimiser step, once its validation is done; the newest one stays."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.saved = folder, steps, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.saved = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: object) -> None:
        if trainer.global_step % self.steps == 0:
            self._save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        step = trainer.global_step
        if step == self.saved:
            return
        trainer.save_checkpoint(self.folder / f"step={step}.ckpt")
        self.saved = step
        if trainer.is_global_zero:
            for older in (self.folder / "interrupted.ckpt", *self.folder.glob("step=*.ckpt")):
                if older.stem != f"step={step}":
                    older.unlink(missing_ok=True)


class Last(Callback):
    """The trained module, gathered before the strategy is torn down."""

    def __init__(self) -> None:
        self.gathered = False
        self.trained: nn.Module | None = None
        """In the first process only."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.gathered, self.trained = True, gather(trainer)


class TrainingStopped(KeyboardInterrupt):
    """A run was stopped, has saved its state and said how it goes on."""


class StopWhole(Callback):
    """Ctrl-C and SIGTERM let the step that runs and its validation finish, save the state and print the command that goes on.

    A second signal stops at once, with the last checkpoint as it is.
    """

    def __init__(self, path: Path, command: str) -> None:
        self.path, self.command = path, command
        self.asked = self.whole = self.saved = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.whole = True
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # Lightning restores what was there before
                signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            self.whole = False
            raise KeyboardInterrupt
        self.asked = True
        print(f"\n{signal.Signals(number).name}: stopping after this step", file=sys.stderr, flush=True)

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        """Between steps, when the last one's validation is done: a run that goes on does not make it again."""
        if trainer.strategy.reduce_boolean_decision(self.asked, all=False):
            raise KeyboardInterrupt

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self.whole and trainer.global_step > 0:
            trainer.save_checkpoint(self.path)
            self.saved = True
            if trainer.is_global_zero:
                said = f"\nstopped at step {trainer.global_step}; state saved. To go on:\n  {self.command}"
                print(said, file=sys.stderr)


class KeepBest(Callback):
    """After each validation, the heads of the ``keep`` highest recalls are in ``folder``, each ready for inference.

    The names say all there is to know, so a resumed run goes on with what it finds.
    """

    NAME = re.compile(r"^recall=(\d\.\d{4})-step=(\d+)$")

    def __init__(self, folder: Path, keep: int, dtype: torch.dtype) -> None:
        self.folder, self.keep, self.dtype = folder, keep, dtype

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = cast(FrozenTraining, pl_module)
        recall = module.validated.get("val/recall")
        if recall is None or not self.keep:
            return
        mine = (f"{recall:.4f}", trainer.global_step)
        best = sorted({*self._kept(), mine}, key=lambda entry: (float(entry[0]), entry[1]))[-self.keep :]
        if mine in trainer.strategy.broadcast(best):
            heads = gather(trainer)
            if isinstance(heads, RetainingHeads):
                folder = self.folder / f"recall={mine[0]}-step={mine[1]}"
                heads.save_pretrained(folder, self.dtype)
                write_json(folder / TRAINING, {**trained_with(module.cfg), "step": trainer.global_step})
        if trainer.is_global_zero:
            for entry in set(self._kept()) - set(best):
                shutil.rmtree(self.folder / f"recall={entry[0]}-step={entry[1]}")

    def _kept(self) -> list[tuple[str, int]]:
        matches = [self.NAME.match(path.name) for path in self.folder.iterdir()] if self.folder.exists() else []
        return [(match[1], int(match[2])) for match in matches if match]
