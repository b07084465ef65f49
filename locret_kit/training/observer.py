"""The training handler: full causal attention for the backbone, and each layer's loss as soon as its q, k, v exist.

No gradient reaches the backbone, so a layer's graph holds one head and is freed before the next layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..backbones.handler import Handler, Softmax
from ..backbones.rope import Rope, rotated_text
from ..backbones.spec import AttentionLayer
from ..cache.attend import attend_text
from ..cis import cis_loss, cis_target, top_recall
from ..heads import RetainingHeads

Targets = dict[tuple[object, ...], Tensor]
"""Targets of one layer and sample, by what makes them."""


@dataclass
class LayerFigures:
    """Figures of one forward, layer by layer: regression and smoothing loss, recall of the true top 10%."""

    regression: list[Tensor] = field(default_factory=list)
    smooth: list[Tensor] = field(default_factory=list)
    recall: list[Tensor] = field(default_factory=list)

    def means(self) -> dict[str, Tensor]:
        return {name: torch.stack(getattr(self, name)).mean() for name in ("regression", "smooth", "recall")}


class Observer(Handler):
    """Sees every attention call of a plain forward; calls ``backward(loss)`` once per layer.

    Layers with a window keep no head loss: their cache is their window.

    Args:
        heads: in training mode where ``backward`` is given.
        ropes: one per layer. answers: half-open spans of answer tokens. lead: prompt tokens before each answer whose
            queries count as answer queries too (the last one predicts the first answer token).
        slots: first tokens that are scored; by default those before the last answer.
        loss: ``cis_loss`` with its settings; kind, floor, window: of ``cis_target``.
        norms: makes ``norms_BQS`` of ``cis_target`` from a layer, its values and the number of query heads.
        layers: sizes and windows of each layer.
        watch: called with each scored layer's predicted and target CIS ``[B, H, S]``.
        draws: what the loss draws from the default generator is drawn within it.
    """

    wants_unrotated = True

    def __init__(
        self,
        heads: RetainingHeads,
        ropes: list[Rope],
        layers: Sequence[AttentionLayer],
        answers: tuple[tuple[int, int], ...],
        *,
        kind: str,
        floor: float,
        lead: int,
        loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = cis_loss,
        window: int = 0,
        slots: int | None = None,
        norms: Callable[[int, Tensor, int], Tensor] | None = None,
        backward: Callable[[Tensor], None] | None = None,
        watch: Callable[[Tensor, Tensor], None] | None = None,
        draws: AbstractContextManager[object] | None = None,
    ) -> None:
        self.heads, self.ropes, self.layers = heads, ropes, layers
        self.kind, self.floor, self.loss, self.backward, self.watch = kind, floor, loss, backward, watch
        self.queries = sorted({t for a, b in answers for t in range(max(0, a - lead), b)})
        self.window, self.norms = window, norms
        self.draws = draws or nullcontext()
        self.slots = answers[-1][0] if slots is None else slots
        if kind == "log_mass":  # slots that no query comes after by more than the window have no target
            self.slots = max(1, min(self.slots, self.queries[-1] - window))
        self.scored_layers = sum(layer.window is None for layer in layers)
        self.figures = LayerFigures()

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        q_rot, k_rot = self.rotated(layer, q_BQTD, k_BHTD)
        self.score(layer, q_BQTD, k_BHTD, v_BHTD, q_rot, k_rot, softmax, {})
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.layers[layer])

    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention of a layer that reads another's keys: its queries ask for no target."""
        q_rot, k_rot = self.rotated(layer, q_BQTD, k_BHTD)
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.layers[layer])

    def rotated(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys after RoPE, from position 0 on. Queries may be those of the newest tokens alone."""
        return rotated_text(self.ropes[layer], q_BQTD, k_BHTD)

    def score(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_rot: Tensor, k_rot: Tensor, softmax: Softmax, made: Targets
    ) -> None:
        """Target, loss and gradients of one layer, from its q, k, v before and its q, k after RoPE. ``made``: targets of the
        layer and the sample that other observers have made, and this one's if it is new."""
        if self.layers[layer].window is not None:
            return
        key = (self.kind, self.floor, self.window, self.norms is not None, *self.queries)
        if key not in made:
            made[key] = self.target(layer, q, v, q_rot, k_rot, softmax)
        prompt = slice(0, self.slots)
        home = next(self.heads[layer].parameters()).device  # a spread backbone is on many devices
        target_BHS = made[key][..., prompt].to(home)
        with torch.set_grad_enabled(self.backward is not None), self.draws:
            predicted_BHS = self.heads[layer](*(x[:, :, prompt].to(home) for x in (q, k, v)))
            regression, smooth = self.loss(predicted_BHS, target_BHS)
            if self.backward is not None:
                self.backward((regression + smooth) / self.scored_layers)
        if self.watch is not None:
            self.watch(predicted_BHS.detach(), target_BHS)
        self.figures.regression.append(regression.detach())
        self.figures.smooth.append(smooth.detach())
        self.figures.recall.append(top_recall(predicted_BHS.detach(), target_BHS))

    def target(self, layer: int, q: Tensor, v: Tensor, q_rot: Tensor, k_rot: Tensor, softmax: Softmax) -> Tensor:
        """Target CIS ``[B, H, S]`` of every token of the sample."""
        at = torch.tensor(self.queries, device=q.device)
        return cis_target(
            q_rot[:, :, at],
            k_rot,
            at,
            softmax.scaling,
            cap=softmax.cap,
            sinks_Q=softmax.sinks_Q,
            kind=self.kind,
            floor=self.floor,
            window=self.window,
            norms_BQS=None if self.norms is None else self.norms(layer, v, q.shape[1]),
        )


class Together(Handler):
    """Samples in one forward, those of different length padded on the right, and for each of them one observer or several.

    Attention is causal, so no token sees the padding after it, and an observer is handed its sample's own tokens alone. The
    observers of a sample share its rotated queries and keys, and targets that are made alike.
    """

    wants_unrotated = True

    def __init__(self, observers: Sequence[Sequence[Observer]], lengths: Sequence[int]) -> None:
        self.observers, self.lengths = observers, lengths

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        rotated = []
        for b, (observers, length) in enumerate(zip(self.observers, self.lengths, strict=True)):
            q, k, v = (x[b : b + 1] for x in (q_BQTD, k_BHTD, v_BHTD))
            q_rot, k_rot = observers[0].rotated(layer, q, k)
            rotated.append((q_rot, k_rot))
            q, k, v, q_own, k_own = (x[:, :, :length] for x in (q, k, v, q_rot, k_rot))
            made: Targets = {}
            for observer in observers:
                observer.score(layer, q, k, v, q_own, k_own, softmax, made)
        q_rot, k_rot = (torch.cat(rows) for rows in zip(*rotated, strict=True))
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.observers[0][0].layers[layer])

    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        rotated = [
            observers[0].rotated(layer, q_BQTD[b : b + 1], k_BHTD[b : b + 1])
            for b, observers in enumerate(self.observers)
        ]
        q_rot, k_rot = (torch.cat(rows) for rows in zip(*rotated, strict=True))
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.observers[0][0].layers[layer])
