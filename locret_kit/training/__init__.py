"""Training of a module beside a frozen backbone: Lightning around the observer; the mathematics is in ``cis``.

Here is the base of every training: the optimiser, its schedule, and resuming from a state file.
"""

import math
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel

from locret_kernels.provenance import peak_memory

from ..backbones.intercept import attach
from ..backbones.wrapped import unwrapped
from ..config.schema import flattened
from ..config.train_options import TrainConfig
from .strategy import finish_gradients

TRAINING = "training.json"
"""File beside trained weights: the settings that made them."""
SETTINGS = "settings"
"""Key of a checkpoint: the settings of the run, by dotted name."""
BAR = ("loss", "recall", "tok/s")
"""Figures that the progress bar shows, where a training has them."""
BETAS = (0.9, 0.95)
"""AdamW's two decay rates."""


def trained_with(cfg: TrainConfig, set_aside: int, step: int, recall: float | None) -> dict[str, object]:
    """The content of ``TRAINING``: every setting, the samples that were set aside, the step, and the recall on them there."""
    figure = {} if recall is None else {"recall": round(recall, 4)}
    return {**asdict(cfg), "set_aside": set_aside, "step": step, **figure}


class FrozenTraining(L.LightningModule, ABC):
    """Trains a module beside a frozen backbone.

    The trained module, built from its ``config``, is the only submodule. So the backbone is in no checkpoint and sees no
    optimiser. Scalars are logged at the number of the
    optimiser step that they belong to.
    """

    watched = ""
    """The figure of a validation that the board compares runs by."""

    def __init__(self, backbone: PreTrainedModel, cfg: TrainConfig) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.cfg = cfg
        self._backbone = [unwrapped(backbone)]
        self._validation: list[Tensor] = []
        self.validated: dict[str, float] = {}
        """Means of the last validation, by tag."""

    @property
    def adamw(self) -> dict[str, Any]:
        """AdamW's arguments, by their names."""
        return {"lr": self.cfg.optim.lr, "betas": BETAS, "weight_decay": self.cfg.optim.weight_decay}

    @property
    def backbone(self) -> PreTrainedModel:
        return self._backbone[0]

    def begin(self) -> None:
        """Load the first weights, where no checkpoint has later ones."""

    @abstractmethod
    def export(self, trained: nn.Module, out: Path) -> Path:
        """Write the trained module for inference; returns its folder."""

    @abstractmethod
    def used(self) -> nn.Module:
        """The part of the backbone that a step runs."""

    def on_fit_start(self) -> None:
        if not hasattr(self.backbone, "hf_device_map"):
            self.used().to(self.device)
        self._attachment = attach(self.backbone)
        if self.trainer.is_global_zero:
            from torch.utils.tensorboard.summary import hparams

            for summary in hparams(flat(self.cfg), {self.watched: 0.0}):
                self.logger.experiment.file_writer.add_summary(summary)  # type: ignore[union-attr]

    def on_train_start(self) -> None:
        """Apply the configuration to AdamW and its schedule, after a state with other settings may have been loaded."""
        schedule = cast(LambdaLR, self.lr_schedulers())
        (group,) = schedule.optimizer.param_groups
        group |= {**self.adamw, "initial_lr": self.cfg.optim.lr}
        group["lr"] *= self.factor(schedule.last_epoch)
        schedule.base_lrs = [self.cfg.optim.lr]

    def teardown(self, stage: str) -> None:
        if hasattr(self, "_attachment"):
            self._attachment.detach()

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Scalars of the steps that a checkpoint holds must not be lost after it."""
        checkpoint[SETTINGS] = flat(self.cfg)
        if self.trainer.is_global_zero:
            self.logger.experiment.flush()  # type: ignore[union-attr]

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Lightning places validations by its count of items, which are steps here: set it to the steps that are done."""
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for scope in ("total", "current"):
            progress[scope] = dict.fromkeys(progress[scope], checkpoint["global_step"])

    def on_validation_epoch_start(self) -> None:
        self._validation, self.validated = [], {}

    def end_step(self, scalars: dict[str, float], tokens: float, began: float) -> None:
        """One optimiser step with the gradients of every process. Its ``scalars``, the learning rate that it was made with,
        and the speed are logged: some in the progress bar, all on the board.

        Args:
            scalars: equal in every process, ``loss`` among them. tokens: number of those that all processes have read
                since ``began``.

        Raises:
            ValueError: before the update, a loss that is no finite number.
        """
        if not math.isfinite(scalars["loss"]):
            advice = f"begin again in another out with less than optim.lr={self.cfg.optim.lr}"
            said = f"loss={scalars['loss']} after {self.global_step} steps: the training has diverged"
            raise ValueError(f"{said}; {advice}")
        optimiser = cast(LightningOptimizer, self.optimizers())
        schedule = cast(LRScheduler, self.lr_schedulers())
        rate = float(optimiser.param_groups[0]["lr"])
        finish_gradients(self.trainer.strategy, list(self.parameters()), self.cfg.optim.clip_value)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        self.trainer.should_stop = self.global_step == self.cfg.optim.steps  # validates after the last step, too
        self.trainer.datamodule.done += self.cfg.optim.accumulate * self.trainer.world_size  # type: ignore[attr-defined]
        scalars = {**scalars, "train/lr": rate, "tok/s": tokens / (time.perf_counter() - began)}
        for name in BAR:
            if name in scalars:
                self.log(name, scalars[name], prog_bar=True, logger=False)
        scalars["memory/peak_MiB"] = peak_memory(self.device) / 2**20
        self.logger.log_metrics(scalars, step=self.global_step)  # type: ignore[union-attr]

    def factor(self, step: int) -> float:
        """The part of the peak learning rate that optimiser step ``step``, from 0, is made with."""
        optim = self.cfg.optim
        if step < optim.warmup_steps:
            return (step + 1) / (optim.warmup_steps + 1)
        return max(0.0, (optim.steps - step) / max(1, optim.steps - optim.warmup_steps))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        adamw = torch.optim.AdamW(list(self.parameters()), **self.adamw)
        return {"optimizer": adamw, "lr_scheduler": LambdaLR(adamw, lambda step: self.factor(step))}


def gather(trainer: L.Trainer) -> nn.Module | None:
    """The whole trained module on the CPU; None in every process but the first. All processes must call it."""
    state = trainer.strategy.lightning_module_state_dict()
    if not trainer.is_global_zero:
        return None
    (trained,) = trainer.lightning_module.children()
    with torch.device("cpu"):
        made = type(trained)(trained.config)
    made.load_state_dict({name.partition(".")[2]: weight.cpu() for name, weight in state.items()})
    return made


def flat(config: TrainConfig) -> dict[str, int | float | str]:
    """``{dotted key: value}`` of a configuration; values other than numbers and strings are written out."""
    return {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in flattened(asdict(config)).items()}
