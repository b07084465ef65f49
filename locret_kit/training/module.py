"""Retaining heads in training: one observed forward per step, its figures on the board.

The observer gives the backbone full causal attention, and takes each layer's loss as soon as its q, k, v exist. No gradient
reaches the backbone, so a layer's graph holds one head and is freed before the next layer runs.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..backbones.decoder_modules import decoder_of
from ..backbones.handlers import Handler, LayerInput, Softmax
from ..backbones.probe import describe
from ..backbones.rope import Rope, rotated_text
from ..backbones.spec import AttentionLayer
from ..cache.attend import attend_text
from ..cis import SmoothL1, cis_loss, cis_target, top_recall
from ..config.train_options import TrainConfig
from ..files import write_json
from ..heads import HeadsConfig, RetainingHeads, kept_in, rank_of
from ..naming import prefixed_errors
from ..policies.grammar import parse_loss
from ..samples import Sample
from ..text.tokens import token_texts
from . import TRAINING, FrozenTraining, gather, trained_with
from .data import SampleModule, Step
from .pictures import cis_figure, marked_text, most_kept
from .strategy import shard


@dataclass
class Observer:
    """Observes the attention calls of a forward for one sample, and calls ``backward(loss)`` once per layer.

    Layers with a window have no loss, because their cache is their window.
    """

    heads: RetainingHeads
    """In training mode with ``backward``."""
    ropes: list[Rope]
    """One per layer."""
    layers: Sequence[AttentionLayer]
    """Sizes and windows of each layer."""
    answers: tuple[tuple[int, int], ...]
    """Half-open spans of answer tokens."""
    kind: str
    """Argument of ``cis_target``."""
    lead: int
    """Prompt tokens before each answer that count as its queries (the last one predicts the first answer token)."""
    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = cis_loss
    """``cis_loss`` with its settings."""
    backward: Callable[[Tensor], None] | None = None
    watch: Callable[[Tensor, Tensor], None] | None = None
    """Called with each scored layer's predicted and target CIS ``[B, H, S]``."""
    measures: list[Tensor] = field(default_factory=list)
    """Measures ``[3]`` of each scored layer: regression loss, smoothing loss, recall of the true top 10%."""

    def __post_init__(self) -> None:
        self.queries = sorted({t for a, b in self.answers for t in range(max(0, a - self.lead), b)})
        self.slots = self.answers[-1][0]
        self.scored_layers = sum(layer.window is None for layer in self.layers)

    def score(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_rot: Tensor, k_rot: Tensor, softmax: Softmax
    ) -> None:
        """Target, loss and gradients of one layer, from q ``[B, Q, T, D]``, k and v ``[B, H, T, D]`` before RoPE, and q
        and k after it."""
        if self.layers[layer].window is not None:
            return
        at, prompt = torch.tensor(self.queries, device=q.device), slice(0, self.slots)
        target_BHS = cis_target(
            q_rot[:, :, at], k_rot, at, softmax.scaling, cap=softmax.cap, sinks_Q=softmax.sinks_Q, kind=self.kind
        )[..., prompt]
        home = next(self.heads[layer].parameters()).device  # a spread backbone is on many devices
        target_BHS = target_BHS.to(home)
        with torch.set_grad_enabled(self.backward is not None):
            predicted_BHS = self.heads[layer](*(x[:, :, prompt].to(home) for x in (q, k, v)))
            regression, smooth = self.loss(predicted_BHS, target_BHS)
            if self.backward is not None:
                self.backward((regression + smooth) / self.scored_layers)
        if self.watch is not None:
            self.watch(predicted_BHS.detach(), target_BHS)
        recall = top_recall(predicted_BHS.detach(), target_BHS)
        self.measures.append(torch.stack((regression.detach(), smooth.detach(), recall)))


class Observed(Handler):
    """Samples in one forward, padded on the right to one length, with one observer each. Attention is causal, so no token
    sees the padding, and an observer gets only its own sample's tokens."""

    wants_unrotated = True

    def __init__(self, observers: Sequence[Observer], lengths: Sequence[int]) -> None:
        self.observers, self.lengths = observers, lengths

    def attend(
        self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax, x: LayerInput = None
    ) -> Tensor:
        q_rot, k_rot = self._rotated(layer, q_BQTD, k_BHTD)
        for b, (observer, length) in enumerate(zip(self.observers, self.lengths, strict=True)):
            q, k, v, q_own, k_own = (x[b : b + 1, :, :length] for x in (q_BQTD, k_BHTD, v_BHTD, q_rot, k_rot))
            observer.score(layer, q, k, v, q_own, k_own, softmax)
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.observers[0].layers[layer])

    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        q_rot, k_rot = self._rotated(layer, q_BQTD, k_BHTD)
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.observers[0].layers[layer])

    def _rotated(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys, each text's by its own frequencies."""
        rotated = [
            rotated_text(observer.ropes[layer], q_BQTD[b : b + 1], k_BHTD[b : b + 1])
            for b, observer in enumerate(self.observers)
        ]
        q_rot, k_rot = rotated[0] if len(rotated) == 1 else (torch.cat(rows) for rows in zip(*rotated, strict=True))
        return q_rot, k_rot


def unit_of(cfg: TrainConfig) -> Literal["logit", "log_prob"]:
    """The unit of the scores: only regression on log-probabilities gives scores that heads share."""
    regression = isinstance(parse_loss(cfg.loss.kind), SmoothL1)
    return cfg.target.kind if regression else "logit"


class HeadTraining(FrozenTraining):
    """Trains retaining heads on a frozen backbone.

    Each layer's loss is back-propagated inside the forward, when its q, k and v are computed. Logged scalars are
    means over a step's samples in all processes.

    Raises:
        ValueError: a backbone with an unknown rotation, or with windows in all layers.
    """

    watched = "val/recall"

    def __init__(self, backbone: PreTrainedModel, cfg: TrainConfig) -> None:
        super().__init__(backbone, cfg)
        self.description = describe(backbone)
        self.description.require_rotations()
        self.spec = self.description.spec
        self.scored = [layer for layer, window in enumerate(self.spec.windows) if window is None]
        """Layers that are evicted from, and have heads to train."""
        if not self.scored:
            raise ValueError(
                f"every layer of {cfg.backbone.model} has a window, and is never evicted from: nothing to train"
            )
        inference = cfg.infer.published() | ({"policy": cfg.infer.policy} if cfg.infer.policy else {})
        self.heads = RetainingHeads(
            HeadsConfig.for_backbone(
                self.spec, cfg.backbone.model, cfg.heads.d_hidden, target=unit_of(cfg), adapter=cfg.backbone.adapter,
                inference=inference,
            )
        )  # fmt: skip
        for head, window in zip(self.heads.layers, self.spec.windows, strict=True):
            if window is not None:  # never evicted from, so nothing trains it: zeros pack to nothing
                head.load_state_dict({name: torch.zeros_like(weight) for name, weight in head.state_dict().items()})
        self._dtype: torch.dtype = getattr(torch, cfg.heads.dtype_saved)
        self._loss = partial(
            cis_loss, loss=parse_loss(cfg.loss.kind), smoothing=cfg.loss.smoothing, top_weight=cfg.loss.top_weight
        )

    def begin(self) -> None:
        """Copy the weights of other heads of the same backbone, width and unit. A loss of one's own takes any unit."""
        if (source := self.cfg.heads.init) is None:
            return
        with prefixed_errors(f"heads.init={source}", ValueError, OSError):
            heads = RetainingHeads.from_pretrained(source, backbone=self.cfg.backbone.model)
            heads.check_backbone(self.spec)
        for key, name in (("d_hidden", "heads.d_hidden"), ("target", "target.kind")):
            mine, theirs = getattr(self.heads.config, key), getattr(heads.config, key)
            if mine != theirs and not (key == "target" and mine != self.cfg.target.kind):
                raise ValueError(f"heads.init={source} has {name}={theirs}, not {mine}")
        self.heads.load_state_dict(heads.state_dict())

    def configure_callbacks(self) -> list[Callback]:
        return [KeepBest(Path(self.cfg.out) / "best", self.cfg.trainer.keep_best, self._dtype)]

    def export(self, trained: nn.Module, out: Path) -> Path:
        """Write ``out/heads``, as ``locret-publish`` takes it, and ``out/heads.pt``; the folder."""
        for target in (out / "heads", out / "heads.pt"):
            cast(RetainingHeads, trained).save_pretrained(target, self._dtype)
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
    ) -> list[Tensor]:
        """One forward of the backbone over samples. Returns each sample's measures ``[3, L]`` of its ``L`` scored
        layers; ``backward`` accumulates the gradients of all heads."""
        observers = [
            Observer(
                self.heads, self.description.ropes(self.backbone, len(sample.ids)), self.spec.layers, sample.answers,
                kind=self.cfg.target.kind, lead=self.cfg.target.lead, loss=self._loss, backward=backward, watch=watch,
            )
            for sample in batch
        ]  # fmt: skip
        lengths = [len(sample.ids) for sample in batch]
        ids = pad_sequence([torch.tensor(sample.ids, device="cpu") for sample in batch], batch_first=True)
        with torch.no_grad(), self._attachment.handled_by(Observed(observers, lengths)):
            decoder_of(self.backbone)(input_ids=ids.to(self.device), use_cache=False)
        return [torch.stack(observer.measures, 1) for observer in observers]

    def training_step(self, step: Step, index: int) -> None:
        began = time.perf_counter()
        share = 1.0 / self.cfg.optim.accumulate
        seen, tokens = [], sum(len(sample.ids) for batch in step for sample in batch)
        for batch in step:
            for figures in self.observe(batch, lambda loss: self.manual_backward(loss * share)):
                seen.append(torch.stack([layers.mean() for layers in figures]))
        mean = torch.cat([torch.stack(seen).mean(0), seen[0].new_tensor([tokens])])  # [3 + 1]
        regression, smooth, recall, tokens = self.trainer.strategy.reduce(mean, reduce_op="mean").tolist()  # type: ignore[union-attr]
        scalars = {"loss": regression + smooth, "train/regression": regression, "train/smoothing": smooth}
        self.end_step(scalars | {"recall": recall}, tokens * self.trainer.world_size, began)

    def on_validation_epoch_start(self) -> None:
        """A loss that draws draws alike in every validation."""
        super().on_validation_epoch_start()
        torch.manual_seed(self.cfg.seed)

    def validation_step(self, sample: Sample, index: int) -> None:
        """Every process validates every sample, so nothing is to be exchanged; the first one is the fixed prompt."""
        seen: list[tuple[Tensor, Tensor]] = []
        shown = index == 0 and self.trainer.is_global_zero
        (figures,) = self.observe([sample], watch=(lambda *pair: seen.append(pair)) if shown else None)
        self._validation.append(figures)
        if seen:
            predicted_RS, target_RS = (torch.cat([pair[i][0] for pair in seen]).cpu() for i in (0, 1))
            self._show(sample, predicted_RS, target_RS, float(figures[2].mean()))

    def on_validation_epoch_end(self) -> None:
        regression, smooth, recall = torch.stack(self._validation).mean(0)  # [3, scored layers]
        self.validated = {"val/loss": float((regression + smooth).mean()), "val/recall": float(recall.mean())}
        layers = {f"val/recall_layer/{i:02d}": float(r) for i, r in zip(self.scored, recall, strict=True)}
        self.log("val/recall", self.validated["val/recall"], prog_bar=True, logger=False, sync_dist=True)
        self.logger.log_metrics({**self.validated, **layers}, step=self.global_step)  # type: ignore[union-attr]

    def _show(self, sample: Sample, predicted_RS: Tensor, target_RS: Tensor, recall: float) -> None:
        writer = self.logger.experiment  # type: ignore[union-attr]
        tokenizer = self.trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        tokens = token_texts(tokenizer, sample.ids[: predicted_RS.shape[-1]])
        kept = most_kept(predicted_RS).tolist()
        title = f"First validation sample after {self.global_step} steps: {recall:.0%} of the true top tenth found"
        figure = cis_figure(predicted_RS, target_RS, self.scored, title)
        writer.add_figure("val/predicted above target", figure, self.global_step)
        writer.add_text("val/kept tenth", marked_text(tokens, kept), self.global_step)


class KeepBest(Callback):
    """Callback that keeps the heads with the ``keep`` highest recalls in ``folder``, each ready for inference.

    File names hold all of the state, so a resumed run continues from the folder.
    """

    def __init__(self, folder: Path, keep: int, dtype: torch.dtype) -> None:
        self.folder, self.keep, self.dtype = folder, keep, dtype

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = cast(FrozenTraining, pl_module)
        recall = module.validated.get("val/recall")
        if recall is None or not self.keep:
            return
        # The first process's: others may round otherwise, and all have to gather.
        mine = trainer.strategy.broadcast(f"recall={recall:.4f}-step={trainer.global_step}")
        best = sorted({*kept_in(self.folder), mine}, key=rank_of)[-self.keep :]
        if mine in trainer.strategy.broadcast(best):
            heads = gather(trainer)
            if isinstance(heads, RetainingHeads):
                folder = self.folder / mine
                heads.save_pretrained(folder, self.dtype)
                data = cast(SampleModule, trainer.datamodule)  # type: ignore[attr-defined]
                write_json(folder / TRAINING, trained_with(module.cfg, data.set_aside, trainer.global_step, recall))
        if trainer.is_global_zero:
            for name in set(kept_in(self.folder)) - set(best):
                shutil.rmtree(self.folder / name)
