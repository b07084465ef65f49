"""One trial: heads in training and the signal that they learn from a shared forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..backbones.decoder_attention import DecoderAttention
from ..backbones.probe import describe
from ..backbones.rope import Rope
from ..backbones.spec import BackboneSpec
from ..cis import cis_loss
from ..config.train_config import TrainConfig
from ..heads import HeadsConfig, RetainingHeads
from ..naming import blaming
from ..samples.sample import Sample
from ..text.spans import Span
from .observer import Observer
from .values import ValueNorms


def unit_of(cfg: TrainConfig) -> Literal["logit", "log_prob"]:
    """The unit of the scores: only regression on a logarithm of attention gives scores that heads share."""
    regression = cfg.loss.kind in ("smooth_l1", "mse")
    return "log_prob" if regression and cfg.target.kind != "logit" else "logit"


def evicting(backbone: PreTrainedModel, cfg: TrainConfig) -> DecoderAttention:
    """The attention of a backbone whose rotation is known and whose slots are evicted. Raises ValueError for another one."""
    description = describe(backbone)
    description.require_rotations()
    if all(window is not None for window in description.spec.windows):
        raise ValueError(
            f"every layer of {cfg.backbone.model} has a window, and is never evicted from: nothing to train"
        )
    return description


class Draws:
    """The default generator as a trial that is alone finds it: what others draw meanwhile does not count."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A step begins, with the generator as it is now."""
        self._mine = torch.get_rng_state()

    def __enter__(self) -> None:
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._mine)

    def __exit__(self, *error: object) -> None:
        self._mine = torch.get_rng_state()
        torch.set_rng_state(self._outer)


class Trial:
    """Heads, and what decides how they learn.

    Args:
        cfg: the settings that would train them alone. norms: shared by all trials; used where the target wants values.
    """

    def __init__(self, cfg: TrainConfig, spec: BackboneSpec, norms: ValueNorms | None) -> None:
        self.cfg, self.spec = cfg, spec
        self.heads = RetainingHeads(
            HeadsConfig.for_backbone(
                spec,
                cfg.backbone.model,
                cfg.heads.d_hidden,
                form=cfg.heads.form,
                target=unit_of(cfg),
                adapter=cfg.backbone.adapter,
                inference=cfg.infer.published() | ({"policy": cfg.infer.policy} if cfg.infer.policy else {}),
            )
        )
        for head, window in zip(self.heads.layers, spec.windows, strict=True):
            if window is not None:  # never evicted from, so nothing trains it: zeros pack to nothing
                head.load_state_dict({name: torch.zeros_like(weight) for name, weight in head.state_dict().items()})
        self.draws = Draws()
        self._norms = norms if cfg.target.values else None
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

    def export(self, trained: nn.Module, out: Path) -> Path:
        """Write ``out/heads``, as ``locret-publish`` takes it, and ``out/heads.pt``; the folder."""
        for target in (out / "heads", out / "heads.pt"):
            cast(RetainingHeads, trained).save_pretrained(target, self.saved_dtype)
        return out / "heads"

    def observer(
        self,
        sample: Sample,
        ropes: list[Rope],
        backward: Callable[[Tensor], None] | None,
        watch: Callable[[Tensor, Tensor], None] | None,
        company: bool,
    ) -> Observer:
        """The observer of one sample in one forward, by itself or in the ``company`` of other trials."""
        target = self.cfg.target
        return Observer(
            self.heads, ropes, self.spec.layers, asking(sample, target.queries), kind=target.kind, floor=target.floor,
            lead=target.lead, window=target.window, loss=partial(cis_loss, **vars(self.cfg.loss)), slots=sample.scored,
            norms=self._norms, backward=backward, watch=watch, draws=self.draws if company else None,
        )  # fmt: skip


def asking(sample: Sample, queries: Literal["all", "answers", "replay"]) -> tuple[Span, ...]:
    """The spans of a sample whose queries ask for a target."""
    if queries == "all" or sample.replayed is None:
        return sample.answers
    return tuple(span for span in sample.answers if (span[0] >= sample.replayed) == (queries == "replay"))
