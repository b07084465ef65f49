"""LoCoCo, arXiv 2406.05317: one convolution per layer folds evicted slots into a pool of merged slots.

``x_i = [k_i; v_i]`` (keys before RoPE) are the ``L`` slots to fold, oldest first: the evicted ones, and the pool
``p_1 < ... < p_R`` among them. With the layer's convolution ``W`` of kernel ``K``, its bias ``b`` and its gate
``c``:

    a[m, i] = relu(b[m] + sum_j W[m, :, j] . x[i + j - (K - 1) / 2])     x is 0 outside of 1..L
    w[m, i] = (1 - g) [i = p_m] + g exp(a[m, i]) / sum_l exp(a[m, l])    g = 1 / (1 + exp(-c))
    k[p_m] <- sum_i w[m, i] k_i          v[p_m] <- sum_i w[m, i] v_i

All heads of a layer share its convolution. The weights of a merged slot are convex, and a gate of 0 is plain
eviction. With layer norms (``norm``) the convolution reads ``LayerNorm(x_i)``, with a scale and a shift per channel
and layer; ``k_i`` and ``v_i`` themselves are mixed. Locret (appendix C.2) trains "the newly-added convolution and
layer norms".
Source: LoCoCo, arXiv 2406.05317, and its released code, with these heads, the kernel of 21, the ReLU and a learnt
gate that starts at a half. Here the gate is a sigmoid, so that weights stay convex, and keys are taken before RoPE.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...backbones.spec import BackboneSpec
from ...files import CONFIG, WEIGHTS, read_folder, write_folder
from ...naming import prefixed_errors
from ...validation import build
from ..base import Merge, Merged, Odd, Part, Positive, Score, Slots, rank_of
from ..registry import part

FORMAT = "locret_kit.lococo.v1"
DIMENSIONS = ("model_type", "n_layers", "n_kv_heads", "head_dim")


@dataclass(frozen=True)
class PoolConfig(Part):
    """Configuration of a saved pool: its sizes, its backbone and the settings it was trained with."""

    backbone: str
    """Hub id (or path) of the backbone the pool was trained on."""
    model_type: str
    n_layers: Positive
    n_kv_heads: Positive
    head_dim: Positive
    slots: Positive
    """Merged slots of a head, at most; part of the budget."""
    kernel: Odd = 21
    """Slots that a convolution sees at once; odd."""
    norm: bool = False
    """Whether slots are layer-normed before the convolution."""
    policy: str = ""
    """Policy that chose the slots that stay while the pool was trained."""
    inference: dict[str, object] = field(default_factory=dict)
    """Settings it was trained with: budget, chunk, stabilizers, local_len, positions."""

    @classmethod
    def for_backbone(cls, spec: BackboneSpec, backbone: str, slots: int, **rest: object) -> Self:
        """The configuration of a pool of ``slots`` slots for a backbone."""
        dimensions = {name: getattr(spec, name) for name in DIMENSIONS}
        return build(cls, dict(backbone=backbone, slots=slots, **dimensions, **rest))


class SlotConvolution(nn.Module):
    """One layer's mixing weights."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__()
        C, K, exact = 2 * config.head_dim, config.kernel, torch.float32
        self.conv = nn.Conv1d(C, config.slots, K, padding=K // 2, dtype=exact)
        self.gate = nn.Parameter(torch.tensor(0.0, dtype=exact))  # a half, as published
        self.norm = nn.LayerNorm(C, dtype=exact) if config.norm else None

    def forward(self, x_LC: Tensor, pool_R: Tensor) -> Tensor:
        """Convex weights ``[R, L]`` of ``L`` slots ``[k; v]``; ``pool_R`` (int64, ascending) are the pool's among them, at most
        as many as the pool has."""
        R = len(pool_R)
        weight, bias, gate = (x.to(x_LC.dtype) for x in (self.conv.weight[:R], self.conv.bias[:R], self.gate))  # type: ignore[index]
        if self.norm is not None:
            scale, shift = self.norm.weight.to(x_LC.dtype), self.norm.bias.to(x_LC.dtype)
            x_LC = F.layer_norm(x_LC, x_LC.shape[-1:], scale, shift, self.norm.eps)
        a_RL = F.conv1d(x_LC.T[None], weight, bias, padding=self.conv.padding)[0]
        share = gate.sigmoid()
        own_RL = F.one_hot(pool_R, len(x_LC)).to(x_LC.dtype)
        return (1 - share) * own_RL + share * a_RL.relu().softmax(-1)


class ConvPool(nn.Module):
    """The convolutions of every layer of one backbone, with their configuration. ``pool[i]`` is layer ``i``'s."""

    def __init__(self, config: PoolConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(SlotConvolution(config) for _ in range(config.n_layers))

    def __getitem__(self, layer: int) -> SlotConvolution:
        return self.layers[layer]  # type: ignore[return-value]

    @torch.no_grad()
    def mean_gate(self) -> float:
        """Part of the convolution in the mixing weights, over the layers."""
        return float(torch.stack([self[i].gate.sigmoid() for i in range(len(self.layers))]).mean())

    def check_backbone(self, spec: BackboneSpec) -> None:
        """Raise ValueError with every dimension of ``spec`` that differs from the pool's backbone."""
        pairs = [(name, getattr(self.config, name), getattr(spec, name)) for name in DIMENSIONS]
        if wrong := [f"{n}: the pool has {mine}, the backbone has {its}" for n, mine, its in pairs if mine != its]:
            raise ValueError(f"this pool is for {self.config.backbone}: " + "; ".join(wrong))


def save_pool(pool: ConvPool, folder: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``model.safetensors`` and ``config.json``, each renamed into its place when it is whole."""
    state = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in pool.state_dict().items()}
    write_folder(Path(folder), {"format": FORMAT, **asdict(pool.config)}, state)


def read_pool_config(folder: str | Path) -> PoolConfig:
    """The configuration of a saved pool.

    Raises:
        FileNotFoundError: nothing there. ValueError: something else is there; it is named.
    """
    folder = Path(folder)
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"pool={str(folder)!r} holds no pool: it needs {CONFIG} and {WEIGHTS}")
    raw, _ = read_folder(folder, "pool")
    version = raw.pop("format", None)
    if version != FORMAT:
        raise ValueError(f"{folder / CONFIG} says format={version!r}, a pool says {FORMAT!r}")
    with prefixed_errors(str(folder / CONFIG), ValueError):
        return build(PoolConfig, raw, "field")


def load_pool(folder: str | Path) -> ConvPool:
    """A saved pool, in float32 on the CPU.

    Raises:
        FileNotFoundError: nothing there. ValueError: not a pool, or a weight is missing, not expected or of another shape.
    """
    config, path = read_pool_config(folder), Path(folder) / WEIGHTS
    state = read_folder(Path(folder), "pool")[1]
    with torch.device("cpu"):
        pool = ConvPool(config)
    try:
        pool.load_state_dict(state)
    except RuntimeError as error:
        reasons = [line.strip() for line in str(error).splitlines()[1:]]
        raise ValueError(f"{path} does not fit {config.backbone}: " + " ".join(reasons[:4])) from error
    return pool.requires_grad_(False)


def pool_slots(slots: Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor, size: int) -> Tensor:
    """Boolean ``[B, H, S]``: the pool of each head, the ``size`` slots of lowest score among those that stay and are not
    protected, or as many as there are. In the next pool a merged slot is one like the others, by the score of its own token."""
    free_BHS = stay_BHS & ~protected_BHS
    place_BHS = rank_of(scores_BHS, protected_BHS, slots.valid).masked_fill(~free_BHS, -1)
    last_BHR = place_BHS.topk(min(size, place_BHS.shape[-1])).indices
    return torch.zeros_like(free_BHS).scatter_(-1, last_BHR, True) & free_BHS


def merge_convolved(
    convolution: SlotConvolution, keys_SD: Tensor, values_SD: Tensor, pool_S: Tensor, stay_S: Tensor
) -> Merged:
    """Fold every evicted slot of one head into its pool, by the layer's convolution.

    Args:
        keys_SD: before RoPE, as the values in float32 or float64.
        pool_S: bool, the pool; slots that stay. Where there is none, or nothing goes, nothing is folded.
    """
    if stay_S.all() or not pool_S.any():
        none_R = stay_S.new_empty(0, dtype=torch.int64)
        return Merged(none_R, keys_SD[none_R], values_SD[none_R])
    slots_L = (pool_S | ~stay_S).nonzero().flatten()
    keys_LD, values_LD = keys_SD[slots_L], values_SD[slots_L]
    weights_RL = convolution(torch.cat((keys_LD, values_LD), -1), pool_S[slots_L].nonzero().flatten())
    return Merged(pool_S.nonzero().flatten(), weights_RL @ keys_LD, weights_RL @ values_LD)


@part("merge", "lococo")
class Lococo(Merge):
    """Folds evicted slots into the pool by LoCoCo's trained convolution; the slots that stay are the policy's."""

    pool: str
    """Folder of the trained pool."""

    tracks_weight: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        read_pool_config(self.pool)

    @cached_property
    def weights(self) -> ConvPool:
        """Read once, when they are first needed."""
        return load_pool(self.pool)

    def bind(self, spec: BackboneSpec, devices: Sequence[torch.device]) -> None:
        """Raise ValueError where the pool is not for this backbone."""
        self.weights.check_backbone(spec)
        for convolution, device in zip(self.weights.layers, devices, strict=True):
            convolution.to(device)

    def slot_weights(
        self, score: Score, slots: Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor
    ) -> Tensor:
        """The pool of each head."""
        return pool_slots(slots, scores_BHS, protected_BHS, stay_BHS, self.weights.config.slots)

    def merge(self, layer: int, keys_SD: Tensor, values_SD: Tensor, weights_S: Tensor, stay_S: Tensor) -> Merged:
        """One head's pool after folding the evicted slots into it."""
        return merge_convolved(self.weights[layer], keys_SD, values_SD, weights_S, stay_S)
