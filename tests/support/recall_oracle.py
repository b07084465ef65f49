"""Recall by its definition, in float64 and with a loop over heads and tokens: what attention must give, call by call.

Every call's queries, keys and values are recorded before RoPE, and which positions each head held before it. All else is
worked out here: what is stored is what was read and is not held.
"""

import math
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import torch
from policy_runs import backbone, heads_of, make, tokens
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


def turned(x: Tensor, at: int) -> Tensor:
    """A vector at a position: its halves are the real and imaginary parts of numbers that turn."""
    half = x.shape[-1] // 2
    angle = at * 10000.0 ** -(torch.arange(half, dtype=torch.float32) / half)
    number = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(half).double(), angle.double())
    return torch.cat((number.real, number.imag), -1)


class Text(ABC):
    """What the layers have read, and the rules of one form of recall."""

    def __init__(self, calls: list[Call], layers: int = 3) -> None:
        self.calls = calls
        self.keys: list[dict[tuple[int, int], Tensor]] = [{} for _ in range(layers)]
        self.values: list[dict[tuple[int, int], Tensor]] = [{} for _ in range(layers)]
        self.votes: dict[tuple[int, int], dict[int, float]] = {}

    def check(self) -> int:
        """Compare every call's output; the number of those for which blocks came back."""
        recalled = 0
        for call in self.calls:
            if call.layer == 0:
                self.votes = {}
            H, T = call.k.shape[:2]
            for h in range(H):
                for t in range(T):
                    self.keys[call.layer][h, call.start + t] = call.k[h, t]
                    self.values[call.layer][h, call.start + t] = call.v[h, t]
            wanted, back = self.attention(call)
            recalled += back
            close = torch.allclose(call.out, wanted, rtol=1e-5, atol=1e-6)
            assert close, f"layer {call.layer}, {T} tokens from {call.start} on, blocks came back: {back}"
        return recalled

    @abstractmethod
    def attention(self, call: Call) -> tuple[Tensor, bool]:
        """The attention of new tokens, and whether blocks came back."""

    def stored(self, call: Call) -> list[list[int]]:
        """Positions that each head has stored."""
        return [sorted(set(range(call.start)) - set(held)) for held in call.held]


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [x / sum(weights) for x in weights]


class OurBlocks(Text):
    """``recall=blocks`` over locret, positions compact."""

    def __init__(self, calls, *, size, take, representatives, local, apart, across, body, reading=True) -> None:
        super().__init__(calls)
        self.size, self.take, self.representatives, self.local = size, take, representatives, local
        self.apart, self.across, self.body, self.reading = apart, across, body, reading
        self.scores: list[dict[tuple[int, int], float]] = [{} for _ in self.keys]

    def note(self, call: Call) -> None:
        q = call.q.flatten(0, 1)[None]
        found = heads_of("llama")[call.layer](q, call.k[None], call.v[None])[0]
        for h, scores in enumerate(found.tolist()):
            for t, score in enumerate(scores):
                self.scores[call.layer][h, call.start + t] = score

    def attention(self, call: Call) -> tuple[Tensor, bool]:
        self.note(call)
        stored, T = self.stored(call), call.k.shape[1]
        tail = call.start >= self.body
        back = any(stored) and (self.reading or tail)
        pieces = [[t] for t in range(T)] if self.apart >= T else [list(range(T))]
        out = torch.zeros_like(call.out)
        for piece in pieces:
            chosen = self.chosen(call, stored, piece) if back else [[] for _ in stored]
            for h in range(len(stored)):
                for t in piece:
                    out[h, :, t] = self.one(call, h, t, stored[h], chosen[h], piece, tail and back)
        return out, back

    def chosen(self, call: Call, stored: list[list[int]], piece: list[int]) -> list[list[int]]:
        blocks = [{position // self.size for position in mine} for mine in stored]
        anywhere = set().union(*blocks)
        worth: list[dict[int, float]] = []
        for h, mine in enumerate(stored):
            allowed = blocks[h] if self.across == "head" else anywhere
            shown = []
            for block in blocks[h]:
                members = [p for p in mine if p // self.size == block]
                members.sort(key=lambda p: (-self.scores[call.layer][h, p], p))
                shown += members[: self.representatives]
            earlier = call.held[h] + list(range(call.start, call.start + piece[0]))
            shown += [p for p in earlier if p >= FIRST and p // self.size in allowed]
            found = dict.fromkeys(allowed, 0.0)
            for g in range(call.q.shape[1]):
                for t in piece:
                    query = turned(call.q[h, g, t], DISTANCE)
                    logits = [float(query @ self.keys[call.layer][h, p]) * 8**-0.5 for p in shown]
                    for p, share in zip(shown, softmax(logits) if logits else [], strict=True):
                        found[p // self.size] = max(found[p // self.size], share)
            worth.append(found)
        if self.across != "head":
            best = {block: max(one[block] for one in worth) for block in anywhere}
            if self.across == "model":
                before = self.votes.setdefault((call.start + piece[0], len(piece)), {})
                for block in anywhere:
                    before[block] = max(before.get(block, 0.0), best[block])
                best = {block: before[block] for block in anywhere}
            worth = [best] * len(stored)
        return [sorted(one, key=lambda block: (-one[block], block))[: self.take] for one in worth]

    def one(
        self, call: Call, h: int, t: int, stored: list[int], chosen: list[int], piece: list[int], only: bool
    ) -> Tensor:
        """Output ``[G, D]`` of one token."""
        back = [p for p in stored if p // self.size in chosen]
        rows = call.held[h] + list(range(call.start, call.start + piece[-1] + 1))
        newest = rows[-len(piece) - self.local :]
        if only and self.local:
            rows = [p for p in rows if p < FIRST or p // self.size in chosen or p in newest]
        shown = sorted(back + rows)
        place = {p: rank for rank, p in enumerate(shown)}
        here = call.start + t
        out = []
        for g in range(call.q.shape[1]):
            query = turned(call.q[h, g, t], place[here])
            seen = [p for p in shown if p <= here]
            weights = softmax([float(query @ turned(self.keys[call.layer][h, p], place[p])) * 8**-0.5 for p in seen])
            out.append(sum(w * self.values[call.layer][h, p] for w, p in zip(weights, seen, strict=True)))
        return torch.stack(out)


class PublishedInfLLM(Text):
    """InfLLM (arXiv 2402.04617), from the paper and its code's rules: every slot ``local`` tokens away or further stands at that
    distance; a block's key, per query head, is the mean of its tokens that received most attention from nearer than that; the
    mean query of the tokens that are read together finds blocks for all heads."""

    def __init__(self, calls, *, size: int, take: int, representatives: int, local: int) -> None:
        super().__init__(calls)
        self.size, self.take, self.representatives, self.local = size, take, representatives, local
        self.received: dict[tuple[int, int, int, int], float] = {}
        """Of layer, head, query head of its group, and position."""

    def attention(self, call: Call) -> tuple[Tensor, bool]:
        stored = self.stored(call)[0]
        chosen = self.chosen(call, stored) if stored else []
        back = [p for p in stored if p // self.size in chosen]
        H, G, T = call.q.shape[:3]
        out = torch.zeros_like(call.out)
        for h in range(H):
            for g in range(G):
                for t in range(T):
                    here = call.start + t
                    rows = [*back, *call.held[h], *range(call.start, here + 1)]
                    logits = []
                    for p in rows:
                        query = turned(call.q[h, g, t], min(here - p, self.local))
                        logits.append(float(query @ self.keys[call.layer][h, p]) * 8**-0.5)
                    weights = softmax(logits)
                    out[h, g, t] = sum(w * self.values[call.layer][h, p] for w, p in zip(weights, rows, strict=True))
                    for w, p in zip(weights[len(back) :], rows[len(back) :], strict=True):
                        if here - p < self.local:
                            name = call.layer, h, g, p
                            self.received[name] = self.received.get(name, 0.0) + w
        return out, bool(stored)

    def chosen(self, call: Call, stored: list[int]) -> list[int]:
        worth = dict.fromkeys([p // self.size for p in stored], 0.0)
        for h in range(call.q.shape[0]):
            for g in range(call.q.shape[1]):
                query = torch.stack([turned(call.q[h, g, t], self.local) for t in range(call.q.shape[2])]).mean(0)
                for block in worth:
                    members = [p for p in stored if p // self.size == block]
                    members.sort(key=lambda p: (-self.received[call.layer, h, g, p], p))
                    best = members[: self.representatives]
                    worth[block] += float(query @ sum(self.keys[call.layer][h, p] for p in best)) / len(best)
        return sorted(worth, key=lambda block: (-worth[block], block))[: self.take]
