"""Eviction policies written again from their papers: what a slot is worth, what is protected, how many slots each layer and head
keeps, and which ones stay. Each is a part of a ``policy_oracle.Rule``. Imports nothing of the kit.

Sources: H2O, ScissorHands, TOVA, RoCo (EasyKV), SnapKV, DropKV, R-KV, PyramidKV, Ada-KV, NaCl, SirLLM, KVCrush, Locret.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from policy_oracle import OracleLayer, Row, Scores, Setting, rotated, softmax, top_k

# ---- scores ---------------------------------------------------------------------------------------------------------


def position(layer: OracleLayer) -> Scores:
    return [[row.position for row in rows] for rows in layer.heads]


def entered(layer: OracleLayer) -> Scores:
    """What was fixed when the token came: a hash, its entropy, its predicted importance."""
    return [[row.entered for row in rows] for rows in layer.heads]


def entered_ahead(ahead: int) -> Callable[[OracleLayer], Scores]:
    """The mean of what was fixed when the token and the next ``ahead`` ones came, of those that are held; once all of them have
    come it is final."""

    def score(layer: OracleLayer) -> Scores:
        out = []
        for rows in layer.heads:
            means = []
            for row in rows:
                mean = row.averaged
                if mean is None:
                    near = [other.entered for other in rows if 0 <= other.position - row.position <= ahead]
                    mean = sum(near) / len(near)
                    if row.position + ahead < layer.seen:
                        row.averaged = mean
                means.append(mean)
            out.append(means)
        return out

    return score


def accumulated(layer: OracleLayer) -> Scores:
    """H2O: the sum of attention over every query since the slot entered."""
    return [[row.got[0] for row in rows] for rows in layer.heads]


def quantised(layer: OracleLayer) -> Scores:
    """ScissorHands: how many queries gave the slot more than the mean of what they see."""
    return [[row.got[2] for row in rows] for rows in layer.heads]


def mean(layer: OracleLayer) -> Scores:
    """RoCo: accumulated attention over the number of queries that saw the slot."""
    return [[row.got[0] / row.count for row in rows] for rows in layer.heads]


def last_token(layer: OracleLayer) -> Scores:
    """TOVA."""
    return layer.recent_attention(1)


def window(size: int, kernel: int = 7) -> Callable[[OracleLayer], Scores]:
    """SnapKV: attention of the newest ``size`` queries, max-pooled over the slots before that window."""

    def score(layer: OracleLayer) -> Scores:
        out = []
        for raw in layer.recent_attention(size):
            prefix = max(0, len(raw) - size)
            pooled = list(raw)
            for s in range(prefix):
                near = range(max(0, s - kernel // 2), min(prefix, s + kernel // 2 + 1))
                pooled[s] = max(raw[r] for r in near)
            out.append(pooled)
        return out

    return score


def defensive(size: int, kernel: int = 5) -> Callable[[OracleLayer], Scores]:
    """DefensiveKV: per query head and query of the window, attention to the slots before it, mean-pooled with zeros beyond the
    ends and scaled back to its sum; then the maximum, and at least its mean."""

    def score(layer: OracleLayer) -> Scores:
        out = []
        for h, rows in enumerate(layer.heads):
            keys, prefix = layer.keys(h), max(0, len(rows) - size)
            most = np.zeros(len(rows))
            for j in range(min(size, len(rows), layer.seen)):
                for a in layer.recent_rows(h, j, keys):
                    if prefix:
                        padded = np.concatenate([np.zeros(kernel // 2), a[:prefix], np.zeros(kernel // 2)])
                        pooled = np.array([padded[s : s + kernel].sum() / kernel for s in range(prefix)])
                        a = pooled / pooled.sum() * a[:prefix].sum()
                    most[: len(a)] = np.maximum(most[: len(a)], a)
            if prefix:
                most[:prefix] = np.maximum(most[:prefix], most[:prefix].mean())
            out.append(most.tolist())
        return out

    return score


def residual(size: int) -> Callable[[OracleLayer], Scores]:
    """DropKV: attention of each of the newest ``size`` queries with and without the slot, squared difference of the outputs,
    mean over the group."""

    def score(layer: OracleLayer) -> Scores:
        out = []
        for h, rows in enumerate(layer.heads):
            keys, values, total = layer.keys(h), np.stack([row.v for row in rows]), np.zeros(len(rows))
            for j in range(min(size, len(rows), layer.seen)):
                seen = len(rows) - j
                for a in layer.recent_rows(h, j, keys):
                    for dropped in range(seen if seen > 1 else 0):
                        rest = np.delete(a, dropped)
                        change = a @ values[:seen] - rest / rest.sum() @ np.delete(values[:seen], dropped, axis=0)
                        total[dropped] += change @ change / layer.setting.G
            out.append(total.tolist())
        return out

    return score


def joint(size: int, mix: float = 0.1, threshold: float = 0.5) -> Callable[[OracleLayer], Scores]:
    """R-KV: a tenth of SnapKV's mean attention, less nine tenths of the softmax of mean cosine similarities to a slot's key. To
    each key the newest of those above the threshold is unlike."""

    def score(layer: OracleLayer) -> Scores:
        out = []
        for h, attention in enumerate(window(size)(layer)):
            keys = layer.keys(h)
            rows = []
            for i, key in enumerate(keys):
                like = [float(key @ other / np.linalg.norm(key) / np.linalg.norm(other)) for other in keys]
                like[i] = 0.0
                similar = [j for j, c in enumerate(like) if c > threshold]
                if similar:
                    like[similar[-1]] = 0.0
                rows.append(like)
            redundant = softmax(np.mean(rows, axis=0))
            out.append([mix * a / size - (1 - mix) * float(r) for a, r in zip(attention, redundant, strict=True)])
        return out

    return score


def proxies(count: Callable[[OracleLayer], int], first: int = 0) -> Callable[[OracleLayer], Scores]:
    """NaCl: attention of the proxy tokens, the newest ones and the ``first`` of the text, each counted once."""

    def score(layer: OracleLayer) -> Scores:
        out = layer.recent_attention(count(layer))
        theta, G = layer.setting.theta, layer.setting.G
        for j in range(min(first, layer.seen - count(layer))):
            for h, rows in enumerate(layer.heads):
                keys = np.stack([rotated(layer.text[i][h], i, theta) for i in range(j + 1)])
                queries = (rotated(q, j, theta) for q in layer.queries[j][h * G : h * G + G])
                a = np.mean([softmax(keys @ q / math.sqrt(keys.shape[1])) for q in queries], axis=0)
                for r, row in enumerate(rows):
                    out[h][r] += a[row.position] if row.position <= j else 0.0
        return out

    return score


def low_norm(layer: OracleLayer) -> Scores:
    """L2-norm strategy: keys of low norm are kept."""
    return [[-float(np.linalg.norm(row.k)) for row in rows] for rows in layer.heads]


def unlike_the_mean(layer: OracleLayer) -> Scores:
    """KeyDiff: minus the cosine to the mean of the keys' directions, rotated as attention sees them."""
    out = []
    for h in range(layer.setting.H):
        unit = [key / np.linalg.norm(key) for key in layer.keys(h)]
        anchor = sum(unit) / np.linalg.norm(sum(unit))
        out.append([-float(direction @ anchor) for direction in unit])
    return out


# ---- scopes ---------------------------------------------------------------------------------------------------------


def newest(count: Callable[[OracleLayer], int]) -> Callable[[OracleLayer], list[set[int]]]:
    def scope(layer: OracleLayer) -> list[set[int]]:
        n = count(layer)
        return [{r for r in range(len(rows)) if r >= len(rows) - n} for rows in layer.heads]

    return scope


def sinks(n: int) -> Callable[[OracleLayer], list[set[int]]]:
    return lambda layer: [{r for r, row in enumerate(rows) if row.position < n} for rows in layer.heads]


def stabilizers(layer: OracleLayer) -> list[set[int]]:
    return newest(lambda at: min(at.stabilizers, at.part))(layer)


def deviation(row: Row) -> float:
    """RoCo: the standard deviation of the attention a slot got."""
    return math.sqrt(max(0.0, row.got[1] / row.count - (row.got[0] / row.count) ** 2))


def deviating(size: float, newest_: int = 10, sinks_: int = 4) -> Callable[[OracleLayer], list[set[int]]]:
    """RoCo's scope: a share ``size`` of what a head keeps, by deviation. The newest slots and the sinks count as the most
    deviating, whatever theirs; the newest of them first where they alone are more than that."""

    def scope(layer: OracleLayer) -> list[set[int]]:
        size_ = int(size * layer.part)
        out = []
        for h, rows in enumerate(layer.heads):
            always = newest(lambda _: newest_)(layer)[h] | sinks(sinks_)(layer)[h]
            rest = [r for r in range(len(rows)) if r not in always]
            first = set(sorted(always, reverse=True)[:size_])
            out.append(first | layer.best([deviation(row) for row in rows], rest, size_ - len(first)))
        return out

    return scope


# ---- allocation -----------------------------------------------------------------------------------------------------


def rounded(shares: Sequence[Fraction], total: int, most: Sequence[int] | None = None) -> list[int]:
    """Integers that sum to ``total``, none above its ``most``: shares rounded down, then one more each in the order of
    the largest remainders, of equals the first, until the sum is reached."""
    most = [total] * len(shares) if most is None else most
    out = [min(math.floor(share), top) for share, top in zip(shares, most, strict=True)]
    order = sorted(range(len(shares)), key=lambda i: (out[i] - shares[i], i))
    while sum(out) < total:
        for i in order:
            if out[i] < most[i] and sum(out) < total:
                out[i] += 1
    return out


def pyramid_budgets(budget: int, window_: int, beta: float, layers: int, longest: int | None = None) -> list[int]:
    """PyramidKV: slots a head of each layer, falling linearly, their sum kept. The top is no larger than the prompt, which
    gives every layer the budget where the prompt fits in it."""
    rest = Fraction(budget - window_)
    low = rest / Fraction(beta)
    high = 2 * rest - low
    if longest is not None and window_ + high > longest:
        high = Fraction(max(longest, budget) - window_)
        low = 2 * rest - high
    if layers == 1:
        return [budget]
    shares = [window_ + high - layer * (high - low) / (layers - 1) for layer in range(layers)]
    return rounded(shares, budget * layers)


def pyramid(window_: Callable[[Setting], int], beta: float = 20) -> Callable[[OracleLayer, int], int]:
    """A layer's part of ``keep``. The held-back tail must fit every layer, so it bounds the smallest one as a window does."""

    def layer_keep(layer: OracleLayer, keep: int) -> int:
        s = layer.setting
        floor = min(max(window_(s), s.local_len + 1 if s.length is not None else 0), s.budget)
        return pyramid_budgets(s.budget, floor, beta, s.layers, s.length)[layer.layer] - (s.budget - keep)

    return layer_keep


def adaptive(alpha: float = 0.5, *, normalise: bool = False) -> Callable[..., list[int]]:
    """Ada-KV, algorithms 2 and 3: the layer's best slots choose the heads' budgets; ``alpha`` holds them near the mean."""

    def head_keep(layer: OracleLayer, scores: Scores, protected: list[set[int]]) -> list[int]:
        pooled = []
        for h, row_scores in enumerate(scores):
            weights = softmax(np.array(row_scores)).tolist() if normalise else row_scores
            for r, weight in enumerate(weights):
                pooled.append((True, r - len(weights), h) if r in protected[h] else (False, weight, h))
        pooled.sort(reverse=True)
        cut = layer.keep * len(scores)
        free = [weight for is_protected, weight, _ in pooled if not is_protected]
        layer.note_gap(free, cut - sum(map(len, protected)))
        fell = [sum(h == other for _, _, other in pooled[:cut]) for h in range(len(scores))]
        a = Fraction(round(alpha * 10**6), 10**6)
        return rounded([a * f + (1 - a) * layer.keep for f in fell], cut, [len(row_scores) for row_scores in scores])

    return head_keep


# ---- selection ------------------------------------------------------------------------------------------------------


def sampled(
    ratio: float, noise: Callable[[OracleLayer, int], list[float]], uniform: bool = False, shared: bool = False
) -> Callable[..., list[set[int]]]:
    """NaCl: the best, then a draw without replacement from softmax(score): the largest of score + Gumbel noise. Ablations: a
    uniform distribution; one distribution for all heads, of a token's mean score over the heads that hold it."""

    def select(layer: OracleLayer, scores: Scores, protected: list[set[int]], keeps: list[int]) -> list[set[int]]:
        drawn = [int(ratio * keep) for keep in keeps]
        best = top_k(layer, scores, protected, [k - d for k, d in zip(keeps, drawn, strict=True)])
        out = []
        of_token: dict[int, list[float]] = {}
        for rows, row_scores in zip(layer.heads, scores, strict=True):
            for row, score in zip(rows, row_scores, strict=True):
                of_token.setdefault(row.position, []).append(score)
        for h, rows in enumerate(layer.heads):
            weights = [float(np.mean(of_token[row.position])) for row in rows] if shared else scores[h]
            weights = [0.0] * len(rows) if uniform else weights
            noisy = [weight + more for weight, more in zip(weights, noise(layer, h), strict=True)]
            rest = [r for r in range(len(rows)) if r not in best[h]]
            out.append(best[h] | layer.best(noisy, rest, drawn[h]))
        return out

    return select


def representatives(
    ratio: float = 0.25, anchor: str = "mean", bits: str = "kept", unit: int = 1
) -> Callable[..., list[set[int]]]:
    """KVCrush, section III: B_important slots by the base, B_representative by groups of what it evicts. ``bits="groups"``: of a
    base that knows no single query head.

    The vector of a token: one bit per query head of the layer, 1 where the base retains the token in that head (of
    B_important); concatenated over the tokens of a page. The evicted ones are ordered by Hamming distance to the anchor, cut
    into equal groups, and the first of each group stays.
    """

    def select(layer: OracleLayer, scores: Scores, protected: list[set[int]], keeps: list[int]) -> list[set[int]]:
        H, G = len(keeps), layer.setting.G
        wanted = [int(ratio * keep) // unit for keep in keeps]
        own = [keep - unit * pages for keep, pages in zip(keeps, wanted, strict=True)]
        row_of = [{row.position: r for r, row in enumerate(rows)} for rows in layer.heads]
        if bits != "median":
            view, G = (layer.query_heads(), G) if bits == "kept" else (layer, 1)
            kept = top_k(view, layer.rule.score(view), view.protected(), [own[q // G] for q in range(H * G)])
            one = [{layer.heads[q // G][r].position for r in rows} for q, rows in enumerate(kept)]
        else:
            one = []
            for rows, row_scores in zip(layer.heads, scores, strict=True):
                median = float(np.median(row_scores))
                layer.note_gap(sorted(row_scores, reverse=True), len(row_scores) // 2)
                one.append({row.position for row, score in zip(rows, row_scores, strict=True) if score > median})
        if unit > 1:  # the attention of a page is the sum over its tokens
            pages = [{row.position // unit for row in rows} for rows in layer.heads]
            total = [
                {u: sum(s for row, s in zip(rows, x, strict=True) if row.position // unit == u) for u in pages[h]}
                for h, (rows, x) in enumerate(zip(layer.heads, scores, strict=True))
            ]
            scores = [[total[h][row.position // unit] for row in rows] for h, rows in enumerate(layer.heads)]
        best = top_k(layer, scores, protected, own)
        out = []
        for h, rows in enumerate(layer.heads):
            going = {row.position for r, row in enumerate(rows) if r not in best[h]}
            pages = {p // unit for p in going}
            vectors = {u: [u * unit + i in held for i in range(unit) for held in one] for u in pages}
            X = unit * len(one)
            reference = {
                "zeros": [False] * X,
                "ones": [True] * X,
                "alternate": [x % 2 == 1 for x in range(X)],
                "mean": [2 * sum(v[x] for v in vectors.values()) > len(vectors) for x in range(X)],
            }[anchor]
            order = sorted(vectors, key=lambda u: (sum(a != b for a, b in zip(vectors[u], reference, strict=True)), u))
            groups = min(wanted[h], len(order))
            stay = {order[i * len(order) // groups] for i in range(groups)}
            chosen = best[h] | {row_of[h][p] for p in going if p // unit in stay}
            rest = [r for r in range(len(rows)) if r not in chosen]
            out.append(chosen | layer.best(scores[h], rest, keeps[h] - len(chosen)))
        return out

    return select


def clusters(ratio: float = 0.25, iterations: int = 10) -> Callable[..., list[set[int]]]:
    """KVCrush, section IV-C: k-means over the keys that the base evicts; of each cluster its oldest member."""

    def select(layer: OracleLayer, scores: Scores, protected: list[set[int]], keeps: list[int]) -> list[set[int]]:
        wanted = [int(ratio * keep) for keep in keeps]
        best = top_k(layer, scores, protected, [k - w for k, w in zip(keeps, wanted, strict=True)])
        out = []
        for h, rows in enumerate(layer.heads):
            going = [r for r in range(len(rows)) if r not in best[h]]
            points, groups = layer.keys(h)[going], min(wanted[h], len(going))
            centres = [points[i * len(going) // groups] for i in range(groups)]
            members: list[list[int]] = []
            for last in [False] * iterations + [True] if groups else ():
                members = [[] for _ in range(groups)]
                for i, point in enumerate(points):
                    far = sorted((float(((point - centre) ** 2).sum()), j) for j, centre in enumerate(centres))
                    layer.note_gap([x for x, _ in reversed(far)], groups - 1)
                    members[far[0][1]].append(i)
                if not last:
                    centres = [points[m].mean(0) if m else c for m, c in zip(members, centres, strict=True)]
            chosen = best[h] | {going[one[0]] for one in members if one}
            rest = [r for r in range(len(rows)) if r not in chosen]
            out.append(chosen | layer.best(scores[h], rest, keeps[h] - len(chosen)))
        return out

    return select
