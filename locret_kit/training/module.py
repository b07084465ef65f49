"""The LightningModule: optimiser, schedule and logging around one observed forward a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from ..backbones.families import decoder_of, require_adapter, ropes_of, spec_of, text_config
from ..backbones.intercept import attach
from ..heads import HeadsConfig, RetainingHeads
from ..samples.chat import Sample
from .board import cis_image, flat, marked_text, most_kept, peak_mib
from .observer import Observer
from .strategy import average_gradients, clip_values, shard

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
        self._seen: list[Tensor] = []
        self._seconds = 0.0
        self._validation: list[Tensor] = []
        self.validated: dict[str, float] = {}
        """Means of the last validation, by tag."""

    @property
    def backbone(self) -> Any:
        return self._backbone[0]

    @property
    def at_step_end(self) -> bool:
        """Whether no sample waits for an optimiser step."""
        return not self._seen

    def configure_model(self) -> None:
        if self.cfg.trainer.strategy == "fsdp":
            assert self.device_mesh is not None
            shard(self.heads, self.backbone, self.device_mesh["data_parallel"])

    def on_fit_start(self) -> None:
        self.backbone.to(self.device)
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
        """Lightning places validations by counting samples of one process: count them as this run's processes would."""
        batches = checkpoint["global_step"] * self.cfg.optim.accumulate
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for scope in ("total", "current"):
            progress[scope] = dict.fromkeys(progress[scope], batches)

    def transfer_batch_to_device(self, batch: Sample, device: torch.device, dataloader_idx: int) -> Sample:
        """A sample is integers; ``observe`` makes the tensor where it is needed."""
        return batch

    def observe(
        self,
        sample: Sample,
        backward: Callable[[Tensor], None] | None = None,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Observer:
        """One forward of the backbone over a sample, its figures and (with ``backward``) the gradients of every head."""
        loss = {name: getattr(self.cfg.loss, name) for name in ("smoothing", "top_fraction", "top_weight", "beta")}
        target = self.cfg.target
        observer = Observer(
            self.heads, ropes_of(self.backbone, len(sample.ids)), self.spec.windows, sample.answers,
            kind=target.kind, floor=target.floor, lead=target.lead, loss=loss, backward=backward, watch=watch,
        )  # fmt: skip
        ids = torch.tensor([sample.ids], device=self.device)
        with torch.no_grad(), self._attachment.handled_by(observer):
            decoder_of(self.backbone)(input_ids=ids, use_cache=False)
        return observer

    def training_step(self, sample: Sample, index: int) -> None:
        began = time.perf_counter()
        share = 1.0 / self.cfg.optim.accumulate
        means = self.observe(sample, lambda loss: self.manual_backward(loss * share)).figures.means()
        tokens = means["recall"].new_tensor(len(sample.ids))
        self._seen.append(torch.stack([means["regression"], means["smooth"], means["recall"], tokens]))
        if len(self._seen) == self.cfg.optim.accumulate:
            rate = self._update()
            self._seconds += time.perf_counter() - began
            self._log_step(torch.stack(self._seen), rate)
            self._seen, self._seconds = [], 0.0
        else:
            self._seconds += time.perf_counter() - began

    def _update(self) -> float:
        """One optimiser step with the gradients of every process; the learning rate it was made with."""
        optimiser: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        rate = schedule.get_last_lr()[0]
        average_gradients(self.heads.parameters())
        if self.cfg.optim.clip_value:
            clip_values(self.heads.parameters(), self.cfg.optim.clip_value)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        self.trainer.datamodule.done += self.cfg.optim.accumulate * self.trainer.world_size  # type: ignore[attr-defined]
        return rate

    def _log_step(self, seen: Tensor, rate: float) -> None:
        """``seen [samples, 4]``: regression, smoothing, recall and tokens of this process's samples."""
        means = self.trainer.strategy.reduce(seen.mean(0), reduce_op="mean").tolist()  # type: ignore[union-attr]
        regression, smooth, recall, tokens = means
        scalars = {
            "loss": regression + smooth,
            "train/regression": regression,
            "train/smoothing": smooth,
            "recall": recall,
            "train/lr": rate,
            "tok/s": tokens * len(seen) * self.trainer.world_size / self._seconds,
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
        figures = self.observe(sample, watch=watch).figures
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
