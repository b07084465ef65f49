"""Score against one setting of a policy, answered with the harness: the scope's size (RoCo, figure 4), the share of
representatives (KVCrush, figure 5), of proxies and of drawn slots (NaCl, figure 5), and the number of stabilizers (Locret,
figure 3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study import Prompt, Study, last_hidden, read, recorded, varied

from locret_kit.evals.cells import mean_and_stderr, size
from locret_kit.evals.engine.result_rows import Row
from locret_kit.evals.engine.run_spec import Setup
from locret_kit.evals.figures.style import line, panels, score_axis, shared_legend

SCOPES = {"window": "newest slots", "deviation": "highest deviation"}


def scope_size(study: Study) -> Figure:
    """Score against the share of the budget that the scope protects, for the newest slots and for those of highest standard
    deviation."""
    lines = {
        f"{policy}: {meaning}": {x: varied(policy, scope=f"{scope}({x})") for x in _shares(study)}
        for policy in study.policies
        for scope, meaning in SCOPES.items()
    }
    return _score_lines(study, lines, "Sensitivity to the scope's size", "protected slots (share of the budget)")


def budget_split(study: Study) -> Figure:
    """Score against the share of the budget that representatives get; 0 is the policy itself."""
    lines = {
        policy: {x: policy if x == 0 else varied(policy, selection=f"representatives({x})") for x in _shares(study)}
        for policy in study.policies
    }
    return _score_lines(study, lines, "Budget split", "representatives (share of the budget)")


def proxy_share(study: Study) -> Figure:
    """Score against the share of the prompt whose queries are proxies; 0 is the newest token alone."""
    lines = {policy: {x: varied(policy, score=f"proxy({x or 1})") for x in _shares(study)} for policy in study.policies}
    return _score_lines(study, lines, "Proxy tokens", "proxies (share of the prompt)")


def random_share(study: Study) -> Figure:
    """Score against the share of the budget that is drawn at random."""
    lines = {
        policy: {x: varied(policy, selection=f"sampled({x})") for x in _shares(study)} for policy in study.policies
    }
    return _score_lines(study, lines, "Random share", "drawn slots (share of the budget)")


def _shares(study: Study) -> list[float]:
    for x in study.sweep:
        if not 0 <= x <= 1:
            raise ValueError(f"sweep: {x} must be from 0 to 1, a share of the budget")
    return study.sweep


def _score_lines(study: Study, lines: dict[str, dict[float, str]], title: str, unit: str) -> Figure:
    names = list(dict.fromkeys(policy for points in lines.values() for policy in points.values()))
    members = [study.variant(policy, budget) for policy in names for budget in study.budgets]
    rows = study.answer(members)
    groups = list(dict.fromkeys((row.task, row.haystack, row.length, row.budget) for row in rows))
    figure, axes = panels(len(groups), title, width=4.2, height=3.3)
    for (task, haystack, length, budget), axis in zip(groups, axes, strict=True):
        mine = [r for r in rows if (r.task, r.haystack, r.length, r.budget) == (task, haystack, length, budget)]
        for i, (label, points) in enumerate(lines.items()):
            _score_line(axis, {x: [r for r in mine if r.policy == policy] for x, policy in points.items()}, label, i)
        over = "" if haystack == "-" else f", {haystack}"
        axis.set_title(f"{task}{over}, {size(length)} tokens, budget {size(budget)} (n={study.samples})")
        axis.set_xlabel(unit)
    shared_legend(figure)
    return figure


def _score_line(axis: Axes, points: dict[Any, list[Row]], label: str, i: int) -> None:
    good = {x: [row.score for row in rows if row.score is not None] for x, rows in points.items()}
    found = {x: mean_and_stderr(values) for x, values in good.items() if values}
    axis.errorbar(
        list(found), [mean or 0.0 for mean, _ in found.values()], [error or 0 for _, error in found.values()], label=label,
        capsize=2, **line(i),
    )  # fmt: skip
    metric = next((row.metric for rows in points.values() for row in rows if row.score is not None), "score")
    score_axis(axis, metric)


def stabilizers(study: Study) -> Figure:
    """Score, largest error of the last prompt token's hidden state and mean error of the predicted importance against a
    run that evicts nothing, for each number of stabilizers; the first policy and budget."""
    policy, budget = study.policies[0], study.budgets[0]
    sizes = [int(x) for x in study.sweep]
    for x in study.sweep:
        if x != int(x) or not 0 <= x < budget:
            raise ValueError(f"sweep: {x:g} must be a whole number of slots from 0 to below budget={budget}")
    answered = {n: replace(study, setup=_with(study.setup, n)) for n in sizes}
    rows = {n: one.answer([one.variant(policy, budget)], folder=f"stabilizers-{n}") for n, one in answered.items()}
    prompts = list(study.prompts())
    errors = {
        n: [hidden_and_score_errors(one, policy, budget, prompt) for prompt in prompts] for n, one in answered.items()
    }
    has_scores = all(scores for found in errors.values() for _, scores in found)
    title = f"Stabilizers: {policy}, budget {size(budget)} (n={len(prompts)})"
    figure, axes = panels(2 + has_scores, title, width=4.0, height=3.2)
    for i, task in enumerate(dict.fromkeys((row.task, row.haystack) for found in rows.values() for row in found)):
        mine = {n: [row for row in found if (row.task, row.haystack) == task] for n, found in rows.items()}
        _score_line(axes[0], mine, " ".join(part for part in task if part != "-"), i)
    axes[0].set_title("Score")
    axes[0].set_xlabel("stabilizers (slots)")
    axes[0].legend()
    units = ["largest absolute error\n(hidden state of the last token)", "mean absolute error\n(predicted importance)"]
    for part, axis in enumerate(axes[1:]):
        for i, (n, found) in enumerate(errors.items()):
            layers = sorted(found[0][part])
            axis.plot(
                layers, [np.mean([one[part][layer] for one in found]) for layer in layers], label=f"{n} stabilizers",
                **line(i),
            )  # fmt: skip
        axis.set_title(("Hidden state", "Importance")[part])
        axis.set_xlabel("layer")
        axis.set_ylabel(units[part])
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        axis.legend()
    return figure


def _with(setup: Setup, stabilizers: int) -> Setup:
    """The setup whose caches have so many stabilizers."""
    settings_for = setup.settings_for
    return replace(
        setup, settings_for=lambda variant, tokens: replace(settings_for(variant, tokens), stabilizers=stabilizers)
    )


def hidden_and_score_errors(
    study: Study, policy: str, budget: int, prompt: Prompt
) -> tuple[dict[int, float], dict[int, float]]:
    """By layer, against the same run without evictions: the largest absolute error of the last prompt token's hidden state,
    and the mean absolute error of the scores with which tokens enter ({} for scores that are made later)."""
    model, tokens = study.setup.model, len(prompt.ids)
    seen = []
    for cache in (study.bounded(policy, budget, tokens), study.unbounded(policy, budget, tokens)):
        score = recorded(cache)
        with last_hidden(model) as hidden, torch.no_grad():
            read(model, prompt.ids, cache)
        seen.append((dict(hidden), {layer: score.all(layer) for layer in score.entered}))
    (hidden, entered), (true_hidden, true_entered) = seen
    return (
        {layer: float((hidden[layer] - true_hidden[layer]).abs().max()) for layer in hidden},
        {layer: float((entered[layer] - true_entered[layer]).abs().mean()) for layer in entered},
    )
