"""The LightningModule: optimiser, schedule and logging around one observed forward a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor

from ..backbones.families import decoder_of, require_adapter, ropes_of, spec_of, text_config
from ..backbones.intercept import attach
from ..heads import HeadsConfig, RetainingHeads
from ..samples.chat import Sample
from .board import cis_image, flat, marked_text, most_kept, peak_mib
from .data import Step
from .observer import Observer, PaddedBatch
from .strategy import finish_gradients, shard

INFERENCE = ("budget", "chunk", "stabilizers", "local_len", "positions")


class HeadTraining(L.LightningModule):
    """Trains retaining heads on a frozen backbone.

    The backbone is not a submodule: it is in no checkpoint and sees no optimiser. Each layer's loss is back-propagated
    inside the forward, as its q, k and v appear. Scalars are logged here, at the number of the optimiser step that they
    belong to, as means over the samples of that step in all processes.
    """

    def __init__(self, backbone: Any, cfg: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        config = text_config(backbone)
        require_adapter(config)
        self.spec = spec_of(config)
        if None not in self.spec.windows:
            raise ValueError(
                f"every layer of {cfg.backbone.model} has a window, and is never evicted from: nothing to train"
            )
        self.heads = RetainingHeads(
            HeadsConfig.for_backbone(
                self.spec,
                cfg.backbone.model,
                cfg.heads.d_hidden,
                target=cfg.target.kind,
                adapter=cfg.backbone.adapter,
                inference={name: getattr(cfg.infer, name) for name in INFERENCE},
            )
        )
        self.cfg = cfg
        self._backbone = [backbone]
        self._validation: list[Tensor] = []
        self.validated: dict[str, float] = {}
        """Means of the last validation, by tag."""

    @property
    def backbone(self) -> Any:
        return self._backbone[0]

    def configure_model(self) -> None:
        if self.cfg.trainer.strategy == "fsdp":
            assert self.device_mesh is not None
            shard(self.heads, self.backbone, self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        if not hasattr(self.backbone, "hf_device_map"):
            decoder_of(self.backbone).to(self.device)  # the language model's head is not used
        self._attachment = attach(self.backbone)
        if self.trainer.is_global_zero:
            from torch.utils.tensorboard.summary import hparams

            for summary in hparams(flat(self.cfg), {"val/recall": 0.0}):
                self.logger.experiment.file_writer.add_summary(summary)  # type: ignore[union-attr]

    def teardown(self, stage: str) -> None:
        if hasattr(self, "_attachment"):
            self._attachment.detach()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Scalars of the steps that a checkpoint holds must not be lost after it."""
        if self.trainer.is_global_zero:
            self.logger.experiment.flush()  # type: ignore[union-attr]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Lightning places validations by its count of items, which are steps here: set it to the steps that are done."""
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for scope in ("total", "current"):
            progress[scope] = dict.fromkeys(progress[scope], checkpoint["global_step"])

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Samples are integers; ``observe`` makes the tensor where it is needed."""
        return batch

    def observe(
        self,
        batch: Sequence[Sample],
        backward: Callable[[Tensor], None] | None = None,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> list[Observer]:
        """One forward of the backbone over samples, the figures of each and (with ``backward``) every head's gradients."""
        loss = {name: getattr(self.cfg.loss, name) for name in ("smoothing", "top_fraction", "top_weight", "beta")}
        target = self.cfg.target
        observers = [
            Observer(
                self.heads, ropes_of(self.backbone, len(sample.ids)), self.spec.windows, sample.answers,
                kind=target.kind, floor=target.floor, lead=target.lead, loss=loss, backward=backward, watch=watch,
            )
            for sample in batch
        ]  # fmt: skip
        lengths = [len(sample.ids) for sample in batch]
        ids = torch.zeros(len(batch), max(lengths), dtype=torch.long)
        for row, sample in zip(ids, batch, strict=True):
            row[: len(sample.ids)] = torch.tensor(sample.ids)
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
        rate = self._update()
        self._log_step(torch.stack(seen), rate, time.perf_counter() - began)

    def _update(self) -> float:
        """One optimiser step with the gradients of every process; the learning rate it was made with."""
        optimiser: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        rate = schedule.get_last_lr()[0]
        finish_gradients(self.trainer.strategy, list(self.heads.parameters()), self.cfg.optim.clip_value)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        self.trainer.datamodule.done += self.cfg.optim.accumulate * self.trainer.world_size  # type: ignore[attr-defined]
        return rate

    def _log_step(self, seen: Tensor, rate: float, seconds: float) -> None:
        """``seen [samples, 4]``: regression, smoothing, recall and tokens of this process's samples."""
        means = self.trainer.strategy.reduce(seen.mean(0), reduce_op="mean").tolist()  # type: ignore[union-attr]
        regression, smooth, recall, tokens = means
        scalars = {
            "loss": regression + smooth,
            "train/regression": regression,
            "train/smoothing": smooth,
            "recall": recall,
            "train/lr": rate,
            "tok/s": tokens * len(seen) * self.trainer.world_size / seconds,
            "memory/peak_MiB": peak_mib(self.device),
        }
        for name in ("loss", "recall", "tok/s"):
            self.log(name, scalars[name], prog_bar=True, logger=False)
        if self.global_step % self.cfg.trainer.log_every == 0:
            self.logger.log_metrics(scalars, step=self.global_step)  # type: ignore[union-attr]

    def on_validation_epoch_start(self) -> None:
        self._validation, self.validated = [], {}

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
            self._show(sample, predicted_RS, target_RS)

    def on_validation_epoch_end(self) -> None:
        regression, smooth, recall = torch.stack(self._validation).mean(0)  # [3, scored layers]
        self.validated = {"val/loss": float((regression + smooth).mean()), "val/recall": float(recall.mean())}
        scored = [layer for layer, window in enumerate(self.spec.windows) if window is None]
        layers = {f"val/recall_layer/{layer:02d}": float(r) for layer, r in zip(scored, recall, strict=True)}
        self.log("val/recall", self.validated["val/recall"], prog_bar=True, logger=False)
        self.logger.log_metrics({**self.validated, **layers}, step=self.global_step)  # type: ignore[union-attr]

    def _show(self, sample: Sample, predicted_RS: Tensor, target_RS: Tensor) -> None:
        writer: Any = self.logger.experiment  # type: ignore[union-attr]
        tokenizer = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        tokens = [tokenizer.decode([token]) for token in sample.ids[: predicted_RS.shape[-1]]]
        kept = most_kept(predicted_RS).tolist()
        writer.add_image("val/predicted above target", cis_image(predicted_RS, target_RS), self.global_step)
        writer.add_text("val/kept tenth", marked_text(tokens, kept), self.global_step)

    def configure_optimizers(self) -> Any:
        optim = self.cfg.optim
        adamw = torch.optim.AdamW(
            self.heads.parameters(), lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay
        )

        def factor(step: int) -> float:
            if step < optim.warmup_steps:
                return (step + 1) / (optim.warmup_steps + 1)
            return max(0.0, (optim.steps - step) / max(1, optim.steps - optim.warmup_steps))

        return {"optimizer": adamw, "lr_scheduler": torch.optim.lr_scheduler.LambdaLR(adamw, factor)}
