"""Retaining heads in training: one observed forward per step, its figures on the board."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..backbones.families import decoder_of, require_adapter, ropes_of, spec_of, text_config
from ..config.train import TrainConfig
from ..heads import HeadsConfig, RetainingHeads
from ..naming import blaming
from ..samples.chat import Sample
from .base import FrozenTraining
from .board import cis_figure, marked_text, most_kept, pixels
from .callbacks import KeepBest
from .data import Step
from .observer import Observer, PaddedBatch
from .strategy import shard
from .values import ValueNorms


def unit_of(cfg: TrainConfig) -> Literal["logit", "log_prob"]:
    """The unit of the scores: only regression on a logarithm of attention gives scores that heads share."""
    regression = cfg.loss.kind in ("smooth_l1", "mse")
    return "log_prob" if regression and cfg.target.kind != "logit" else "logit"


class HeadTraining(FrozenTraining):
    """Trains retaining heads on a frozen backbone.

    Each layer's loss is back-propagated inside the forward, as its q, k and v appear. Scalars are means over the samples of
    a step in all processes.
    """

    watched = "val/recall"

    def __init__(self, backbone: PreTrainedModel, cfg: TrainConfig) -> None:
        super().__init__(backbone, cfg)
        config = text_config(backbone)
        require_adapter(config)
        self.spec = spec_of(config)
        self.scored = [layer for layer, window in enumerate(self.spec.windows) if window is None]
        """Layers that are evicted from, and have heads to train."""
        if not self.scored:
            raise ValueError(
                f"every layer of {cfg.backbone.model} has a window, and is never evicted from: nothing to train"
            )
        self.heads = RetainingHeads(
            HeadsConfig.for_backbone(
                self.spec,
                cfg.backbone.model,
                cfg.heads.d_hidden,
                form=cfg.heads.form,
                target=unit_of(cfg),
                adapter=cfg.backbone.adapter,
                inference=cfg.infer.published() | ({"policy": cfg.infer.policy} if cfg.infer.policy else {}),
            )
        )
        self._norms = ValueNorms(backbone) if cfg.target.values else None
        if cfg.heads.init is not None:
            self._begin_with(cfg.heads.init)

    def _begin_with(self, source: str) -> None:
        """Copy the weights of other heads of the same backbone, width and unit."""
        with blaming(f"heads.init={source}", ValueError, OSError):
            heads = RetainingHeads.from_pretrained(source, backbone=self.cfg.backbone.model)
        heads.check_backbone(self.spec)
        for key in ("form", "d_hidden", "target"):
            mine, theirs = getattr(self.heads.config, key), getattr(heads.config, key)
            if mine != theirs:
                name = "target.kind" if key == "target" else f"heads.{key}"
                raise ValueError(f"heads.init={source} has {name}={theirs}, not {mine}")
        self.heads.load_state_dict(heads.state_dict())

    @property
    def saved_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cfg.heads.dtype_saved == "bfloat16" else torch.float32

    def configure_callbacks(self) -> list[Callback]:
        return [KeepBest(Path(self.cfg.out) / "best", self.cfg.trainer.keep_best, self.saved_dtype)]

    def rebuilt(self, state: dict[str, Tensor]) -> RetainingHeads:
        heads = RetainingHeads(self.heads.config)
        heads.load_state_dict({name.removeprefix("heads."): weight for name, weight in state.items()})
        return heads

    def export(self, trained: nn.Module, out: Path) -> Path:
        """``out/heads``, as ``locret-publish`` takes it, and ``out/heads.pt``."""
        for target in (out / "heads", out / "heads.pt"):
            cast(RetainingHeads, trained).save_pretrained(target, self.saved_dtype)
        return out / "heads"

    def used(self) -> nn.Module:
        return decoder_of(self.backbone)  # the language model's head is not used

    def configure_model(self) -> None:
        if self.cfg.trainer.strategy == "fsdp":
            assert self.device_mesh is not None
            shard(self.heads, self.backbone, self.device_mesh["data_parallel"])

    def observe(
        self,
        batch: Sequence[Sample],
        backward: Callable[[Tensor], None] | None = None,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> list[Observer]:
        """One forward of the backbone over samples, the figures of each and (with ``backward``) every head's gradients."""
        target = self.cfg.target
        observers = [
            Observer(
                self.heads, ropes_of(self.backbone, len(sample.ids)), self.spec.windows, sample.answers, kind=target.kind,
                floor=target.floor, lead=target.lead, window=target.window, loss=vars(self.cfg.loss), slots=sample.scored,
                norms=self._norms, backward=backward, watch=watch,
            )
            for sample in batch
        ]  # fmt: skip
        lengths = [len(sample.ids) for sample in batch]
        ids = pad_sequence([torch.tensor(sample.ids) for sample in batch], batch_first=True)
        handler = observers[0] if len(batch) == 1 else PaddedBatch(observers, lengths)
        with torch.no_grad(), self._attachment.handled_by(handler):
            decoder_of(self.backbone)(input_ids=ids.to(self.device), use_cache=False)
        return observers

    def training_step(self, step: Step, index: int) -> None:
        began = time.perf_counter()
        share = 1.0 / self.cfg.optim.accumulate
        seen = []
        for batch in step:
            observers = self.observe(batch, lambda loss: self.manual_backward(loss * share))
            for sample, observer in zip(batch, observers, strict=True):
                means = observer.figures.means()
                tokens = means["recall"].new_tensor(len(sample.ids))
                seen.append(torch.stack([means["regression"], means["smooth"], means["recall"], tokens]))
        mean = torch.stack(seen).mean(0)  # [4]
        regression, smooth, recall, tokens = self.trainer.strategy.reduce(mean, reduce_op="mean").tolist()  # type: ignore[union-attr]
        self.require_finite(regression + smooth)
        rate = self._update()
        seconds = time.perf_counter() - began
        self.log_step({
            "loss": regression + smooth, "train/regression": regression, "train/smoothing": smooth, "recall": recall,
            "train/lr": rate, "tok/s": tokens * len(seen) * self.trainer.world_size / seconds,
        })  # fmt: skip

    def validation_step(self, sample: Sample, index: int) -> None:
        """Every process validates every sample, so nothing is to be exchanged; the first one is the fixed prompt."""
        seen: list[tuple[Tensor, Tensor]] = []
        watch = (lambda *pair: seen.append(pair)) if index == 0 and self.trainer.is_global_zero else None
        figures = self.observe([sample], watch=watch)[0].figures
        self._validation.append(
            torch.stack([torch.stack(f) for f in (figures.regression, figures.smooth, figures.recall)])
        )
        if seen:
            predicted_RS, target_RS = (torch.cat([pair[i][0] for pair in seen]).cpu() for i in (0, 1))
            self._show(sample, predicted_RS, target_RS, float(figures.means()["recall"]))

    def on_validation_epoch_end(self) -> None:
        regression, smooth, recall = torch.stack(self._validation).mean(0)  # [3, scored layers]
        self.validated = {"val/loss": float((regression + smooth).mean()), "val/recall": float(recall.mean())}
        layers = {f"val/recall_layer/{layer:02d}": float(r) for layer, r in zip(self.scored, recall, strict=True)}
        self.log("val/recall", self.validated["val/recall"], prog_bar=True, logger=False)
        self.logger.log_metrics({**self.validated, **layers}, step=self.global_step)  # type: ignore[union-attr]

    def _show(self, sample: Sample, predicted_RS: Tensor, target_RS: Tensor, recall: float) -> None:
        writer: Any = self.logger.experiment  # type: ignore[union-attr]
        tokenizer = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        tokens = [tokenizer.decode([token]) for token in sample.ids[: predicted_RS.shape[-1]]]
        kept = most_kept(predicted_RS).tolist()
        title = f"First validation sample after {self.global_step} steps: {recall:.0%} of the true top tenth found"
        figure = cis_figure(predicted_RS, target_RS, self.scored, title)
        writer.add_image("val/predicted above target", pixels(figure), self.global_step, dataformats="HWC")
        writer.add_text("val/kept tenth", marked_text(tokens, kept), self.global_step)
