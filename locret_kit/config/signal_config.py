"""Sections of ``locret-train`` that say what is learned: targets and losses, gates, the pool. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval, Len, Lt, MinLen, Predicate

from ..settings import Count, Slots
from ..validation import Description

Fraction = Annotated[float, Interval(ge=0, le=1)]
Shares = Annotated[
    list[Annotated[float, Interval(gt=0, lt=1)]],
    Len(2, 2),
    Predicate(lambda two: two[0] <= two[1]),
    Description("two numbers above 0 and below 1, the smaller one first"),
]
Temperatures = Annotated[list[Annotated[float, Gt(0)]], Len(2, 2), Description("two numbers above 0")]


def is_odd(number: int) -> bool:
    return number % 2 == 1


@dataclass
class TargetConfig:
    """The target that the heads learn to predict."""

    kind: Literal["logit", "log_prob", "log_mass"] = "logit"
    """'logit' (the paper's: the largest raw attention logit), 'log_prob' (the same minus each query's log-sum-exp) or 'log_mass'
    (the logarithm of the mean attention of all queries, instead of the largest)."""
    window: Count = 0
    """For 'log_mass': tokens after a slot whose queries do not count."""
    values: bool = False
    """Adds the logarithm of the norm that a slot's value has after the output projection."""
    floor: Annotated[float, Lt(0)] = -12.0
    """Lower clip of 'log_prob' and 'log_mass' targets, nats."""
    queries: Literal["all", "answers", "replay"] = "all"
    """For ``data.queries=both``: queries that ask for this target, 'all', the 'answers' alone or the 'replay' alone."""
    lead: Count = 0
    """Prompt tokens before each answer whose queries count as the answer's; the last one predicts its first token."""


@dataclass
class LossConfig:
    """A loss of the predictions plus smoothing along the sequence."""

    kind: Literal["smooth_l1", "mse", "bce_rank", "bce_mass", "boundary"] = "smooth_l1"
    """'smooth_l1' or 'mse' (regression), 'bce_rank' or 'bce_mass' (cross-entropy with the slot's rank in its head, or with the
    attention itself), or 'boundary' (logistic, every slot against the last one that a budget keeps)."""
    budgets: Slots = 4
    """For 'boundary': budgets drawn in each step, from a sixteenth to a half of the prompt."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """For 'boundary': the difference of scores that counts as one."""
    top_fraction: Annotated[float, Interval(gt=0, le=1)] = 0.05
    """Share of each KV head's slots, those of highest target, that weigh ``top_weight``."""
    top_weight: Annotated[float, Ge(1)] = 1.0
    """Weight of those slots; 1 is the paper's loss. Of no use to 'boundary'."""
    smoothing: Annotated[float, Ge(0)] = 0.0025
    """Weight (alpha) of the mean squared difference of neighbouring predictions, in each layer."""
    beta: Annotated[float, Gt(0)] = 1.0
    """Difference at which SmoothL1 goes from quadratic to linear, in the target's unit."""


@dataclass
class GatesSection:
    """Evictions with gradients, where ``trains`` is 'end_to_end'. Each sample is read in chunks with a budget that is drawn."""

    forward: Literal["evicted", "soft"] = "evicted"
    """'evicted' (what the scores would not keep is hidden, and gates are soft in the gradient alone: straight through) or 'soft'
    (hidden by degrees)."""
    shares: Shares = field(default_factory=lambda: [0.04, 0.25])
    """Least and largest part of the prompt that is kept."""
    chunks: Annotated[list[Slots], MinLen(1)] = field(default_factory=lambda: [96, 128, 192, 256])
    """Tokens of a chunk; one is drawn for each sample."""
    newest: Annotated[float, Interval(ge=0, lt=1)] = 0.5
    """Largest part of the budget that the newest slots take, whatever they score."""
    temperatures: Temperatures = field(default_factory=lambda: [0.5, 0.5])
    """Difference of scores over which a gate opens, in the first and in the last step."""
    divergence: Literal["forward", "reverse"] = "forward"
    """Kullback-Leibler divergence from full attention: 'forward' (mean over full attention's tokens) or 'reverse'."""
    text_tokens: Count = 96
    """Tokens of the prompt, beside those of the answers, after which the next token's distribution counts."""
    text_weight: Annotated[float, Ge(0)] = 1.0
    """Weight of these; the answers weigh 1."""


@dataclass
class PoolSection:
    """LoCoCo's pool, where ``trains`` is 'pool'."""

    slots: Slots = 64
    """Merged slots of a head; part of ``infer.budget``."""
    kernel: Annotated[int, Ge(1), Predicate(is_odd), Description("odd and at least 1")] = 21
    """Slots that a convolution sees at once; odd."""
    norm: bool = False
    """Whether slots are layer-normed before the convolution, by norms that are trained with it."""
    gate: Annotated[float, Interval(gt=0, lt=1)] = 0.5
    """Part of the convolution in the mixing weights at first; the rest is each merged slot's own token."""
    policy: str = "h2o"
    """The policy that chooses the slots that stay: a name or an expression."""
    heads: str | None = None
    """Retaining heads (a folder, a file or a Hub id), for policies that score with them."""
