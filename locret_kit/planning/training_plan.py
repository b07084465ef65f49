"""Memory of a training step, predicted from a transformers configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from ..backbones.weight_bits import check_weight_bits
from ..validation import check, checked
from .backbone_sizes import ITEM_BYTES, BackboneSizes, Dtype, head_parameters
from .inference_plan import Plan

Positive = Annotated[int, Ge(1)]


@dataclass(frozen=True)
class TrainSetting:
    """One training step on one device that holds everything: samples of ``tokens``, ``answer`` of them the answer."""

    tokens: Positive
    answer: Positive = 64
    batch: Positive = 1
    """Samples of one forward (``data.batch``), padded to the longest."""
    dtype: str = "bfloat16"
    """Type of the backbone; heads, their gradients and AdamW's two moments are float32."""
    d_hidden: Positive = 1024
    block: Positive = 64
    """Answer queries that the target reads at a time (`column_max`)."""
    weight_bits: int | None = None
    """Bits of a weight in the backbone's layers; None is ``dtype``."""

    def __post_init__(self) -> None:
        check(self)
        if self.answer >= self.tokens:
            raise ValueError(f"answer={self.answer} must be below tokens={self.tokens}")
        check_weight_bits(self.weight_bits)
        checked("dtype", Dtype, self.dtype)

    def __str__(self) -> str:
        samples = f"{self.batch} samples of " if self.batch > 1 else ""
        return f"{samples}{self.tokens} tokens, {self.answer} of them the answer"


def plan_training(backbone: BackboneSizes, setting: TrainSetting) -> Plan:
    """Memory of one step: a forward of the frozen backbone in which one head of one sample at a time holds a graph.

    ``tests/training/test_plan_train.py`` measures whole steps on a CPU in float32: the prediction is within 2% of the peak. A
    CPU's matrix products take scratch in bfloat16, of up to twice their output, which is not counted.
    """
    spec, item, T, B = backbone.spec, ITEM_BYTES[setting.dtype], setting.tokens, setting.batch
    prompt, heads = T - setting.answer, head_parameters(spec, setting.d_hidden)
    trained = heads // spec.n_layers * spec.windows.count(None)  # heads of windowed layers get no gradient
    q, k = T * spec.n_heads * spec.head_dim, T * spec.n_kv_heads * spec.head_dim
    always = backbone.stream(B * T) + 2 * spec.head_dim * T * len(set(spec.windows))  # and what the backbone rotates by
    layer = always + B * ((q + 2 * k) + (q + k) + (q + k if backbone.fused else 0))  # before and after RoPE
    logits = spec.n_heads * min(setting.block, setting.answer) * T  # of a block; beside them the last one's, or a copy
    inputs = spec.qkv_dim * (4 if item == 4 else item + 4)  # of a token: as they are, and in the heads' float32
    phases = {
        "rotate": (layer + 3 * q) * item,
        "target": layer * item + 4 * (2 * logits + k),
        "head": layer * item + prompt * max(2 * item * spec.qkv_dim, inputs + 2 * 4 * setting.d_hidden),
        "mlp": always * item + backbone.mlp(B * T, item, setting.weight_bits),
    }
    if setting.weight_bits is not None:
        phases["project"] = backbone.projection(B * T, item, setting.weight_bits, always, layer + B * q)
    if B > 1:
        phases["attend"] = (layer + B * (q + k) + B * q) * item  # what was rotated alone, together, and the output
    return Plan(
        weights=backbone.weights(item, setting.weight_bits),
        heads=4 * (heads + 3 * trained),
        cache=0,
        phases=phases | {"optimiser": 4 * trained},
    )
