"""Norms of values as the output projection has them, which say how much a slot can change the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..backbones.probe import describe
from ..backbones.spec import decoder_of


def output_projection(attention: nn.Module) -> nn.Module | None:
    """The product after attention, by the names that transformers gives it; None without one."""
    names = ("o_proj", "out_proj", "dense", "c_proj", "wo")
    return next((module for name in names if isinstance(module := getattr(attention, name, None), nn.Module)), None)


class ValueNorms:
    """``norm(W_h v)`` for every query head ``h``, with its columns ``W_h`` of the layer's output projection.

    The projection is asked for its columns once per layer, so quantised and adapted ones count as they are; of these
    ``W_h^T W_h`` is kept, ``[Q, D, D]``. Source: CriticalKV, arXiv 2502.03805; KVzap, arXiv 2601.07891 (KVzip+).
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        description, decoder = describe(backbone), decoder_of(backbone)
        self.projections: list[nn.Module] = []
        for call in description.calls:
            if not call.shared:
                projection = output_projection(decoder.get_submodule(call.module))
                if projection is None:
                    raise ValueError(
                        f"target.values: attention of {call.module!r} has no output projection by a known name"
                    )
                self.projections.append(projection)
        self._gram: dict[int, Tensor] = {}

    @torch.no_grad()
    def gram(self, layer: int, like: Tensor, heads: int) -> Tensor:
        """``W_h^T W_h`` of each query head, ``[Q, D, D]`` in float32."""
        if layer not in self._gram:
            project, D = self.projections[layer], like.shape[-1]
            unit = torch.eye(heads * D, device=like.device, dtype=like.dtype)
            columns = (project(unit) - project(torch.zeros_like(unit[:1]))).float().view(heads, D, -1)  # [Q, D, E]
            self._gram[layer] = columns @ columns.transpose(1, 2)
        return self._gram[layer]

    def __call__(self, layer: int, v_BHSD: Tensor, heads: int) -> Tensor:
        """Norms ``[B, Q, S]`` (float32) of a layer's values under its ``heads`` query heads; never 0."""
        v_BQSD = v_BHSD.float().repeat_interleave(heads // v_BHSD.shape[1], 1)
        square_BQS = ((v_BQSD @ self.gram(layer, v_BHSD, heads)) * v_BQSD).sum(-1)
        return square_BQS.clamp_min(1e-12).sqrt()
