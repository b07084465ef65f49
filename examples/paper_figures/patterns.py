"""Tokens that a policy holds: over time by layer and head (Locret, figures 5 and 6), and at the prompt's end by layer
(NaCl, figure 2)."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from study import Prompt, Study, bin_edges, held, read, scores, share_held

from locret_kit.evals.cells import size
from locret_kit.evals.figures.style import MAP, line, panels


def retained(study: Study) -> Figure:
    """Tokens that a head holds after every chunk: time across, position up. A row of panels a policy, text and layer; a column a
    head. White is not read yet."""
    layers, heads, budget = study.shown_layers(), study.shown_heads(), study.budgets[0]
    prompts = [(policy, prompt) for policy in study.policies for prompt in study.prompts()]
    figure, axes = panels(
        len(prompts) * len(layers) * len(heads), f"Retained tokens over time, budget {size(budget)}",
        columns=len(heads), width=2.9, height=2.5,
    )  # fmt: skip
    places = iter(axes)
    for policy, prompt in prompts:
        times, shares = trace(study, policy, prompt, budget, layers, heads)
        for i, layer in enumerate(layers):
            for j, head in enumerate(heads):
                axis, edges = next(places), bin_edges(len(prompt.ids))
                future = edges[:-1, None] >= times[None, 1:]
                image = axis.pcolormesh(
                    times, edges, np.ma.masked_array(shares[i, j], future), cmap=MAP, vmin=0, vmax=1, rasterized=True
                )
                axis.set_title(f"{policy}, {prompt.title}\nlayer {layer}, head {head}", fontsize=7)
                axis.set_xlabel("tokens read")
                axis.set_ylabel("position (tokens)")
                axis.grid(False)
    figure.colorbar(image, ax=axes, label="share of the positions that is held", shrink=0.6)
    return figure


def trace(
    study: Study, policy: str, prompt: Prompt, budget: int, layers: list[int], heads: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """``(tokens read [pieces + 1] from 0 on, share held [layers, heads, bins, pieces])``."""
    edges, times, columns = bin_edges(len(prompt.ids)), [0], []
    cache = study.bounded(policy, budget, len(prompt.ids))

    def after(done: int) -> None:
        times.append(done)
        columns.append([[share_held(held(cache, layer)[head], edges) for head in heads] for layer in layers])

    read(study.setup.model, prompt.ids, cache, after)
    return np.array(times), np.moveaxis(np.array(columns), 0, -1)


def kept_positions(study: Study) -> Figure:
    """Tokens that each policy holds after the prompt, by layer and position, and how its score is spread over positions when
    nothing is evicted. The first text only."""
    prompt, budget = next(iter(study.prompts())), study.budgets[0]
    edges = bin_edges(len(prompt.ids), 100)
    centres = (edges[:-1] + edges[1:]) / 2
    figure, axes = panels(
        len(study.policies) + 1, f"Kept positions, budget {size(budget)}; {prompt.title}", columns=2, width=4.2
    )
    for i, (policy, axis) in enumerate(zip(study.policies, axes[:-1], strict=True)):
        cache = read(study.setup.model, prompt.ids, study.bounded(policy, budget, len(prompt.ids)))
        shown = [layer for layer, rows in enumerate(cache.bounded) if rows.window is None]
        image = axis.pcolormesh(
            edges, np.arange(len(shown) + 1) - 0.5,
            [np.mean([share_held(head, edges) for head in held(cache, layer)], axis=0) for layer in shown],
            cmap=MAP, vmin=0, vmax=1, rasterized=True,
        )  # fmt: skip
        axis.set_yticks(
            range(0, len(shown), max(1, len(shown) // 8)), list(map(str, shown[:: max(1, len(shown) // 8)]))
        )
        axis.set_title(policy)
        axis.set_xlabel("position (tokens)")
        axis.set_ylabel("layer")
        axis.grid(False)
        axes[-1].plot(
            centres, score_profile(study, policy, prompt, budget, edges), label=policy, **line(i, marker=False)
        )
    axes[-1].set_title("Score by position, nothing evicted")
    axes[-1].set_xlabel("position (tokens)")
    axes[-1].set_ylabel("mean rank of the score\n(0 lowest, 1 highest)")
    axes[-1].set_ylim(0, 1)
    axes[-1].legend()
    figure.colorbar(image, ax=axes[:-1], label="share held (mean over heads)", shrink=0.7)
    return figure


def score_profile(study: Study, policy: str, prompt: Prompt, budget: int, edges: np.ndarray) -> np.ndarray:
    """Mean rank (0 to 1) of the scores of each bin's tokens among all of their head's, over layers and heads."""
    cache = read(study.setup.model, prompt.ids, study.unbounded(policy, budget, len(prompt.ids)))
    ranks = []
    for layer, rows in enumerate(cache.bounded):
        if rows.window is None:
            place_HS = scores(cache, layer).argsort(-1).argsort(-1).double() / max(1, len(prompt.ids) - 1)
            ranks.append(place_HS.mean(0).cpu().numpy())
    mean = np.mean(ranks, axis=0)
    return np.add.reduceat(mean, edges[:-1]) / np.diff(edges)
