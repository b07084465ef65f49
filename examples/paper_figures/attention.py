"""How attention is spread: its concentration by head and the loss bound of an allocation (Ada-KV, figures 2 and 3), how the
standard deviation of what a token receives settles (RoCo, figure 3), and how it thins out by length
(NaCl, figures 2d and 6)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from matplotlib.figure import Figure
from study import Prompt, Study, chosen, read, scores, watch
from torch import Tensor

from locret_kit.evals.cells import size
from locret_kit.evals.figures.style import MAP, line, panels, shared_legend
from locret_kit.policies.methods.snapkv import WindowAttention

WINDOW = 32
"""Newest queries whose attention counts, as in SnapKV and Ada-KV."""
LEVEL = 0.95
"""Share of attention whose cost in slots is asked for."""
THRESHOLDS = (1e-4, 1e-3, 1e-2)
"""Attention below which a slot counts as unattended."""


def weights(study: Study, prompt: Prompt) -> dict[int, np.ndarray]:
    """Attention ``[H, T]`` of the newest queries by layer (mean over them and the group; a head's sum is 1)."""
    policy = f"score=window({WINDOW},1)"
    cache = read(study.setup.model, prompt.ids, study.unbounded(policy, study.budgets[0], len(prompt.ids)))
    assert isinstance(cache.policy.score, WindowAttention)
    queries = min(WINDOW, len(prompt.ids))
    return {
        layer: scores(cache, layer).double().cpu().numpy() / queries
        for layer, rows in enumerate(cache.bounded)
        if rows.window is None
    }


def gathered(weights_HT: np.ndarray) -> np.ndarray:
    """Attention ``[H, T]`` that the best 1, 2, ... T slots of each head receive together."""
    return np.cumsum(-np.sort(-weights_HT, axis=-1), axis=-1)


def needed(weights_HT: np.ndarray, level: float = LEVEL) -> np.ndarray:
    """Share ``[H]`` of the slots that it takes to receive ``level`` of a head's attention."""
    T = weights_HT.shape[-1]
    reached = gathered(weights_HT) >= level * weights_HT.sum(-1, keepdims=True)
    return (reached.argmax(-1) + 1) / T


def concentration(study: Study) -> Figure:
    """Left: attention received by the best slots of each head of a layer. Right: the share of slots that 95% of a head's
    attention takes, for every layer and head. The first text only."""
    prompt, layers = next(iter(study.prompts())), study.shown_layers()
    found = weights(study, prompt)
    figure, axes = panels(
        len(layers) + 1, f"Attention concentration by head; {prompt.title}, last {WINDOW} queries", columns=3
    )
    tokens = np.arange(1, len(prompt.ids) + 1) / len(prompt.ids)
    for layer, axis in zip(layers, axes[:-1], strict=True):
        curves = gathered(found[layer])
        for head in range(len(curves)):
            style = line(head, marker=False)
            axis.plot(tokens, curves[head], label=f"head {head}", **style)
        axis.axhline(LEVEL, color="grey", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_title(f"Layer {layer}")
        axis.set_xlabel("slots kept (share of the text)")
        axis.set_ylabel("attention received")
        axis.set_ylim(0, 1.03)
    grid = np.array([needed(found[layer]) for layer in sorted(found)])
    image = axes[-1].imshow(grid, aspect="auto", cmap=MAP, vmin=0)
    axes[-1].set_title(f"Slots that {LEVEL:.0%} of attention takes")
    axes[-1].set_xlabel("key/value head")
    axes[-1].set_ylabel("layer")
    axes[-1].set_xticks(range(grid.shape[1]))
    step = max(1, len(grid) // 8)
    axes[-1].set_yticks(range(0, len(grid), step), list(map(str, sorted(found)[::step])))
    axes[-1].grid(False)
    figure.colorbar(image, ax=axes[-1], label="share of the text")
    shared_legend(figure, 8)
    return figure


def loss_bound(study: Study) -> Figure:
    """Ada-KV's upper bound on the eviction loss, ``2C sum over heads (1 - attention kept)``, by layer in units of ``2C``, a
    line a policy, mean over texts. Source: Ada-KV, theorems 2 to 4."""
    prompts, budget = list(study.prompts()), study.budgets[0]
    figure, (axis,) = panels(
        1, f"Upper bound on the eviction loss, budget {size(budget)} a head (n={len(prompts)})", width=7, height=4
    )
    totals: dict[str, dict[int, list[float]]] = {policy: defaultdict(list) for policy in study.policies}
    for prompt in prompts:
        attention = weights(study, prompt)
        for policy in study.policies:
            for layer, bound in bounds(study, policy, prompt, attention).items():
                totals[policy][layer].append(bound)
    for i, (policy, by_layer) in enumerate(totals.items()):
        layers = sorted(by_layer)
        axis.plot(layers, [np.mean(by_layer[layer]) for layer in layers], label=policy, **line(i))
    axis.set_xlabel("layer")
    axis.set_ylabel(f"attention lost, sum over heads\n(of the last {WINDOW} queries; in units of 2C)")
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    shared_legend(figure, 2)
    return figure


def bounds(study: Study, policy: str, prompt: Prompt, attention: dict[int, np.ndarray]) -> dict[int, float]:
    """``sum over heads (1 - attention kept)`` by layer, if the policy cut the whole text to the budget at once."""
    budget = study.budgets[0]
    cache = read(study.setup.model, prompt.ids, study.unbounded(policy, budget, len(prompt.ids)))
    shares = iter(cache.policy.layer_budgets(budget, len(attention), len(prompt.ids), 0, longest=len(prompt.ids)))
    out = {}
    for layer in sorted(attention):
        kept = chosen(cache, layer, next(shares), 0)
        out[layer] = sum(
            1 - float(weight[positions].sum()) for weight, positions in zip(attention[layer], kept, strict=True)
        )
    return out


def persistence(study: Study) -> Figure:
    """Standard deviation of the attention that a token receives, by the number of queries that have seen it: its mean over
    tokens as a share of each token's highest (above), and the share of tokens past their highest (below). A column a layer,
    a line a key/value head. The first text only."""
    prompt, layers, heads = next(iter(study.prompts())), study.shown_layers(), study.shown_heads()
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def see(layer: int, q_QTD: Tensor, k_HTD: Tensor, scaling: float) -> None:
        if layer in layers:
            curves = [settle(deviations(received(q_QTD, k_HTD, head, scaling))) for head in heads]
            found[layer] = np.array([c[0] for c in curves]), np.array([c[1] for c in curves])

    watch(study.setup.model, prompt.ids, see)
    figure, axes = panels(
        2 * len(layers), f"Persistence of the standard deviation of attention; {prompt.title}",
        columns=len(layers), width=2.9,
    )  # fmt: skip
    units = ("standard deviation\n(share of the token's highest)", "tokens past their highest (share)")
    for row, unit in enumerate(units):
        for column, layer in enumerate(layers):
            axis = axes[row * len(layers) + column]
            for i, head in enumerate(heads):
                curve = found[layer][row][i]
                axis.plot(np.arange(1, len(curve) + 1), curve, label=f"head {head}", **line(i, marker=False))
            axis.set_title(f"Layer {layer}")
            axis.set_xlabel("queries that have seen the token")
            axis.set_ylabel(unit)
            axis.set_ylim(0, 1.03)
    shared_legend(figure)
    return figure


def sparsity(study: Study) -> Figure:
    """Left: share of the slots before a token that it gives less attention than a threshold. Right: the most that it gives to
    one slot. By the token's position, mean over the heads shown of the layers shown. The first text only."""
    prompt, layers, heads = next(iter(study.prompts())), study.shown_layers(), study.shown_heads()
    found: list[list[np.ndarray]] = []

    def see(layer: int, q_QTD: Tensor, k_HTD: Tensor, scaling: float) -> None:
        if layer in layers:
            seen = [received(q_QTD, k_HTD, head, scaling) for head in heads]
            found.extend([*(below(a, x) for x in THRESHOLDS), a.amax(1).cpu().numpy()] for a in seen)

    watch(study.setup.model, prompt.ids, see)
    curves, length = np.mean(found, axis=0), np.arange(1, len(prompt.ids) + 1)
    figure, axes = panels(2, f"Attention by length of the text; {prompt.title}", width=4.5)
    for i, threshold in enumerate(THRESHOLDS):
        axes[0].plot(length, curves[i], label=f"below {threshold:g}", **line(i, marker=False))
    axes[1].plot(length, curves[-1], label="largest weight", **line(len(THRESHOLDS), marker=False))
    for axis, title, unit in zip(axes, ("Sparsity", "Flattening"), ("slots (share)", "attention"), strict=True):
        axis.set_title(title)
        axis.set_xlabel("text (tokens)")
        axis.set_ylabel(unit)
        axis.set_ylim(0, 1.03)
    shared_legend(figure, 4)
    return figure


def below(a_TT: Tensor, threshold: float) -> np.ndarray:
    """Share ``[T]`` of the slots up to each token that it gives less than ``threshold``. Source: NaCl, appendix A.1."""
    low_TT = torch.ones_like(a_TT).tril() * (a_TT < threshold)
    return (low_TT.sum(1) / torch.arange(1, len(a_TT) + 1, device=a_TT.device)).cpu().numpy()


def received(q_QTD: Tensor, k_HTD: Tensor, head: int, scaling: float) -> Tensor:
    """Attention ``a [T, T]`` (queries down; float64) of one key/value head, the mean over its group."""
    G, T = len(q_QTD) // len(k_HTD), q_QTD.shape[1]
    total = torch.zeros(T, T, dtype=torch.float64, device=q_QTD.device)
    future = torch.ones(T, T, dtype=torch.bool, device=q_QTD.device).triu(1)
    for q_TD in q_QTD[head * G : (head + 1) * G]:
        logit_TT = (q_TD.float() @ k_HTD[head].float().T) * scaling
        total += logit_TT.masked_fill(future, float("-inf")).softmax(-1)
    return total / G


def deviations(a_TT: Tensor) -> np.ndarray:
    """Standard deviation ``[T, T]`` of what token ``s`` (a row) has received of its first 1, 2, ... queries; NaN where there
    are no so many."""
    T = len(a_TT)
    by_age = torch.stack([torch.nn.functional.pad(a_TT[s:, s], (0, s)) for s in range(T)])
    count = torch.arange(1, T + 1, dtype=by_age.dtype, device=by_age.device)
    mean, square = by_age.cumsum(1) / count, by_age.square().cumsum(1) / count
    out = (square - mean.square()).clamp(min=0).sqrt().cpu().numpy()
    age, token = np.arange(T)[None], np.arange(T)[:, None]
    return np.where(age < T - token, out, np.nan)


def settle(deviation_TT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By the number of queries: mean over tokens of the deviation as a share of the token's highest, and the share of
    tokens whose highest is past. Tokens seen by less than half of the text's queries are left out."""
    T = len(deviation_TT)
    whole = deviation_TT[: max(1, T // 2), : max(1, T - T // 2)]
    highest = whole.max(-1, keepdims=True)
    share = np.divide(whole, highest, out=np.zeros_like(whole), where=highest > 0)
    past = np.arange(whole.shape[1])[None] > whole.argmax(-1)[:, None]
    return share.mean(0), past.mean(0)
