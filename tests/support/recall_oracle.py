"""Recall by its definition, in float64 and with a loop over heads and tokens: what attention must give, call by call.

Every call's queries, keys and values are recorded before RoPE, and which positions each head held before it. All else is
worked out here: what is stored is what was read and is not held.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import product

import attention_oracle
import torch
from policy_runs import LENGTH, backbone, heads_of, make, tokens
from torch import Tensor

from locret_kit import attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.runtime.session import prefill

FIRST = 4
DISTANCE = 512


@dataclass
class Call:
    """One call of a layer's attention."""

    layer: int
    start: int
    held: list[list[int]]
    q: Tensor
    """``[H, G, T, D]``"""
    k: Tensor
    """``[H, T, D]``"""
    v: Tensor
    out: Tensor
    """``[H, G, T, D]``"""


@cache
def softer():
    """The tiny backbone with smaller queries: two blocks that take all of some query's attention would tie."""
    model = deepcopy(backbone())
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(0.05)
    return model


def recorded(policy: str, length: int, steps: int = 6, **rest) -> list[Call]:
    """The calls of a small run."""
    bounded, model, calls = make(policy, length=length, **rest), softer(), []
    plain = bounded.handler.attend

    def attend(layer, q, k, v, *rest):
        held = [x.tolist() for x in bounded.kept_positions(layer)[0]]
        start, H = bounded.bounded[layer].seen, k.shape[1]
        out = plain(layer, q, k, v, *rest)
        calls.append(
            Call(layer, start, held, q[0].unflatten(0, (H, -1)), k[0], v[0], out[0].unflatten(0, (H, -1)).clone())
        )
        return out

    bounded.handler.attend = attend
    with attach(model), torch.no_grad():
        prefill(model, tokens(length), bounded)
        for token in range(steps):
            model(input_ids=torch.tensor([[5 + token]]), **{CACHE: bounded})
    return calls


def turned(x: Tensor, at: Sequence[int]) -> Tensor:
    """Rows ``[..., rows, D]``, each at its position."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    return attention_oracle.turned(x, torch.tensor(at)[:, None] * rates.double())


def joined(before: Tensor | None, new: Tensor) -> Tensor:
    """Rows that a layer has read, ``[H, tokens, ...]``, and new tokens."""
    return new if before is None else torch.cat((before, new), 1)


class Text(ABC):
    """What the layers have read, and the rules of one form of recall."""

    def __init__(self, calls: list[Call], *, size: int, take: int, representatives: int, local: int) -> None:
        self.calls, self.size, self.take, self.representatives, self.local = calls, size, take, representatives, local
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def check(self) -> int:
        """Compare every call's output; the number of those for which blocks came back."""
        recalled = 0
        for call in self.calls:
            self.keys[call.layer] = joined(self.keys.get(call.layer), call.k)
            self.values[call.layer] = joined(self.values.get(call.layer), call.v)
            wanted, back = self.attention(call)
            recalled += back
            close = torch.allclose(call.out, wanted, rtol=1e-5, atol=1e-6)
            assert close, f"layer {call.layer}, {call.k.shape[1]} tokens from {call.start} on, blocks came back: {back}"
        return recalled

    @abstractmethod
    def attention(self, call: Call) -> tuple[Tensor, bool]:
        """The attention of new tokens, and whether blocks came back."""

    def stored(self, call: Call) -> list[list[int]]:
        """Positions that each head has stored."""
        return [sorted(set(range(call.start)) - set(held)) for held in call.held]

    def best(self, positions: list[int], block: int, worth: Tensor) -> list[int]:
        """Tokens of a block that stand for it."""
        members = [p for p in positions if p // self.size == block]
        return sorted(members, key=lambda p: (-float(worth[p]), p))[: self.representatives]

    def largest(self, worth: dict[int, float]) -> list[int]:
        """The blocks that come back."""
        return sorted(worth, key=lambda block: (-worth[block], block))[: self.take]


class OurBlocks(Text):
    """``recall=blocks`` over locret, positions compact; ``far``: the largest distance, 0 for ranks."""

    def __init__(
        self, calls: list[Call], *, apart: int, across: str, body: int, reading: bool, far: int, **form: int
    ) -> None:
        super().__init__(calls, **form)
        self.apart, self.across, self.body, self.reading, self.far = apart, across, body, reading, far
        self.scores: dict[int, Tensor] = {}
        self.votes: dict[tuple[int, int], dict[int, float]] = {}

    def attention(self, call: Call) -> tuple[Tensor, bool]:
        new = heads_of("llama")[call.layer](call.q.flatten(0, 1)[None], call.k[None], call.v[None])[0]
        self.scores[call.layer] = joined(self.scores.get(call.layer), new)
        stored, T = self.stored(call), call.k.shape[1]
        tail = call.start >= self.body
        back = any(stored) and (self.reading or tail)
        pieces = [[t] for t in range(T)] if self.apart >= T else [list(range(T))]
        out = torch.zeros_like(call.out)
        for piece in pieces:
            chosen = self.chosen(call, stored, piece) if back else [[] for _ in stored]
            for h, t in product(range(len(stored)), piece):
                out[h, :, t] = self.one(call, h, t, stored[h], chosen[h], piece, tail and back)
        return out, back

    def chosen(self, call: Call, stored: list[list[int]], piece: list[int]) -> list[list[int]]:
        blocks = [{position // self.size for position in mine} for mine in stored]
        anywhere = set().union(*blocks)
        worth: list[dict[int, float]] = []
        for h, mine in enumerate(stored):
            allowed = blocks[h] if self.across == "head" else anywhere
            shown = [p for block in blocks[h] for p in self.best(mine, block, self.scores[call.layer][h])]
            earlier = call.held[h] + list(range(call.start, call.start + piece[0]))
            shown += [p for p in earlier if p >= FIRST and p // self.size in allowed]
            found = dict.fromkeys(allowed, 0.0)
            queries = turned(call.q[h][:, piece], [self.far or DISTANCE] * len(piece))
            shares = (queries @ self.keys[call.layer][h, shown].mT * 8**-0.5).softmax(-1).flatten(0, 1)
            for p, share in zip(shown, shares.T, strict=True):
                found[p // self.size] = max(found[p // self.size], float(share.max()))
            worth.append(found)
        if self.across != "head":
            best = {block: max(one[block] for one in worth) for block in anywhere}
            if self.across == "model":
                before = self.votes.setdefault((call.start + piece[0], len(piece)), {})
                for block in anywhere:
                    before[block] = max(before.get(block, 0.0), best[block])
                best = {block: before[block] for block in anywhere}
            worth = [best] * len(stored)
        return [self.largest(one) for one in worth]

    def one(
        self, call: Call, h: int, t: int, stored: list[int], chosen: list[int], piece: list[int], only: bool
    ) -> Tensor:
        """Output ``[G, D]`` of one token."""
        rows = call.held[h] + list(range(call.start, call.start + piece[-1] + 1))
        newest = rows[-len(piece) - self.local :]
        if only and self.local:
            rows = [p for p in rows if p < FIRST or p // self.size in chosen or p in newest]
        rows = sorted([p for p in stored if p // self.size in chosen] + rows)
        seen = [p for p in rows if p <= call.start + t]  # the token itself is the last
        if self.far:
            places = [min(call.start + t - p, self.far) for p in seen]
            logits = (turned(call.q[h][:, [t] * len(seen)], places) * self.keys[call.layer][h, seen]).sum(-1) * 8**-0.5
            return logits.softmax(-1) @ self.values[call.layer][h, seen]
        query = turned(call.q[h][:, t : t + 1], [len(seen) - 1])
        logits = query @ turned(self.keys[call.layer][h, seen], range(len(seen))).mT * 8**-0.5
        return (logits.softmax(-1) @ self.values[call.layer][h, seen])[:, 0]


class PublishedInfLLM(Text):
    """InfLLM (arXiv 2402.04617), from the paper and its code's rules: every slot ``local`` tokens away or further stands at that
    distance; a block's key, per query head, is the mean of its tokens that received most attention from nearer than that; the
    mean query of the tokens that are read together finds blocks for all heads."""

    def __init__(self, calls: list[Call], **form: int) -> None:
        super().__init__(calls, **form)
        H, G = calls[0].q.shape[:2]
        self.received = torch.zeros(len({call.layer for call in calls}), H, G, LENGTH).double()

    def attention(self, call: Call) -> tuple[Tensor, bool]:
        stored = self.stored(call)[0]
        chosen = self.chosen(call, stored) if stored else []
        back = [p for p in stored if p // self.size in chosen]
        H, _, T = call.q.shape[:3]
        out = torch.zeros_like(call.out)
        for h, t in product(range(H), range(T)):
            here = call.start + t
            rows = [*back, *call.held[h], *range(call.start, here + 1)]
            queries = call.q[h][:, [t] * len(rows)]
            queries = turned(queries, [min(here - p, self.local) for p in rows])
            weights = ((queries * self.keys[call.layer][h, rows]).sum(-1) * 8**-0.5).softmax(-1)
            out[h, :, t] = weights @ self.values[call.layer][h, rows]
            for w, p in zip(weights.T[len(back) :], rows[len(back) :], strict=True):
                if here - p < self.local:
                    self.received[call.layer, h, :, p] += w
        return out, bool(stored)

    def chosen(self, call: Call, stored: list[int]) -> list[int]:
        worth = dict.fromkeys([p // self.size for p in stored], 0.0)
        H, G, T = call.q.shape[:3]
        for h, g, block in product(range(H), range(G), worth):
            query = turned(call.q[h, g], [self.local] * T).mean(0)
            best = self.best(stored, block, self.received[call.layer, h, g])
            worth[block] += float(query @ self.keys[call.layer][h, best].mean(0))
        return self.largest(worth)
