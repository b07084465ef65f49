"""Common parts of the figures: its prompts, its caches, and what is read off them while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from locret_kit.backbones.handler import Handler, Softmax
from locret_kit.backbones.intercept import attach
from locret_kit.backbones.probe import describe
from locret_kit.backbones.rope import rotate
from locret_kit.backbones.spec import decoder_of, text_config
from locret_kit.cache.attend import attend_text
from locret_kit.cache.bounded import BoundedCache
from locret_kit.cache.view import slots_of
from locret_kit.evals.engine.measure import cache_for
from locret_kit.evals.engine.result_rows import Row, read_rows
from locret_kit.evals.engine.run_spec import UNTRAINED, Run, Setup, Variant, variants
from locret_kit.evals.engine.runner import answer
from locret_kit.evals.tasks.task import ExampleRequest, Task
from locret_kit.policies.grammar import parse_policy, parts_of
from locret_kit.policies.registry import KINDS
from locret_kit.runtime.session import prefill
from locret_kit.runtime.tokens import stream_ids

BINS = 400
"""Position bins of an image, at most."""


@dataclass(frozen=True)
class Prompt:
    """One text that a figure looks at."""

    title: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Study:
    """A backbone, the policies to look at, and the texts."""

    setup: Setup
    tasks: list[Task]
    policies: list[str]
    budgets: list[int]
    lengths: list[int]
    samples: int
    out: Path
    """Where rows of examples go that the figure has answered."""
    sweep: list[float] = field(default_factory=list)
    """Values that the figure varies; their unit is the figure's."""
    layers: list[int] = field(default_factory=list)
    """Layers to show; [] chooses up to four."""
    heads: list[int] = field(default_factory=list)
    """Key/value heads to show; [] chooses up to four."""

    def prompts(self) -> Iterator[Prompt]:
        """Every task's texts, at every length."""
        setup = self.setup
        for task in self.tasks:
            for length in self.lengths:
                for sample in range(self.samples if task.size is None else min(self.samples, task.size)):
                    request = ExampleRequest(setup.tokenizer, length, sample, setup.seed, setup.chat, setup.ending)
                    example = task.make(request)
                    ids = stream_ids(setup.tokenizer, [example.prompt], special=example.special)
                    haystack = "" if task.haystack == "-" else f", {task.haystack}"
                    yield Prompt(f"{task.name}{haystack}, {len(ids)} tokens", ids)

    def variant(self, policy: str, budget: int) -> Variant:
        """A policy at a budget, with the first of the heads where it needs some.

        Raises:
            ValueError: a policy that evicts nothing, is unknown, or needs heads where there are none.
        """
        if parse_policy(policy).keeps_everything:
            raise ValueError(f"policy={policy} evicts nothing: this figure needs one that does")
        return variants([policy], [budget], [name for name in self.setup.heads if name != UNTRAINED])[0]

    def bounded(self, policy: str, budget: int, tokens: int) -> BoundedCache:
        """A fresh cache."""
        return cache_for(self.setup, self.variant(policy, budget), tokens)

    def unbounded(self, policy: str, budget: int, tokens: int) -> BoundedCache:
        """The same with the same chunks, whose budget holds the whole text, so that nothing is ever evicted."""
        cache = self.bounded(policy, budget, tokens)
        cache.schedule = replace(cache.schedule, budget=max(budget, tokens))
        return cache

    def shown_layers(self) -> list[int]:
        """Layers to show, all of them with full attention.

        Raises:
            ValueError: a layer that there is not, or one with a window.
        """
        windows = describe(self.setup.model).spec.windows
        full = [layer for layer, window in enumerate(windows) if window is None]
        return _some(self.layers, full, "layers", "layers with full attention")

    def shown_heads(self) -> list[int]:
        """Key/value heads to show.

        Raises:
            ValueError: a head that there is not.
        """
        n = describe(self.setup.model).spec.n_kv_heads
        return _some(self.heads, list(range(n)), "heads", "key/value heads")

    def answer(self, members: list[Variant], folder: str = "") -> list[Row]:
        """Rows of every task, length and sample under each variant; what an earlier call has answered is not run again."""
        out = self.out / folder
        answer(Run(self.setup, self.tasks, members, self.lengths, self.samples, out))
        wanted = set(members)
        return [row for row in read_rows(out) if Variant(row.policy, row.heads, row.budget) in wanted]


def _some(asked: list[int], known: list[int], name: str, what: str, most: int = 4) -> list[int]:
    if unknown := sorted(set(asked) - set(known)):
        raise ValueError(f"{name}={unknown} must be among the {what}: {', '.join(map(str, known))}")
    chosen = np.linspace(0, len(known) - 1, min(most, len(known))).round().astype(int)
    return asked or [known[i] for i in chosen]


def varied(policy: str, **parts: str) -> str:
    """The policy in the grammar with some of its parts replaced, ``scope=""`` being none.

    >>> varied("tova", scope="sinks(4)")
    'score=ltas scope=sinks(4) allocation=uniform selection=top-k'
    """
    changed = {**parts_of(parse_policy(policy)), **parts}
    return " ".join(f"{name}={changed[name]}" for name in KINDS if changed.get(name))


def read(
    model: Any, ids: Sequence[int], cache: BoundedCache, after: Callable[[int], None] | None = None
) -> BoundedCache:
    """Read the text; ``after(tokens read)`` is called after every piece, evictions included."""
    with attach(model):
        prefill(model, ids, cache, (lambda done, total: after(done)) if after else None)
    return cache


def held(cache: BoundedCache, layer: int) -> list[np.ndarray]:
    """Positions that each key/value head of a layer holds now, ascending."""
    return [head.cpu().numpy() for head in cache.kept_positions(layer)[0]]


def chosen(cache: BoundedCache, layer: int, keep: int, stabilizers: int) -> list[np.ndarray]:
    """Positions that each head of a layer would hold if its policy cut it to ``keep`` slots now; nothing is evicted."""
    slots = slots_of(cache.context, layer, cache.bounded[layer], keep, min(stabilizers, keep))
    stay_HS = cache.policy.choose(slots)[0]
    return [position[stay].cpu().numpy() for position, stay in zip(slots.positions[0], stay_HS, strict=True)]


def scores(cache: BoundedCache, layer: int) -> Tensor:
    """Scores ``[H, S]`` that the policy gives the slots of a layer that holds its whole text."""
    rows = cache.bounded[layer]
    slots = slots_of(cache.context, layer, rows, rows.rows, cache.schedule.stabilizers)
    return cache.policy.score.score_slots(slots)[0]


@contextmanager
def last_hidden(model: Any) -> Iterator[dict[int, Tensor]]:
    """The hidden state ``[E]`` (float32) of the newest token after each layer of the forward before."""
    decoder, count = decoder_of(model), text_config(model).num_hidden_layers
    stacks = (child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count)
    found: dict[int, Tensor] = {}

    def remember(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            found[layer] = hidden[0, -1].detach().float().clone()

        return hook

    hooks = [block.register_forward_hook(remember(i)) for i, block in enumerate(next(stacks))]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class Recorded:
    """A score part that also keeps the scores with which tokens enter, ``entered[layer]``, pieces ``[H, T]``."""

    def __init__(self, score: Any) -> None:
        self._score = score
        self.entered: dict[int, list[Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._score, name)

    def score_new_tokens(self, entry: Any) -> Tensor | None:
        made = self._score.score_new_tokens(entry)
        if made is not None:
            self.entered.setdefault(entry.layer, []).append(made[0].detach().float().cpu())
        return made

    def all(self, layer: int) -> Tensor:
        """Scores ``[H, T]`` of every token so far."""
        return torch.cat(self.entered[layer], dim=-1)


def recorded(cache: BoundedCache) -> Recorded:
    """Let a fresh cache keep the scores with which tokens enter."""
    score = Recorded(cache.policy.score)
    cache.policy = replace(cache.policy, score=score)
    return score


class Watcher(Handler):
    """A handler that attends in full and shows each full-attention layer's queries ``[Q, T, D]`` and keys ``[H, T, D]`` as
    attention sees them."""

    def __init__(self, model: Any, tokens: int, see: Callable[[int, Tensor, Tensor, float], None]) -> None:
        description = describe(model)
        self.wants_unrotated = not isinstance(description.rotations, str)
        self.layers = description.spec.layers
        self.ropes = description.ropes(model, tokens) if self.wants_unrotated else None
        self.see = see

    def attend(self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax) -> Tensor:
        if self.ropes is not None:
            cos, sin = self.ropes[layer].tables(torch.arange(q_BQTD.shape[2], device=q_BQTD.device), q_BQTD.dtype)
            q_BQTD, k_BHTD = rotate(q_BQTD, cos, sin), rotate(k_BHTD, cos, sin)
        if self.layers[layer].window is None:
            self.see(layer, q_BQTD[0], k_BHTD[0], softmax.scaling)
        return attend_text(q_BQTD, k_BHTD, v_BHTD, softmax, self.layers[layer])


@torch.inference_mode()
def watch(model: Any, ids: Sequence[int], see: Callable[[int, Tensor, Tensor, float], None]) -> None:
    """One plain forward with ``see(layer, q, k, scaling)`` called in every layer with full attention."""
    watcher = Watcher(model, len(ids), see)
    with attach(model) as attached, attached.handled_by(watcher):
        model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)


def bin_edges(tokens: int, most: int = BINS) -> np.ndarray:
    """Edges of position bins of equal size (the last may be shorter), ``most`` bins at most."""
    step = -(-tokens // most)
    return np.append(np.arange(0, tokens, step), tokens)


def share_held(positions: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of each bin's positions that are among ``positions``."""
    return np.histogram(positions, edges)[0] / np.diff(edges)
