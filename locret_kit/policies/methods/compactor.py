"""Compactor, arXiv 2507.08143: leverage among the keys, and attention of each block to itself."""

from collections.abc import Mapping, MutableMapping
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from ...backbones.rope import Rope, rotated_text
from ..base import Count, Entry, Positive, Score, Slots, wide
from ..registry import part, register


def leverage_scores(k_BHSD: Tensor, among_BHS: Tensor, sketch_HDR: Tensor, ridge: float = 1e-2) -> Tensor:
    """``diag( X (X'X + ridge I)^-1 X' )``, ``[B, H, S]``, of ``X = (k - mean k) sketch`` over the slots of ``among``; 0
    elsewhere. ``k`` before RoPE; the sketch may have a batch axis.
    Source: Compactor, arXiv 2507.08143, section 3 (right sketch; ridge: its implementation)."""
    k_BHSD, weight_BHS1 = wide(k_BHSD), among_BHS[..., None]
    mean_BH1D = (k_BHSD * weight_BHS1).sum(2, keepdim=True) / weight_BHS1.sum(2, keepdim=True).clamp_min(1)
    # Few tokens say the same again and again in some texts: in float32 rounding is then larger than the ridge.
    exact = torch.float32 if k_BHSD.device.type == "mps" else torch.float64
    x_BHSR = ((k_BHSD - mean_BH1D) @ sketch_HDR.to(k_BHSD) * weight_BHS1).to(exact)
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
        return torch.eye(size, dtype=torch.float32, device="cpu").expand(heads, size, size)
    draw = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(heads, size, rank, generator=draw, dtype=torch.float32, device="cpu") * rank**-0.5


@part("score", "compactor")
class Compactor(Score):
    """The z-score of attention within a block, plus ``blend`` times the evicted share of the text times the z-score
    of the key's leverage. Attention within a block of ``block`` tokens is not causal, multiplied by the value's norm
    and averaged over 3 neighbours. The ``first`` and the newest ``last`` tokens are excluded from both and kept.

    A block ends after ``block`` tokens or at an eviction. The last block of a text may be shorter; it is not padded.
    Source: Compactor, arXiv 2507.08143; blend, pooling and sizes: its author's implementation in kvpress.
    """

    block: Positive = 256
    sketch: Positive = 48
    blend: Annotated[float, Ge(0)] = 1.0
    first: Count = 8
    last: Count = 4
    needs_unrotated: ClassVar[bool] = True

    def memory(self, seen: int) -> Mapping[str, str]:
        axes = {"q": "BQND", "k": "BHND", "norm": "BHN", "attention": "BHM?", "sketch": "BHDR?"}
        return axes if seen else {}

    def score_new_tokens(self, entry: Entry) -> Tensor:
        """Buffer the new tokens; zeros ``[B, H, T]``, since blocks are scored later."""
        memory, skip = entry.state, max(0, self.first - entry.position)
        for name, x in (("q", entry.q), ("k", entry.k), ("norm", wide(entry.v).norm(dim=-1))):
            memory[name] = torch.cat((memory[name], x[:, :, skip:]), 2) if name in memory else x[:, :, skip:].clone()
        while memory["norm"].shape[2] >= self.block + self.last:
            self._close(memory, self.block, entry.rope)
        return torch.zeros(entry.k.shape[:3], dtype=torch.float32, device=entry.k.device)

    def score_slots(self, slots: Slots) -> Tensor:
        """Scores ``[B, H, S]``: z-scores of block attention and leverage."""
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
        """Score the oldest ``tokens`` waiting tokens as one block; queries ``[B, Q, T, D]`` and keys ``[B, H, T,
        D]`` are in ``memory``."""
        q, k = memory["q"][:, :, :tokens], memory["k"][:, :, :tokens]
        if rope is not None:
            q, k = rotated_text(rope, q, k)
        attention_BHT = block_attention(q, k) * memory["norm"][:, :, :tokens]
        known = memory.get("attention", attention_BHT[..., :0])
        memory["attention"] = torch.cat((known, attention_BHT), 2)
        for name in ("q", "k", "norm"):
            memory[name] = memory[name][:, :, tokens:].clone()

    def _settle(self, slots: Slots) -> None:
        """Write the pooled attention of every token but the newest ``last`` into the slots that hold it."""
        memory, waiting = slots.state, slots.state["norm"].shape[2]
        if waiting > self.last:
            self._close(memory, waiting - self.last, slots.rope)
            waiting = self.last
        if "attention" not in memory:
            return
        attention_BHN, N = memory["attention"], memory["attention"].shape[2]
        start = slots.seen - waiting - N
        pooled_BHN = F.avg_pool1d(attention_BHN, 3, stride=1, padding=1).float()
        index_BHS = slots.positions.long() - start
        # The first of the two values kept below has lost its left neighbour; its slot holds the right mean already.
        known_BHS = slots.valid & (index_BHS >= int(start > self.first)) & (index_BHS < N)
        own_BHS = pooled_BHN.gather(2, index_BHS.clamp(0, N - 1))
        slots.entry_scores.copy_(torch.where(known_BHS, own_BHS, slots.entry_scores))
        memory["attention"] = attention_BHN[..., -2:].clone()


register(
    "compactor",
    "Compactor, arXiv 2507.08143",
    {"score": Compactor()},
    keeps="a key that other keys do not explain (leverage), and attention within its block",
)
