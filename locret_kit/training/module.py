"""The LightningModule: optimiser, schedule and logging around one observed forward a step."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from ..backbones.families import decoder_of, require_adapter, ropes_of, spec_of, text_config
from ..backbones.intercept import attach
from ..heads import HeadsConfig, RetainingHeads
from ..samples.chat import Sample
from .observer import Observer


class HeadTraining(L.LightningModule):
    """Trains retaining heads on a frozen backbone.

    The backbone is not a submodule: it is in no checkpoint and sees no optimiser. Each layer's loss is back-propagated
    inside the forward, as its q, k and v appear.
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
                inference={
                    k: getattr(cfg.infer, k) for k in ("budget", "chunk", "stabilizers", "local_len", "positions")
                },
            )
        )
        self.cfg = cfg
        self._backbone = [backbone]
        self._accumulated = 0
        self._clock = time.perf_counter()

    @property
    def backbone(self) -> Any:
        return self._backbone[0]

    def on_fit_start(self) -> None:
        self.backbone.to(self.device)
        self._attachment = attach(self.backbone)

    def teardown(self, stage: str) -> None:
        if hasattr(self, "_attachment"):
            self._attachment.detach()

    def transfer_batch_to_device(self, batch: Sample, device: torch.device, dataloader_idx: int) -> Sample:
        """A sample is integers; ``observe`` makes the tensor where it is needed."""
        return batch

    def observe(self, sample: Sample, backward: Any = None) -> Observer:
        """One forward of the backbone over a sample, its figures and (with ``backward``) the gradients of every head."""
        loss = {k: getattr(self.cfg.loss, k) for k in ("smoothing", "top_fraction", "top_weight", "beta")}
        target = self.cfg.target
        observer = Observer(
            self.heads, ropes_of(self.backbone, len(sample.ids)), self.spec.windows, sample.answers,
            kind=target.kind, floor=target.floor, lead=target.lead, loss=loss, backward=backward,
        )  # fmt: skip
        ids = torch.tensor([sample.ids], device=self.device)
        with torch.no_grad(), self._attachment.handled_by(observer):
            decoder_of(self.backbone)(input_ids=ids, use_cache=False)
        return observer

    def training_step(self, sample: Sample, index: int) -> None:
        optimiser: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        self._clock = time.perf_counter()
        share = 1.0 / self.cfg.optim.accumulate

        def backward(loss: Tensor) -> None:
            self.manual_backward(loss * share)

        figures = self.observe(sample, backward).figures.means()
        self._accumulated += 1
        if self._accumulated == self.cfg.optim.accumulate:
            if self.cfg.optim.clip_value:
                self.clip_gradients(optimiser, self.cfg.optim.clip_value, "value")
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
            self._accumulated = 0
        seconds = time.perf_counter() - self._clock
        self.log("loss", figures["regression"] + figures["smooth"], prog_bar=True)
        self.log("train/regression", figures["regression"])
        self.log("train/smoothing", figures["smooth"])
        self.log("recall", figures["recall"], prog_bar=True)
        self.log("train/lr", schedule.get_last_lr()[0])
        self.log("tok/s", len(sample.ids) / seconds, prog_bar=True)

    def validation_step(self, sample: Sample, index: int) -> None:
        figures = self.observe(sample).figures.means()
        self.log("val/loss", figures["regression"] + figures["smooth"], batch_size=1)
        self.log("val/recall", figures["recall"], batch_size=1, prog_bar=True)

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
