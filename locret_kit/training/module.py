"""Retaining heads in training: one observed forward per step, its figures on the board."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..backbones.spec import decoder_of
from ..config.train_config import TrainConfig
from ..config.trials import trials_of
from ..files import write_json
from ..heads import RetainingHeads
from ..samples.sample import Sample
from .board import cis_figure, marked_text, most_kept, pixels
from .callbacks import KeepBest
from .data import Step
from .frozen_training import TRAINING, FrozenTraining, adamw_settings, trained_with
from .observer import Observer, Together
from .strategy import shard
from .trial import Trial, evicting
from .values import ValueNorms

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


def tagged(trial: str, scalars: dict[str, float]) -> dict[str, float]:
    """Scalars under the name of their trial; those of a training without trials as they are."""
    return {f"{trial}/{tag}": value for tag, value in scalars.items()} if trial else scalars


class HeadTraining(FrozenTraining):
    """Trains retaining heads on a frozen backbone: one set, or one for each trial, all from the same forwards.

    Each layer's loss is back-propagated inside the forward, as its q, k and v appear. Scalars are means over the samples of
    a step in all processes.
    """

    watched = "val/recall"

    def __init__(self, backbone: PreTrainedModel, cfg: TrainConfig) -> None:
        super().__init__(backbone, cfg)
        self.description = evicting(backbone, cfg)
        self.spec = self.description.spec
        self.scored = [layer for layer, window in enumerate(self.spec.windows) if window is None]
        """Layers that are evicted from, and have heads to train."""
        trials, drawn = trials_of(cfg), torch.get_rng_state()
        norms = ValueNorms(backbone) if any(own.target.values for own in trials.values()) else None
        self.trials: dict[str, Trial] = {}
        for name, own in trials.items():
            torch.set_rng_state(drawn)  # every trial begins as it would alone
            self.trials[name] = Trial(own, self.spec, norms)
        self.alone = cfg.trials.file is None
        heads = [trial.heads for trial in self.trials.values()]
        self.heads = heads[0] if self.alone else nn.ModuleList(heads)

    def configure_callbacks(self) -> list[Callback]:
        dtype = next(iter(self.trials.values())).saved_dtype
        return [KeepBest(Path(self.cfg.out) / "best", self.cfg.trainer.keep_best, dtype)]

    def fresh(self) -> nn.Module:
        heads = [RetainingHeads(trial.heads.config) for trial in self.trials.values()]
        return heads[0] if self.alone else nn.ModuleList(heads)

    def export(self, trained: nn.Module, out: Path) -> Path:
        """``out/heads``, as ``locret-publish`` takes it, and ``out/heads.pt``; of trials a folder each in ``out/heads``."""
        if self.alone:
            return self.trials[""].export(trained, out)
        for (name, trial), heads in zip(self.trials.items(), cast(nn.ModuleList, trained), strict=True):
            folder = out / "heads" / name
            cast(RetainingHeads, heads).save_pretrained(folder, trial.saved_dtype)
            write_json(folder / TRAINING, trained_with(trial.cfg))
        return out / "heads"

    def groups(self) -> list[dict[str, object]]:
        return [
            {"params": list(trial.heads.parameters()), **adamw_settings(trial.cfg.optim)}
            for trial in self.trials.values()
        ]

    def used(self) -> nn.Module:
        return decoder_of(self.backbone)  # the language model's head is not used

    def configure_model(self) -> None:
        if self.cfg.trainer.strategy == "fsdp":
            assert self.device_mesh is not None
            shard(cast(RetainingHeads, self.heads), self.backbone, self.device_mesh["data_parallel"])

    def observe(
        self,
        batch: Sequence[Sample],
        backward: Callable[[Tensor], None] | None = None,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> list[list[Observer]]:
        """One forward of the backbone over samples: for each sample the figures of every trial and (with ``backward``) the
        gradients of all heads."""
        observers = []
        for sample in batch:
            ropes = self.description.ropes(self.backbone, len(sample.ids))
            mine = [trial.observer(sample, ropes, backward, watch, not self.alone) for trial in self.trials.values()]
            observers.append(mine)
        lengths = [len(sample.ids) for sample in batch]
        ids = pad_sequence([torch.tensor(sample.ids, device="cpu") for sample in batch], batch_first=True)
        handler = observers[0][0] if len(batch) == 1 and self.alone else Together(observers, lengths)
        with torch.no_grad(), self._attachment.handled_by(handler):
            decoder_of(self.backbone)(input_ids=ids.to(self.device), use_cache=False)
        return observers

    def training_step(self, step: Step, index: int) -> None:
        began = time.perf_counter()
        share = 1.0 / self.cfg.optim.accumulate
        for trial in self.trials.values():
            trial.draws.begin()
        seen, tokens = [], sum(len(sample.ids) for batch in step for sample in batch)
        for batch in step:
            for observers in self.observe(batch, lambda loss: self.manual_backward(loss * share)):
                seen.append(torch.stack([torch.stack(list(one.figures.means().values())) for one in observers]))
        mean = torch.cat([torch.stack(seen).mean(0).flatten(), seen[0].new_tensor([tokens])])  # [trials * 3 + 1]
        *figures, tokens = self.trainer.strategy.reduce(mean, reduce_op="mean").tolist()  # type: ignore[union-attr]
        scalars: dict[str, float] = {}
        for i, (name, trial) in enumerate(self.trials.items()):
            regression, smooth, recall = figures[3 * i : 3 * i + 3]
            self.require_finite(regression + smooth, trial.cfg.optim.lr, name)
            own = {
                "loss": regression + smooth,
                "train/regression": regression,
                "train/smoothing": smooth,
                "recall": recall,
            }
            scalars |= tagged(name, own)
        self.log_step(scalars | self._update(tokens * self.trainer.world_size, began))

    def on_validation_epoch_start(self) -> None:
        """A loss that draws draws alike in every validation."""
        super().on_validation_epoch_start()
        torch.manual_seed(self.cfg.seed)
        for trial in self.trials.values():
            trial.draws.begin()

    def validation_step(self, sample: Sample, index: int) -> None:
        """Every process validates every sample, so nothing is to be exchanged; the first one is the fixed prompt."""
        seen: list[tuple[Tensor, Tensor]] = []
        shown = index == 0 and self.trainer.is_global_zero and self.alone
        (observers,) = self.observe([sample], watch=(lambda *pair: seen.append(pair)) if shown else None)
        figures = [one.figures for one in observers]
        self._validation.append(
            torch.stack(
                [torch.stack([torch.stack(f) for f in (one.regression, one.smooth, one.recall)]) for one in figures]
            )
        )
        if seen:
            predicted_RS, target_RS = (torch.cat([pair[i][0] for pair in seen]).cpu() for i in (0, 1))
            self._show(sample, predicted_RS, target_RS, float(figures[0].means()["recall"]))

    def on_validation_epoch_end(self) -> None:
        self.validated = {}
        layers: dict[str, float] = {}
        # of each trial [3, scored layers]
        for name, (regression, smooth, recall) in zip(self.trials, torch.stack(self._validation).mean(0), strict=True):
            own = {"val/loss": float((regression + smooth).mean()), "val/recall": float(recall.mean())}
            self.validated |= tagged(name, own)
            each = zip(self.scored, recall, strict=True)
            layers |= tagged(name, {f"val/recall_layer/{layer:02d}": float(r) for layer, r in each})
        if self.alone:
            self.log("val/recall", self.validated["val/recall"], prog_bar=True, logger=False)
        self.logger.log_metrics({**self.validated, **layers}, step=self.global_step)  # type: ignore[union-attr]

    def _show(self, sample: Sample, predicted_RS: Tensor, target_RS: Tensor, recall: float) -> None:
        writer = cast("SummaryWriter", self.logger.experiment)  # type: ignore[union-attr]
        tokenizer = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        tokens = [tokenizer.decode([token]) for token in sample.ids[: predicted_RS.shape[-1]]]
        kept = most_kept(predicted_RS).tolist()
        title = f"First validation sample after {self.global_step} steps: {recall:.0%} of the true top tenth found"
        figure = cis_figure(predicted_RS, target_RS, self.scored, title)
        writer.add_image("val/predicted above target", pixels(figure), self.global_step, dataformats="HWC")
        writer.add_text("val/kept tenth", marked_text(tokens, kept), self.global_step)
