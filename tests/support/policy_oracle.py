"""Bounded caches written again from Locret's algorithm 1: float64, full attention rows, plain loops. Imports nothing of the kit.

One ``OracleLayer`` is the cache of one layer: a list of rows a head, each with its statistics. It is fed raw q, k and v,
rotates them itself (by rank or by true position), attends, and evicts where Locret's algorithm 1 says. Every decision
records the gap between what it kept and what it let go, so that a caller can tell a near tie from a wrong choice.

``policy_rules`` has the policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

Scores = list[list[float]]  # [head][row]


@dataclass
class Row:
    """One slot of one head, with what it carries."""

    position: int
    k: np.ndarray
    v: np.ndarray
    entered: float
    got: np.ndarray
    """Sums over queries ``[3]``: the group's mean attention, its square, and whether it was above that of equal shares."""
    alone: np.ndarray | None = None
    """The same of each query head of the group by itself, ``[G, 3]``."""
    count: int = 0
    turned: tuple[int, np.ndarray] | None = None
    """The key rotated for a place, kept while the place is the same."""
    averaged: float | None = None
    """Of ``entered_ahead``: the mean, once all next tokens had come."""

    def key(self, place: int, theta: float) -> np.ndarray:
        if self.turned is None or self.turned[0] != place:
            self.turned = (place, rotated(self.k, place, theta))
        return self.turned[1]


@dataclass(frozen=True)
class Setting:
    """What the run says, beside the policy."""

    H: int
    G: int
    budget: int
    chunk: int
    stabilizers: int = 0
    local_len: int = 0
    length: int | None = None
    positions: str = "compact"
    layers: int = 1
    theta: float = 10000.0
    decode_every: int | None = None


@dataclass(frozen=True)
class Rule:
    """A policy in the four questions; every callable is given the layer and loops over its heads itself."""

    score: Callable[[OracleLayer], Scores]
    protects: Sequence[Callable[[OracleLayer], list[set[int]]]] = ()
    layer_keep: Callable[[OracleLayer, int], int] = lambda layer, keep: keep
    head_keep: Callable[[OracleLayer, Scores, list[set[int]]], list[int]] | None = None
    select: Callable[[OracleLayer, Scores, list[set[int]], list[int]], list[set[int]]] | None = None
    everything: bool = False
    aside: float = 0.0
    """Share of the budget that another rule than the score fills: score and scopes have the rest."""
    unit: int = 1
    """Tokens in whole numbers of which that share is counted."""


@lru_cache(maxsize=4096)
def turn(position: int, half: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    angle = position * theta ** (-np.arange(half) / half)
    return np.cos(angle), np.sin(angle)


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE, half-split: dimension j turns with j + D / 2 by ``position * theta ** (-2 j / D)``."""
    half = len(x) // 2
    cos, sin = turn(position, half, theta)
    a, b = x[:half], x[half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


class OracleLayer:
    """The cache of one layer under one rule."""

    def __init__(self, rule: Rule, setting: Setting, layer: int = 0) -> None:
        self.rule, self.setting, self.layer = rule, setting, layer
        self.heads: list[list[Row]] = [[] for _ in range(setting.H)]
        self.before = self.heads
        self.queries: list[np.ndarray] = []
        self.text: list[np.ndarray] = []
        """The key ``[H, D]`` of every token, kept or not."""
        self.seen = 0
        self.fresh = 0
        self.evictions = 0
        self.keep = self.part = self.stabilizers = 0
        self.gaps: list[float] = []

    # ---- Locret, algorithm 1 ------------------------------------------------------------------------------------

    def feed(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, entered: np.ndarray | None = None) -> np.ndarray:
        """Output ``[Q, T, D]`` of new tokens (q ``[Q, T, D]``, k and v ``[H, T, D]``, entered ``[H, T]``)."""
        self.gaps = []
        out, start, total = [], 0, q.shape[1]
        if entered is None:
            entered = np.zeros(k.shape[:2])
        while start < total:
            step = min(total - start, self.until_boundary())
            if self.decoding() and self.rows() + self.setting.H * step > self.setting.H * self.capacity():
                self.evict(self.setting.budget, self.setting.stabilizers)
            new = slice(start, start + step)
            out.append(self.attend(q[:, new], k[:, new], v[:, new], entered[:, new]))
            self.at_boundary()
            start += step
        return np.concatenate(out, axis=1)

    def body(self) -> int | None:
        n = self.setting.length
        return None if n is None else max(0, n - self.setting.local_len)

    def decoding(self) -> bool:
        return self.setting.length is not None and self.seen >= self.setting.length

    def capacity(self) -> int:
        return self.rule.layer_keep(self, self.setting.budget) + self.setting.chunk

    def rows(self) -> int:
        return sum(len(rows) for rows in self.heads)

    def until_boundary(self) -> int:
        """Tokens to the next multiple of ``chunk``, or to the end of the body; one at a time while decoding."""
        body = self.body()
        chunk = self.setting.chunk
        if body is None:
            return chunk - self.seen % chunk
        if self.seen < body:
            return min(chunk - self.seen % chunk, body - self.seen)
        return 1

    def at_boundary(self) -> None:
        """Cut to the budget at a chunk's end; before the tail leave room for it and protect no stabilizers."""
        body, s = self.body(), self.setting
        if body is None or s.length is None:
            if self.seen % s.chunk == 0:
                self.evict(s.budget, s.stabilizers)
        elif self.decoding() and self.seen > s.length:
            if s.decode_every and (self.seen - s.length) % s.decode_every == 0:
                self.evict(s.budget, s.stabilizers)
        elif s.length > s.budget:
            if self.seen == body:
                self.evict(s.budget - (s.length - body), 0)
            elif self.seen < body and self.seen % s.chunk == 0:
                self.evict(s.budget, s.stabilizers)

    # ---- attention ----------------------------------------------------------------------------------------------

    def place(self, head: int, row: int) -> int:
        """The position a row is rotated by."""
        return row if self.setting.positions == "compact" else self.heads[head][row].position

    def keys(self, head: int) -> np.ndarray:
        theta = self.setting.theta
        return np.stack([row.key(self.place(head, r), theta) for r, row in enumerate(self.heads[head])])

    def recent_rows(self, head: int, j: int, keys: np.ndarray) -> np.ndarray:
        """Attention ``[G, rows - j]`` of the ``j``-th newest query, which sees all but the newest ``j`` slots: in compact
        positions from its rank, else from its own position, whether its slot is still held or not."""
        row = len(self.heads[head]) - 1 - j
        place = row if self.setting.positions == "compact" else self.seen - 1 - j
        return self.group_rows(head, self.queries[-1 - j], row, keys, place)

    def group_rows(self, head: int, q: np.ndarray, row: int, keys: np.ndarray, place: int) -> np.ndarray:
        """Attention ``[G, row + 1]`` of the query heads of one group to the slots up to ``row``: token ``q [Q, D]`` at
        ``place``."""
        first, size = head * self.setting.G, math.sqrt(q.shape[1])
        queries = (rotated(query, place, self.setting.theta) for query in q[first : first + self.setting.G])
        return np.stack([softmax(keys[: row + 1] @ query / size) for query in queries])

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, entered: np.ndarray) -> np.ndarray:
        """One block: its tokens become rows, attend causally, and every row they see gains its statistics."""
        (Q, T, _), G = q.shape, self.setting.G
        out = np.empty((Q, T, v.shape[-1]))
        for h, rows in enumerate(self.heads):
            old = len(rows)
            for t in range(T):
                rows.append(Row(self.seen + t, k[h, t], v[h, t], float(entered[h, t]), np.zeros(3), np.zeros((G, 3))))
            keys, values = self.keys(h), np.stack([row.v for row in rows])
            for t in range(T):
                n = old + t + 1
                p = self.group_rows(h, q[:, t], n - 1, keys, self.place(h, n - 1))
                out[h * G : h * G + G, t] = p @ values[:n]
                got, alone = (np.stack([a, a**2, a > 1 / n], -1) for a in (p.mean(axis=0), p))
                for s in range(n):
                    rows[s].got += got[s]
                    rows[s].alone += alone[:, s]
                    rows[s].count += 1
        for t in range(T):
            self.queries.append(q[:, t])
            self.text.append(k[:, t])
        self.seen += T
        self.fresh += T
        return out

    def recent_attention(self, window: int) -> Scores:
        """Sum over the newest ``window`` queries of the group's mean attention over the slots held now."""
        scores = []
        for h, rows in enumerate(self.heads):
            keys = self.keys(h)
            total = np.zeros(len(rows))
            for j in range(min(window, len(rows), self.seen)):
                total[: len(rows) - j] += self.recent_rows(h, j, keys).mean(axis=0)
            scores.append(total.tolist())
        return scores

    # ---- eviction -----------------------------------------------------------------------------------------------

    def evict(self, keep: int, stabilizers: int) -> None:
        rule = self.rule
        if rule.everything:
            return
        self.keep, self.stabilizers = rule.layer_keep(self, keep), min(stabilizers, keep)
        if self.rows() <= self.keep * self.setting.H:
            return
        self.part = self.keep - int(rule.aside * self.keep) // rule.unit * rule.unit
        scores, protected = rule.score(self), self.protected()
        keeps = [self.keep] * len(self.heads) if rule.head_keep is None else rule.head_keep(self, scores, protected)
        select = rule.select or top_k
        chosen = select(self, scores, protected, keeps)
        self.before = self.heads
        self.heads = [[rows[r] for r in sorted(stay)] for rows, stay in zip(self.heads, chosen, strict=True)]
        self.fresh = 0
        self.evictions += 1

    def protected(self) -> list[set[int]]:
        """Rows of each head that a scope protects."""
        out: list[set[int]] = [set() for _ in self.heads]
        for scope in self.rule.protects:
            for h, more in enumerate(scope(self)):
                out[h] |= more
        return out

    def query_heads(self) -> OracleLayer:
        """The same cache, every query head with rows of its own."""
        H, G = self.setting.H, self.setting.G
        view = OracleLayer(self.rule, replace(self.setting, H=H * G, G=1), self.layer)
        view.heads = [
            [Row(row.position, row.k, row.v, row.entered, row.alone[g], count=row.count) for row in rows]
            for rows in self.heads
            for g in range(G)
        ]
        view.queries, view.seen, view.gaps = self.queries, self.seen, self.gaps
        view.keep, view.part, view.stabilizers = self.keep, self.part, self.stabilizers
        return view

    def adopt(self, held: list[list[int]]) -> None:
        """Keep, of the rows before the last eviction, those of these positions: how a near tie was settled elsewhere."""
        for h, positions in enumerate(held):
            known = {row.position: row for row in (*self.before[h], *self.heads[h])}
            self.heads[h] = [known[p] for p in positions]

    def held(self) -> list[list[int]]:
        return [[row.position for row in rows] for rows in self.heads]

    def best(self, values: Sequence[float], candidates: Sequence[int], n: int) -> set[int]:
        """The ``n`` candidates of largest value; of equals the newer. Notes the gap at the cut."""
        order = sorted(candidates, key=lambda r: (values[r], r), reverse=True)
        self.note_gap([values[r] for r in order], n)
        return set(order[:n])

    def note_gap(self, descending: Sequence[float], n: int) -> None:
        """The relative gap between the last of the ``n`` that stay and the first that goes; an exact tie is none."""
        if 0 < n < len(descending) and descending[n - 1] != descending[n]:
            scale = max(abs(value) for value in descending)
            self.gaps.append((descending[n - 1] - descending[n]) / scale)


def top_k(layer: OracleLayer, scores: Scores, protected: list[set[int]], keeps: list[int]) -> list[set[int]]:
    """Per head: protected slots (the newest first when they do not all fit), then by score."""
    out = []
    for h, rows in enumerate(layer.heads):
        stay = set(sorted(protected[h], reverse=True)[: keeps[h]])
        rest = [r for r in range(len(rows)) if r not in protected[h]]
        out.append(stay | layer.best(scores[h], rest, keeps[h] - len(stay)))
    return out
