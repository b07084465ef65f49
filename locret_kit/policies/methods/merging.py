"""Evicted slots are folded into slots of the same head that stay.

``Nearest`` folds each into the slot that is nearest to it; ``Lococo`` folds all of them into the pool,
the slots of lowest score that stay, by a trained convolution.

With ``Nearest``, a slot's key and value are the weighted means of those of the tokens folded into it. Keys are compared and
averaged **before RoPE**: what a kept slot stands for is content, and its position stays its own. Averages of keys rotated for
different positions would cancel in the fast dimensions. Values know no position and take the same weights.

A token weighs what its score says of the attention it draws (``Score.log_weight``), or the same as every other token. What
a slot has taken over is remembered beside it, so a later fold is a mean over all tokens again and the weights of a head sum
to the same before and after. Position, entry score and running statistics of a slot stay those of its own token. Pinned
slots take nothing over: they are the text as it was read.

To attention a merged slot is one key, not several: it draws what its mean key draws.
Source: the training-free baseline of attention pools, as Locret 4.4 combines eviction with LoCoCo (arXiv 2406.05317).

A merger is asked once for the weights of a layer's slots (``slot_weights``), and then merges one head after the other;
``tracks_weight`` says whether a slot carries the weight that it took over.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...backbones.spec import BackboneSpec
from ...files import CONFIG, WEIGHTS, read_folder, write_folder
from ...naming import prefixed_errors
from ...validation import build
from ..base import Merge, Merged, Odd, Part, Positive, Score, Slots, rank_of
from ..registry import part, register
from .locret import NAMES, SCOPES, SCORE

Metric = Literal["cosine", "l2"]
TILE = 2**20
"""Similarities of evicted and kept keys that exist at once."""


def nearest_kept(keys_SD: Tensor, stay_S: Tensor, metric: Metric = "cosine", tile: int = TILE) -> Tensor:
    """The kept slot ``[E]`` (int64) whose key is nearest to that of each evicted slot, in the order of the evicted; ties go
    to the newer one. At least one slot stays; at most ``tile`` similarities exist at once, or one row of them."""
    newest_first_K = stay_S.nonzero().flatten().flip(0)
    leaving_ED, kept_KD = keys_SD[~stay_S], keys_SD[newest_first_K]
    # A key's own length changes nothing about which of the others is nearest.
    if metric == "cosine":
        kept_KD, handicap_K = F.normalize(kept_KD, dim=-1), kept_KD.new_zeros(())
    else:
        handicap_K = kept_KD.square().sum(-1) / 2
    pieces = leaving_ED.split(max(1, tile // len(kept_KD)))
    return newest_first_K[torch.cat([(piece @ kept_KD.T - handicap_K).argmax(-1) for piece in pieces])]


def merge_nearest(
    keys_SD: Tensor, values_SD: Tensor, log_weight_S: Tensor, stay_S: Tensor, metric: Metric = "cosine"
) -> Merged:
    """Fold every evicted slot of one head into the nearest that stays, by weighted means.

    Args:
        keys_SD: before RoPE; float32 or float64.
        values_SD: of the same dtype; the size of a value may differ from that of a key.
        log_weight_S: finite logarithms of the slots' weights, in any common unit.
        stay_S: bool. Where none stays there is nothing to fold into, and all are dropped.
    """
    if not stay_S.any() or stay_S.all():
        none_R = stay_S.new_empty(0, dtype=torch.int64)
        return Merged(none_R, keys_SD[none_R], values_SD[none_R], log_weight_S[none_R])
    leaving_E = (~stay_S).nonzero().flatten()
    slots_R, into_E = nearest_kept(keys_SD, stay_S, metric).unique(return_inverse=True)
    own_R, other_E = log_weight_S[slots_R], log_weight_S[leaving_E]
    top_R = own_R.scatter_reduce(0, into_E, other_E, "amax")  # weights are relative to the largest of a fold
    own_R, other_E = (own_R - top_R).exp(), (other_E - top_R[into_E]).exp()
    weight_R = torch.zeros_like(own_R).index_add(0, into_E, other_E)

    def mean(x_SD: Tensor) -> Tensor:
        total_RD = (own_R[:, None] * x_SD[slots_R]).index_add(0, into_E, other_E[:, None] * x_SD[leaving_E])
        return total_RD / (own_R + weight_R)[:, None]

    return Merged(slots_R, mean(keys_SD), mean(values_SD), top_R + weight_R.log())


@part("merge", "nearest")
class Nearest(Merge):
    """Every evicted slot is folded into the kept slot of its head whose key, before RoPE, is nearest to its own."""

    metric: Metric = "cosine"
    """'cosine' or 'l2'."""
    weight: Literal["score", "count"] = "score"
    """'score' or 'count': whether a token weighs what its score says, or as much as every other."""

    tracks_weight: ClassVar[bool] = True

    def slot_weights(
        self, score: Score, slots: Slots, scores_BHS: Tensor, protected_BHS: Tensor, stay_BHS: Tensor
    ) -> Tensor:
        """Logarithm of what each slot's own token weighs ``[B, H, S]`` (float32), by the policy's score."""
        if self.weight == "count":
            return torch.zeros_like(scores_BHS, dtype=torch.float32)
        return score.log_weight(scores_BHS).float()

    def merge(self, layer: int, keys_SD: Tensor, values_SD: Tensor, weights_S: Tensor, stay_S: Tensor) -> Merged:
        """One head's slots that take others over."""
        return merge_nearest(keys_SD, values_SD, weights_S, stay_S, self.metric)


register(
    "merge-locret",
    "Locret, section 4.4",
    {**SCOPES, "merge": Nearest(), **SCORE},
    names=NAMES,
    keeps="as locret; evicted slots are averaged into the nearest kept one",
)
register(
    "merge",
    "{base} with an attention pool, Locret, section 4.4",
    {"merge": Nearest()},
    base="h2o",
    keeps="as h2o; evicted slots are averaged into the nearest kept one",
)


# ---- LoCoCo -----------------------------------------------------------------------------------------------------------

# LoCoCo, arXiv 2406.05317: one convolution per layer folds evicted slots into a pool of merged slots.
#
# ``x_i = [k_i; v_i]`` (keys before RoPE) are the ``L`` slots to fold, oldest first: the evicted ones, and the pool
# ``p_1 < ... < p_R`` among them. With the layer's convolution ``W`` of kernel ``K``, its bias ``b`` and its gate
# ``c``:
#
#     a[m, i] = relu(b[m] + sum_j W[m, :, j] . x[i + j - (K - 1) / 2])     x is 0 outside of 1..L
#     w[m, i] = (1 - g) [i = p_m] + g exp(a[m, i]) / sum_l exp(a[m, l])    g = 1 / (1 + exp(-c))
#     k[p_m] <- sum_i w[m, i] k_i          v[p_m] <- sum_i w[m, i] v_i
#
# All heads of a layer share its convolution. The weights of a merged slot are convex, and a gate of 0 is plain
# eviction. With layer norms (``norm``) the convolution reads ``LayerNorm(x_i)``, with a scale and a shift per channel
# and layer; ``k_i`` and ``v_i`` themselves are mixed. Locret (appendix C.2) trains "the newly-added convolution and
# layer norms".
# Source: LoCoCo, arXiv 2406.05317, and its released code, with these heads, the kernel of 21, the ReLU and a learnt
# gate that starts at a half. Here the gate is a sigmoid, so that weights stay convex, and keys are taken before RoPE.


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
