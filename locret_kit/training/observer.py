"""The training handler: full causal attention for the backbone, and each layer's loss as soon as its q, k, v exist.

No gradient reaches the backbone, so a layer's graph holds one head and is freed before the next layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..backbones.handler import Handler, Softmax
from ..backbones.rope import Rope, rotated_text
from ..backbones.spec import AttentionLayer
from ..cache.attend import attend_text
from ..cis import cis_loss, cis_target, top_recall
from ..heads import RetainingHeads


class Observer(Handler):
    """Sees every attention call of a plain forward; calls ``backward(loss)`` once per layer.

    Layers with a window keep no head loss: their cache is their window.

    Args:
        heads: in training mode where ``backward`` is given.
        ropes: one per layer. answers: half-open spans of answer tokens. lead: prompt tokens before each answer whose
            queries count as answer queries too (the last one predicts the first answer token).
        loss: ``cis_loss`` with its settings; kind: of ``cis_target``.
        layers: sizes and windows of each layer.
        watch: called with each scored layer's predicted and target CIS ``[B, H, S]``.
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
        lead: int,
        loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = cis_loss,
        backward: Callable[[Tensor], None] | None = None,
        watch: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self.heads, self.ropes, self.layers = heads, ropes, layers
        self.kind, self.loss, self.backward, self.watch = kind, loss, backward, watch
        self.queries = sorted({t for a, b in answers for t in range(max(0, a - lead), b)})
        self.slots = answers[-1][0]
        self.scored_layers = sum(layer.window is None for layer in layers)
        self.figures: list[Tensor] = []
        """Of each scored layer ``[3]``: regression and smoothing loss, recall of the true top 10%."""

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        q_rot, k_rot = rotated_text(self.ropes[layer], q_BQTD, k_BHTD)
        self.score(layer, q_BQTD, k_BHTD, v_BHTD, q_rot, k_rot, softmax)
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.layers[layer])

    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        """Attention of a layer that reads another's keys: its queries ask for no target."""
        q_rot, k_rot = rotated_text(self.ropes[layer], q_BQTD, k_BHTD)
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.layers[layer])

    def score(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_rot: Tensor, k_rot: Tensor, softmax: Softmax
    ) -> None:
        """Target, loss and gradients of one layer, from its q, k, v before and its q, k after RoPE."""
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
        self.figures.append(torch.stack((regression.detach(), smooth.detach(), recall)))


class Together(Handler):
    """Samples in one forward, those of different length padded on the right, and an observer for each of them.

    Attention is causal, so no token sees the padding after it, and an observer is handed its sample's own tokens alone.
    """

    wants_unrotated = True

    def __init__(self, observers: Sequence[Observer], lengths: Sequence[int]) -> None:
        self.observers, self.lengths = observers, lengths

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        rotated = []
        for b, (observer, length) in enumerate(zip(self.observers, self.lengths, strict=True)):
            q, k, v = (x[b : b + 1] for x in (q_BQTD, k_BHTD, v_BHTD))
            q_rot, k_rot = rotated_text(observer.ropes[layer], q, k)
            rotated.append((q_rot, k_rot))
            q, k, v, q_rot, k_rot = (x[:, :, :length] for x in (q, k, v, q_rot, k_rot))
            observer.score(layer, q, k, v, q_rot, k_rot, softmax)
        q_rot, k_rot = (torch.cat(rows) for rows in zip(*rotated, strict=True))
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.observers[0].layers[layer])

    def attend_shared(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        rotated = [
            rotated_text(observer.ropes[layer], q_BQTD[b : b + 1], k_BHTD[b : b + 1])
            for b, observer in enumerate(self.observers)
        ]
        q_rot, k_rot = (torch.cat(rows) for rows in zip(*rotated, strict=True))
        return attend_text(q_rot, k_rot, v_BHTD, softmax, self.observers[0].layers[layer])
