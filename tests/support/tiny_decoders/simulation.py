"""Bounded attention written again from its definition, in float64 where the model is. Imports nothing of the kit.

The whole text goes through the model once, without a cache, behind transformers' attention interface. Each call of attention
plays chunks and evictions by itself, from full matrices: a key/value head holds a set of tokens, new tokens join it, attend to
what it holds and to each other, and at a boundary it is cut to the budget. A layer whose own mask hides more than causality (a
window, a chunk) keeps that mask and evicts nothing. A layer that is handed the keys and values of an earlier one reads what that
one holds; its queries count for nothing, since a model may leave out those that no logits are asked of.

Sources: Locret, algorithm 1 (boundaries, tail); StreamingLLM; H2O; SnapKV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

NAME = "simulated"
SINKS, WINDOW, KERNEL = 4, 32, 7
"""StreamingLLM's first tokens; SnapKV's newest queries, and the slots over which it takes the maximum."""
HIDDEN = -1e4
"""Below it a number of a mask hides."""


class Unknown(ValueError):
    """Attention of a kind that is not written here."""


@dataclass(frozen=True)
class Plan:
    """A bounded run of ``prompt`` tokens and those that follow, all numbers in tokens."""

    policy: str
    """'full', 'streaming', 'h2o', 'snapkv' or 'scores'."""
    budget: int
    chunk: int
    tail: int
    prompt: int
    stabilizers: int = 0
    """Newest slots that 'scores' may not evict before the prompt's last boundary."""

    @property
    def body(self) -> int:
        """Tokens before the tail, which nothing evicts."""
        return self.prompt - self.tail

    def blocks(self, tokens: int) -> Iterator[tuple[int, int, int | None]]:
        """Blocks of the text: start, end, and slots that a head keeps at the end (None: all)."""
        start = 0
        while start < tokens:
            end = start + self.chunk - start % self.chunk
            end = min(end, self.body) if start < self.body else min(end, tokens)
            last = end == self.body
            cut = self.prompt > self.budget and end <= self.body and self.policy != "full"
            yield start, end, (self.budget - self.tail * last) if cut else None
            start = end


@dataclass
class Call:
    """One call of attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    windowed: bool = False
    reads: bool = False
    """Whether keys and values are those of an earlier call."""
    held: list[Tensor] = field(default_factory=list)
    """Of each block: tokens ``[H, T]`` that it can see, itself included."""
    kept: Tensor | None = None
    """Tokens ``[H, T]`` that are held at the end; None where the layer reads another one's or evicts nothing."""


@dataclass
class Run:
    """A forward under a plan.

    Attributes:
        scores: of 'scores': makes ``[H, T]`` of the run so far; its last call is the one that is scored.
        calls: of this forward.
        gap: smallest relative difference between what stayed and what went: below rounding, the choice means nothing.
    """

    plan: Plan
    scores: Callable[[Run], Tensor] | None = None
    outputs: Sequence[Tensor] | None = None
    """What the calls return instead of their own output, in a forward that ends with ``Enough`` after one call more."""
    calls: list[Call] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    gap: float = float("inf")

    @property
    def rows(self) -> list[Call]:
        """The calls that have keys and values of their own."""
        return [call for call in self.calls if not call.reads]


class Enough(Exception):
    """The forward has given what it was run for."""


_NOW: list[Run] = []


def _attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    run = _NOW[-1]
    given.pop("dropout", None)
    capped, sinks = given.pop("softcap", None), given.pop("s_aux", None)
    if strange := sorted(name for name, value in given.items() if isinstance(value, Tensor) and "position" not in name):
        raise Unknown(f"attention takes {', '.join(strange)}")
    B, Q, T, D = q.shape
    if B != 1 or k.shape[2] != T:
        raise Unknown(f"{B} texts, {T} queries and {k.shape[2]} keys")
    call = Call(q, k, v)
    run.calls.append(call)
    if run.outputs is not None:
        if len(run.calls) > len(run.outputs):
            raise Enough
        return run.outputs[len(run.calls) - 1], None
    G = Q // k.shape[1]
    logits = q @ k.repeat_interleave(G, 1).mT * (D**-0.5 if scaling is None else scaling)  # [1, Q, T, T]
    if capped is not None:
        logits = capped * torch.tanh(logits / capped)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    own = causal.expand(1, 1, T, T)
    if attention_mask is not None:
        mask = attention_mask[..., :T]
        own = mask if mask.dtype == torch.bool else mask > HIDDEN
        if mask.dtype != torch.bool:
            logits = logits + mask.where(own, 0).to(logits.dtype)  # a bias of the model's own
    call.windowed = bool((own != causal).any())
    sink = None if sinks is None else sinks.view(1, Q, 1, 1).to(logits.dtype)
    run.results.append(_played(run, call, logits, own, sink).transpose(1, 2).contiguous())
    return run.results[-1], None


def _method(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, None]:
    return _attention(module, q, k, v, mask)[0].transpose(1, 2), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


def _played(run: Run, call: Call, logits: Tensor, own: Tensor, sink: Tensor | None) -> Tensor:
    """Output ``[1, Q, T, Dv]`` of all blocks, one after another."""
    H, T, Q = call.k.shape[1], call.k.shape[2], call.q.shape[1]
    v, alive = call.v.repeat_interleave(Q // H, 1), torch.zeros(H, T, dtype=torch.bool)
    owner = next((earlier for earlier in run.calls[:-1] if same_rows(earlier, call)), None)
    call.reads = owner is not None
    out, summed = [], torch.zeros(H, T, dtype=logits.dtype)
    scores = run.scores(run) if run.scores is not None and owner is None and not call.windowed else None
    for i, (start, end, keep) in enumerate(run.plan.blocks(T)):
        alive[:, start:end] = True
        if owner is not None:
            alive = owner.held[i]
        call.held.append(alive.clone())
        visible = own[:, :, start:end].expand(1, Q, -1, -1)
        if not call.windowed:
            visible = visible & alive.repeat_interleave(Q // H, 0)[None, :, None]
        weights = softmax(logits[:, :, start:end].masked_fill(~visible, float("-inf")), sink)
        out.append(weights @ v)
        summed += weights.unflatten(1, (H, Q // H)).mean(2).sum(2)[0]
        if keep is None or call.windowed or owner is not None:
            continue
        for head in range(H):
            held = alive[head].nonzero()[:, 0]
            if len(held) <= keep:
                continue
            rows = slice(head * (Q // H), (head + 1) * (Q // H))
            if run.plan.policy == "snapkv":
                recent = logits[:, rows, max(0, end - WINDOW) : end, held].clone()
                newest = torch.arange(max(0, end - WINDOW), end)
                recent.masked_fill_(held[None] > newest[:, None], float("-inf"))
                of_head = None if sink is None else sink[:, rows]
                worth = softmax(recent, of_head).mean((0, 1)).sum(0)
            elif run.plan.policy == "h2o":
                worth = summed[head, held]
            else:
                worth = held.double() if scores is None else scores[head, held].double()
            stay = _stay(run, held, worth, keep, last=end == run.plan.body)
            alive[head] = False
            alive[head, stay] = True
    if owner is None and not call.windowed:
        call.kept = alive
    return torch.cat(out, 2)


def _stay(run: Run, held: Tensor, worth: Tensor, keep: int, last: bool) -> Tensor:
    """The tokens of one head that stay."""
    policy = run.plan.policy
    newest = {"h2o": keep // 2, "snapkv": WINDOW, "scores": 0 if last else run.plan.stabilizers}
    safe = torch.zeros(len(held), dtype=torch.bool)
    if policy == "streaming":
        safe = held < SINKS
    elif newest[policy]:
        safe[-newest[policy] :] = True
    if policy == "snapkv":  # the maximum over neighbours, of the slots before the window
        before, half = worth[: len(held) - WINDOW].clone(), KERNEL // 2
        for i in range(len(before)):
            worth[i] = before[max(0, i - half) : i + half + 1].max()
    rest = (~safe).nonzero()[:, 0]
    order = sorted(rest.tolist(), key=lambda i: (float(worth[i]), i), reverse=True)
    n = keep - int(safe.sum())
    if 0 < n < len(order):
        inside, outside = float(worth[order[n - 1]]), float(worth[order[n]])
        if inside != outside:
            run.gap = min(run.gap, (inside - outside) / max(abs(inside), abs(outside)))
    return held[sorted([*safe.nonzero()[:, 0].tolist(), *order[:n]])]


def same_rows(a: Call, b: Call) -> bool:
    """Whether two calls have the same keys and values."""
    return a.k.shape == b.k.shape and torch.equal(a.k, b.k) and torch.equal(a.v, b.v)


def softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Over the last axis; a sink is one logit more, whose weight nothing gets."""
    if sink is None:
        return logits.softmax(-1)
    more = sink.expand(*logits.shape[:-1], 1)
    return torch.cat((logits, more), -1).softmax(-1)[..., :-1]


@contextmanager
def behind_the_interface(model: Any) -> Iterator[None]:
    """The model with this attention. Raises ``Unknown`` where it has another that cannot be changed."""
    config = model.config.get_text_config(decoder=True)
    before, named = config._attn_implementation, [m for m in model.modules() if hasattr(type(m), "_attn")]
    methods = [m for m in named if "query" in signature(type(m)._attn).parameters]
    try:
        model.set_attn_implementation(NAME)
        if config._attn_implementation != NAME and not methods:
            raise Unknown("attention is not behind the interface")
        for module in methods:  # of GPT-J and its likes, who call it with queries, keys, values and a mask
            module._attn = partial(_method, module)
        yield
    finally:
        for module in methods:
            vars(module).pop("_attn", None)
        if config._attn_implementation != before:
            model.set_attn_implementation(before)


@torch.no_grad()
def simulate(model: Any, ids: Tensor, plan: Plan, scores: Callable[[Run], Tensor] | None = None) -> tuple[Tensor, Run]:
    """Logits ``[T, V]`` of a text ``[1, T]``, and what was held. Raises ``Unknown`` for attention that is not written here."""
    run = Run(plan, scores)
    _NOW.append(run)
    try:
        with behind_the_interface(model):
            logits = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        _NOW.pop()
    if not run.calls:
        raise Unknown("no attention was seen")
    return logits, run


@torch.no_grad()
def without_factor(answer: Any) -> Any:
    """A rotary module's answer at position 0, whose cosines are 1."""
    if isinstance(answer, Tensor):
        return answer / answer.abs()
    cos, sin = answer
    return cos / cos.abs().max(), sin


def before_rotation(model: Any, ids: Tensor, run: Run) -> Call:
    """The queries, keys and values of the run's last call before RoPE: those of a forward in which every rotary module stands at
    position 0, without its factor (YaRN, LongRoPE), and earlier attention returns what it returned in ``run``."""

    def at_zero(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def zero(x: Any) -> Any:
            return torch.zeros_like(x) if isinstance(x, Tensor) and not x.is_floating_point() else x

        return tuple(zero(x) for x in args), {name: zero(x) for name, x in kwargs.items()}

    rotary = [m for m in model.modules() if any("inv_freq" in name for name, _ in m.named_buffers(recurse=False))]
    hooks = [module.register_forward_pre_hook(at_zero, with_kwargs=True) for module in rotary]
    hooks += [module.register_forward_hook(lambda module, args, out: without_factor(out)) for module in rotary]
    again = Run(run.plan, outputs=run.results)
    _NOW.append(again)
    try:
        model(input_ids=ids, use_cache=False)
    except Enough:
        pass
    finally:
        _NOW.pop()
        for hook in hooks:
            hook.remove()
    return again.calls[-1]
