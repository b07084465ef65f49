"""Training-free scores that read keys, values and statistics of queries: no attention matrix, no retaining heads.

Each method is defined by its paper for one eviction after a whole prompt, and that case is kept exactly. In a chunked,
bounded run a slot is either fresh (its own chunk) or kept (an earlier chunk, whose queries and neighbours may be gone):

| score | fixed when a token enters | once, when what it is compared with is there | anew at every eviction |
|---|---|---|---|
| ``knorm`` | everything | - | - |
| ``keydiff`` | - | - | everything, over kept and fresh slots (the paper's own block-wise form) |
| ``lagkv`` | - | everything, when the next partition of the text is complete | - |
| ``expected-attention`` | running mean and covariance of all queries so far | - | everything else |
| ``compactor`` | - | attention inside a block of the text | leverage over kept and fresh slots, both z-scores |

State of a layer between calls is in the ``memory`` that entries and slots share. What ``score`` writes into
``slots.entry_scores`` stays with the slot. Both depend on the text and on where evictions fall, never on how the model is fed.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..backbones.rope import Rope, rotate
from .base import Entry, ScorePart, Slots, at_least


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 where it is that already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- knorm ------------------------------------------------------------------------------------------------------------


def low_key_norm(k_BHSD: Tensor) -> Tensor:
    """``-|k|``, ``[B, H, S]``: keys of low norm receive most attention. Source: arXiv 2406.11430, section 3."""
    return -wide(k_BHSD).norm(dim=-1)


@dataclass(frozen=True)
class KNorm(ScorePart):
    """The negated norm of the key as attention sees it. RoPE does not change a norm but by its factor on cos and sin, so it
    is fixed when the token enters. Source: L2-norm strategy, arXiv 2406.11430."""

    def score_new_tokens(self, entry: Entry) -> Tensor:
        k = wide(entry.k)
        if entry.rope is not None:  # the factor lengthens only the part that is turned
            k = rotate(k, *entry.rope.tables(k.new_zeros(1), k.dtype))
        return low_key_norm(k).float()


# ---- keydiff ----------------------------------------------------------------------------------------------------------


def key_difference(k_BHSD: Tensor) -> Tensor:
    """``-cos(k_s, mean_j k_j / |k_j|)``, ``[B, H, S]``, of rotated keys; rows of zeros (padding) do not count.
    Source: KeyDiff, arXiv 2504.15364, equation of section 3.2 and algorithm 1."""
    unit_BHSD = F.normalize(wide(k_BHSD), dim=-1)
    anchor_BHD1 = F.normalize(unit_BHSD.sum(2), dim=-1)[..., None]
    return -(unit_BHSD @ anchor_BHD1)[..., 0]


@dataclass(frozen=True)
class KeyDiff(ScorePart):
    """How little a key resembles the mean direction of the keys held now. Source: KeyDiff, arXiv 2504.15364."""

    def score_slots(self, slots: Slots) -> Tensor:
        return key_difference(slots.keys()).float()


# ---- lagkv ------------------------------------------------------------------------------------------------------------


def lag_relative(x_BHPLD: Tensor, present_BHPL: Tensor) -> Tensor:
    """``softmax_L( std_D( (x - low) / (high - low) ) )``, ``[B, H, P - 1, L]``: partitions of ``L`` tokens, ``low`` and
    ``high`` the channel-wise extremes of the *next* partition. A channel in which that one does not vary counts as 0.
    Source: LagKV, arXiv 2504.04704, equations 4 to 8."""
    x_BHPLD = wide(x_BHPLD)
    there = present_BHPL[:, :, 1:, :, None]
    low = x_BHPLD[:, :, 1:].masked_fill(~there, float("inf")).amin(3, keepdim=True)
    span = x_BHPLD[:, :, 1:].masked_fill(~there, float("-inf")).amax(3, keepdim=True) - low
    relative = torch.where(span > 0, (x_BHPLD[:, :, :-1] - low) / span, 0.0)
    return relative.std(-1).masked_fill(~present_BHPL[:, :, :-1], float("-inf")).softmax(-1)


def lag_rank(k_BHPLD: Tensor, v_BHPLD: Tensor, present_BHPL: Tensor) -> Tensor:
    """Rank of each token in its partition over ``L`` (``[B, H, P - 1, L]``, in ``[0, 1)``) by the sum of the key's and the
    value's lag-relative score. Ranks make "the best of each partition" one order over the whole text."""
    score_BHPL = lag_relative(k_BHPLD, present_BHPL) + lag_relative(v_BHPLD, present_BHPL)
    order_BHPL = score_BHPL.argsort(dim=-1, stable=True)
    return order_BHPL.argsort(-1).float() / k_BHPLD.shape[3]


def on_grid(x_BHSD: Tensor, cell_BHS: Tensor, cells: int) -> Tensor:
    """Rows moved to their cell, ``[B, H, cells, D]``; cell ``cells`` is dropped, cells without a row are zero."""
    B, H, _, D = x_BHSD.shape
    index_BHSD = cell_BHS[..., None].expand_as(x_BHSD)
    return x_BHSD.new_zeros(B, H, cells + 1, D).scatter_(2, index_BHSD, x_BHSD)[:, :, :cells]


@dataclass(frozen=True)
class LagKV(ScorePart):
    """Rank of a token in its partition of the text by how widely its key and value spread over the range of the next
    partition. The last complete partition and what follows score 1, above every rank; the first ``sinks`` tokens score 2.

    A slot is scored once, when the partition behind its own is complete, and keeps that: so every part of the text keeps
    an equal share, as in the paper's single pass. Source: LagKV, arXiv 2504.04704 (ranks: its implementation in kvpress)."""

    sinks: int = 4
    lag: int = 128

    def __post_init__(self) -> None:
        at_least("lagkv", 0, sinks=self.sinks)
        at_least("lagkv", 1, lag=self.lag)

    def score_new_tokens(self, entry: Entry) -> Tensor:
        B, H, T, _ = entry.k.shape
        pos_T = torch.arange(entry.position, entry.position + T, device=entry.k.device)
        return (1.0 + (pos_T < self.sinks)).expand(B, H, T)

    def score_slots(self, slots: Slots) -> Tensor:
        before, complete = ((n - self.sinks) // self.lag for n in (slots.seen - slots.since_eviction, slots.seen))
        first = max(0, before - 1)  # partitions below have their ranks since the last eviction
        if complete - 1 <= first:
            return slots.entry_scores
        origin, cells = self.sinks + first * self.lag, (complete - first) * self.lag
        place_BHS = slots.positions.long() - origin
        waiting_BHS = slots.valid & (slots.entry_scores == 1) & (place_BHS < cells - self.lag)
        new = slice(-min(slots.seen - origin, place_BHS.shape[-1]), None)  # no head holds more of these partitions
        inside_BHW = slots.valid[..., new] & (place_BHS[..., new] >= 0) & (place_BHS[..., new] < cells)
        cell_BHW = place_BHS[..., new].masked_fill(~inside_BHW, cells)

        def partitions(x_BHWD: Tensor) -> Tensor:
            return on_grid(x_BHWD, cell_BHW, cells).unflatten(2, (-1, self.lag))

        present_BHPL = partitions(inside_BHW[..., None].float())[..., 0] > 0
        rank = lag_rank(partitions(slots.keys()[:, :, new]), partitions(slots.values()[:, :, new]), present_BHPL)
        rank_BHC = F.pad(rank.flatten(2), (0, self.lag + 1))
        slots.entry_scores[..., new] = torch.where(
            waiting_BHS[..., new], rank_BHC.gather(2, cell_BHW), slots.entry_scores[..., new]
        )
        return slots.entry_scores


# ---- expected-attention -----------------------------------------------------------------------------------------------


def add_moments(memory: MutableMapping[str, Tensor], q_BQTD: Tensor) -> None:
    """Merge a block of queries into their running ``count`` ``[B]``, ``mean`` ``[B, Q, D]`` and ``scatter`` (sum of outer
    products about the mean) ``[B, Q, D, D]``. Source: Chan, Golub and LeVeque's pairwise update."""
    q_BQTD = wide(q_BQTD)
    B, T = q_BQTD.shape[0], q_BQTD.shape[2]
    if T == 0:
        return
    mean_BQD = q_BQTD.mean(2)
    centred_BQTD = q_BQTD - mean_BQD[:, :, None]
    scatter_BQDD = centred_BQTD.mT @ centred_BQTD
    before_B = memory.get("count", q_BQTD.new_zeros(B))
    shift_BQD = mean_BQD - memory.get("mean", torch.zeros_like(mean_BQD))
    share_B11 = (T / (before_B + T))[:, None, None]
    outer_BQDD = shift_BQD[..., :, None] * shift_BQD[..., None, :]
    memory["scatter"] = (
        memory.get("scatter", torch.zeros_like(scatter_BQDD))
        + scatter_BQDD
        + outer_BQDD * (before_B[:, None, None] * share_B11)[..., None]
    )
    memory["mean"] = memory.get("mean", torch.zeros_like(mean_BQD)) + shift_BQD * share_B11
    memory["count"] = before_B + T


def expected_attention(
    mean_BHGD: Tensor, covariance_BHGDD: Tensor, k_BHSD: Tensor, among_BHS: Tensor, scaling: float
) -> Tensor:
    """Attention ``[B, H, S]`` that a Gaussian query is expected to pay, softmax over the slots of ``among``, mean over the
    group: ``softmax_s( c k.mean + c^2 / 2 k.covariance.k )``, ``c`` = ``scaling``.
    Source: Expected Attention, arXiv 2510.00636, section 3 (``E[exp(x)] = exp(mean + variance / 2)``)."""
    k_BH1SD = wide(k_BHSD)[:, :, None]
    variance_BHGS = ((k_BH1SD @ covariance_BHGDD) * k_BH1SD).sum(-1)
    logits_BHGS = scaling * (k_BH1SD @ mean_BHGD[..., None])[..., 0] + scaling**2 / 2 * variance_BHGS
    return logits_BHGS.masked_fill(~among_BHS[:, :, None], float("-inf")).softmax(-1).mean(2).nan_to_num(0.0)


@dataclass(frozen=True)
class ExpectedAttention(ScorePart):
    """Attention that the queries of the next ``future`` positions are expected to pay to a slot, plus ``epsilon``, times
    the norm of its value unless ``value_norm`` is off. Queries are Gaussian with mean and covariance of all queries of the
    text so far, turned by the mean rotation of those positions. The first ``sinks`` tokens are left out and kept.
    Source: Expected Attention, arXiv 2510.00636."""

    sinks: int = 4
    future: int = 512
    epsilon: float = 0.0
    value_norm: bool = True
    needs_adapter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("expected-attention", 0, sinks=self.sinks, epsilon=self.epsilon)
        at_least("expected-attention", 1, future=self.future)

    def score_new_tokens(self, entry: Entry) -> None:
        add_moments(entry.state, entry.q[:, :, max(0, self.sinks - entry.position) :])

    def score_slots(self, slots: Slots) -> Tensor:
        assert slots.rope is not None and slots.next_position is not None  # needs_adapter
        among_BHS = slots.valid & (slots.positions >= self.sinks)
        if slots.seen <= self.sinks:
            return slots.entry_scores
        B, H = slots.positions.shape[:2]
        mean_BHGD = slots.state["mean"].unflatten(1, (H, -1))
        covariance_BHGDD = (slots.state["scatter"] / slots.state["count"].view(B, 1, 1, 1)).unflatten(1, (H, -1))
        ahead_BHN = slots.next_position[..., None] + torch.arange(self.future, device=mean_BHGD.device)
        tables = slots.rope.tables(ahead_BHN.flatten(), mean_BHGD.dtype)
        cos_BH1R, sin_BH1R = (x.view(B, H, self.future, -1).mean(2, keepdim=True) for x in tables)
        turn = cos_BH1R[:, :, None], sin_BH1R[:, :, None]
        score_BHS = expected_attention(
            rotate(mean_BHGD, cos_BH1R, sin_BH1R),
            rotate(rotate(covariance_BHGDD, *turn).mT, *turn),
            slots.keys(),
            among_BHS,
            slots.scaling,
        )
        if self.value_norm:
            score_BHS = (score_BHS + self.epsilon) * wide(slots.values()).norm(dim=-1)
        return torch.where(among_BHS, score_BHS, score_BHS.max() + 1).float()


# ---- compactor --------------------------------------------------------------------------------------------------------


def leverage_scores(k_BHSD: Tensor, among_BHS: Tensor, sketch_HDR: Tensor, ridge: float = 1e-2) -> Tensor:
    """``diag( X (X'X + ridge I)^-1 X' )``, ``[B, H, S]``, of ``X = (k - mean k) sketch`` over the slots of ``among``; 0
    elsewhere. ``k`` before RoPE; the sketch may have a batch axis.
    Source: Compactor, arXiv 2507.08143, section 3 (right sketch; ridge: its implementation)."""
    k_BHSD, weight_BHS1 = wide(k_BHSD), among_BHS[..., None]
    mean_BH1D = (k_BHSD * weight_BHS1).sum(2, keepdim=True) / weight_BHS1.sum(2, keepdim=True).clamp_min(1)
    x_BHSR = (k_BHSD - mean_BH1D) @ sketch_HDR.to(k_BHSD) * weight_BHS1
    gram_BHRR = x_BHSR.mT @ x_BHSR + ridge * torch.eye(x_BHSR.shape[-1], dtype=x_BHSR.dtype, device=x_BHSR.device)
    lower_BHRR = torch.linalg.cholesky_ex(gram_BHRR).L  # the ridge makes it exist; to be told so, the host would wait
    solved_BHRS = torch.cholesky_solve(x_BHSR.mT, lower_BHRR)
    return (x_BHSR * solved_BHRS.mT).sum(-1).clamp_min(0)


def block_attention(q_BQTD: Tensor, k_BHTD: Tensor) -> Tensor:
    """Attention ``[B, H, T]`` that each token receives inside its own block, **not causal**: sum over queries, mean over the
    group. Logits are not divided by ``sqrt(D)``: both implementations of the paper's first author pass scale 1.
    Source: Compactor, arXiv 2507.08143, section 3."""
    B, H, T, D = k_BHTD.shape
    q_BHPD = wide(q_BQTD).reshape(B, H, -1, D)  # the group's queries one after the other
    return (q_BHPD @ wide(k_BHTD).mT).softmax(-1).sum(2) * (T / q_BHPD.shape[2])


def z_score(x_BHS: Tensor, among_BHS: Tensor) -> Tensor:
    """``(x - mean) / std`` over the slots of ``among`` in all heads of a layer."""
    n = among_BHS.sum((1, 2), keepdim=True)
    centred = (x_BHS - (x_BHS * among_BHS).sum((1, 2), keepdim=True) / n.clamp_min(1)) * among_BHS
    deviation = (centred.square().sum((1, 2), keepdim=True) / (n - 1).clamp_min(1)).sqrt()
    return centred / deviation.clamp_min(1e-6)


def gaussian_sketch(heads: int, size: int, rank: int, seed: int) -> Tensor:
    """Random ``[H, D, R]`` with variance ``1 / R``, the same for the same ``seed`` everywhere; the identity where ``rank``
    does not reduce, since leverage is then the same for every sketch."""
    if rank >= size:
        return torch.eye(size).expand(heads, size, size)
    return torch.randn(heads, size, rank, generator=torch.Generator().manual_seed(seed)) * rank**-0.5


@dataclass(frozen=True)
class Compactor(ScorePart):
    """z-score of the attention received inside a block of ``block`` tokens (not causal, times the value's norm, mean over 3
    neighbours) plus ``blend`` times the evicted share of the text times the z-score of the key's leverage. The first
    ``first`` and the newest ``last`` tokens are left out of both and kept.

    A block ends after ``block`` tokens or at an eviction. Where the text ends it is shorter: it is read without padding.
    Source: Compactor, arXiv 2507.08143; blend, pooling and sizes: its author's implementation in kvpress."""

    block: int = 256
    sketch: int = 48
    blend: float = 1.0
    first: int = 8
    last: int = 4
    needs_adapter: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("compactor", 0, blend=self.blend, first=self.first, last=self.last)
        at_least("compactor", 1, block=self.block, sketch=self.sketch)

    def score_new_tokens(self, entry: Entry) -> Tensor:
        memory, skip = entry.state, max(0, self.first - entry.position)
        for name, x in (("q", entry.q), ("k", entry.k), ("norm", wide(entry.v).norm(dim=-1))):
            memory[name] = torch.cat((memory[name], x[:, :, skip:]), 2) if name in memory else x[:, :, skip:].clone()
        while memory["norm"].shape[2] >= self.block + self.last:
            self._close(memory, self.block, entry.rope)
        return torch.zeros(entry.k.shape[:3], device=entry.k.device)

    def score_slots(self, slots: Slots) -> Tensor:
        self._settle(slots)
        among_BHS = slots.valid & (slots.positions >= self.first) & ~slots.newest(self.last)
        raw_BHSD = slots.raw_keys()
        if "sketch" not in slots.state:  # drawn by the host: once a prompt
            (B, H, _, D), seed = raw_BHSD.shape, 1_000_003 * slots.seed + slots.layer
            slots.state["sketch"] = gaussian_sketch(H, D, self.sketch, seed).to(raw_BHSD.device).expand(B, -1, -1, -1)
        leverage_BHS = leverage_scores(raw_BHSD, among_BHS, slots.state["sketch"])
        evicted = 1 - slots.keep / slots.seen
        score_BHS = z_score(slots.entry_scores, among_BHS) + self.blend * evicted * z_score(leverage_BHS, among_BHS)
        return torch.where(among_BHS, score_BHS, score_BHS.max() + 1).float()

    def _close(self, memory: MutableMapping[str, Tensor], tokens: int, rope: Rope | None) -> None:
        """Score the oldest ``tokens`` waiting tokens as one block."""
        q, k = memory["q"][:, :, :tokens], memory["k"][:, :, :tokens]
        if rope is not None:
            cos, sin = rope.tables(torch.arange(tokens, device=q.device), q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attention_BHT = block_attention(q, k) * memory["norm"][:, :, :tokens]
        known = memory.get("attention", attention_BHT[..., :0])
        memory["attention"] = torch.cat((known, attention_BHT), 2)
        for name in ("q", "k", "norm"):
            memory[name] = memory[name][:, :, tokens:].clone()

    def _settle(self, slots: Slots) -> None:
        """Write the pooled attention of every token but the newest ``last`` into the slots that hold it."""
        memory = slots.state
        waiting = memory["norm"].shape[2]
        if waiting > self.last:
            self._close(memory, waiting - self.last, slots.rope)
            waiting = self.last
        if "attention" not in memory:
            return
        attention_BHN = memory["attention"]
        N = attention_BHN.shape[2]
        start = slots.seen - waiting - N
        pooled_BHN = F.avg_pool1d(attention_BHN, 3, stride=1, padding=1).float()
        index_BHS = slots.positions.long() - start
        # The first of the two values kept below has lost its left neighbour; its slot holds the right mean already.
        known_BHS = slots.valid & (index_BHS >= int(start > self.first)) & (index_BHS < N)
        slots.entry_scores.copy_(
            torch.where(known_BHS, pooled_BHN.gather(2, index_BHS.clamp(0, N - 1)), slots.entry_scores)
        )
        memory["attention"] = attention_BHN[..., -2:].clone()
