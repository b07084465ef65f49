"""Agreement of what a policy holds with what it would hold had it seen everything. Source: RoCo, figure 2."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from study import Prompt, Study, chosen, held, read
from tqdm import tqdm

from locret_kit.evals.figures.style import line, panels


def jaccard(study: Study) -> Figure:
    """Mean Jaccard similarity of the held set and the full cache's top set against the budget's share of the text, a line a
    policy; a dot's whisker is the standard deviation over texts."""
    prompts = list(study.prompts())
    for rate in study.sweep:
        if not 0 < rate < 1:
            raise ValueError(f"sweep: {rate} must be above 0 and below 1, a share of the text")
    lengths = sorted({len(prompt.ids) for prompt in prompts})
    tokens = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    figure, (axis,) = panels(
        1, f"Agreement with the full cache's top set ({tokens} tokens, n={len(prompts)})", width=6.4, height=4
    )
    bar = tqdm(total=len(study.policies) * len(study.sweep) * len(prompts), unit="text", desc="jaccard")
    for i, policy in enumerate(study.policies):
        means, spreads = [], []
        for rate in study.sweep:
            found = []
            for prompt in prompts:
                found.append(similarity(study, policy, prompt, max(1, round(rate * len(prompt.ids)))))
                bar.update()
            means.append(np.mean(found))
            spreads.append(np.std(found))
        axis.errorbar(study.sweep, means, spreads, label=policy, capsize=2, **line(i))
    bar.close()
    axis.set_xlabel("budget (share of the text)")
    axis.set_ylabel("Jaccard similarity (mean over evictions, layers and heads)")
    axis.set_ylim(0, 1.03)
    axis.legend()
    return figure


def similarity(study: Study, policy: str, prompt: Prompt, budget: int) -> float:
    """Mean Jaccard similarity over all evictions, layers and heads.

    Raises:
        ValueError: nothing was evicted.
    """
    model, ids = study.setup.model, prompt.ids
    cache, everything = study.bounded(policy, budget, len(ids)), study.unbounded(policy, budget, len(ids))
    kept: dict[int, dict[int, list[np.ndarray]]] = {}

    def after_bounded(done: int) -> None:
        kept[done] = {
            layer: held(cache, layer)
            for layer, rows in enumerate(cache.bounded)
            if rows.window is None and rows.evictions and rows.since_eviction == 0
        }

    found: list[float] = []

    def after_everything(done: int) -> None:
        stabilizers = 0 if cache.schedule.is_last(done) else cache.schedule.stabilizers
        for layer, mine in kept[done].items():
            theirs = chosen(everything, layer, mean_held(mine), stabilizers)
            found.extend(overlap(a, b) for a, b in zip(mine, theirs, strict=True))

    read(model, ids, cache, after_bounded)
    read(model, ids, everything, after_everything)
    if not found:
        raise ValueError(
            f"policy={policy}, budget={budget}: nothing of {len(ids)} tokens was evicted; take a smaller chunk"
        )
    return float(np.mean(found))


def mean_held(heads: list[np.ndarray]) -> int:
    """Slots that a head holds on average, rounded down."""
    return sum(map(len, heads)) // len(heads)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard similarity of two sets of positions."""
    both = len(np.intersect1d(a, b))
    return both / (len(a) + len(b) - both)
