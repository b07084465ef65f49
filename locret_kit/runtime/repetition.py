"""KVzip, the unbounded oracle: it scores slots by the backbone's attention while it repeats the context word for
word.

The whole context is read with full attention and kept. Then the backbone is asked to repeat it, chunk by chunk. A
slot's score is the most attention that any query of that repetition pays to it. It costs about three prefills, and a
cache of the whole context. It shows the best that an eviction could know. It is not a bounded method, so compare only
its scores.

Source: KVzip, arXiv 2505.23416, section 3.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from locret_kernels.backend import choose, function

from ..backbones.handlers import Handler, LayerInput, Softmax
from ..backbones.intercept import attach
from ..backbones.rope import rotate
from ..cache.bounded import BoundedCache
from ..cache.storage.codec import Plain
from ..cache.storage.layouts import RaggedRows
from ..cache.storage.rows import BoundedLayer
from ..policies import Policy
from ..policies.base import TopK, rank_of
from ..policies.methods.streaming import Recency
from ..settings import Resolved, read_protect
from ..text.template import render_prompt
from .session import prefill

CHUNK = 2048
"""Context tokens that one request asks to repeat."""
OVERLAP = 8
"""Tokens before a chunk that its request quotes."""
SINKS = 4
"""First tokens of the context, kept at any score."""
ALL = "\n\nRepeat the previous context exactly."
PART = "\n\nRepeat the part of the previous context exactly, starting with "
POLICY = Policy("kvzip", Recency(), (), TopK(), source="KVzip, arXiv 2505.23416", keeps_everything=True)


def requests(
    encode: Callable[[str], list[int]], context: Sequence[int], suffix: str = "\n"
) -> Iterator[tuple[int, int, list[int]]]:
    """First and last + 1 position of each chunk, and its request's token ids, the repetition included. ``suffix`` stands
    between the two: of a chat model, the template from the end of a user's turn to the assistant's first word."""
    for start in range(0, len(context), CHUNK):
        asked = encode(PART) + list(context[start - OVERLAP : start]) if start else encode(ALL)
        stop = min(start + CHUNK, len(context))
        yield start, stop, asked + encode(suffix) + list(context[start:stop])


def most_attention(q_BQTD: Tensor, k_BHND: Tensor, sinks: int, scaling: float) -> Tensor:
    """The most attention ``[B, H, N - sinks - T]`` (float32) that one of ``T`` queries, in any head of the group, pays to a
    slot. ``k``: ``sinks`` first slots, the chunk's slots, and the queries' own ``T`` (causal). As published, the softmax
    runs over these and not over the rest of the context."""
    T, N = q_BQTD.shape[2], k_BHND.shape[2]
    sees_T = torch.arange(N - T, N, device=q_BQTD.device)
    column_max = function("column_max", choose(None, q_BQTD.device, q_BQTD.shape[-1], q_BQTD.dtype))
    return column_max(q_BQTD, k_BHND, sees_T, scaling, log_prob=True)[..., sinks : N - T].exp()


class Repetition(Handler):
    """Handler of one request: full attention through the cache, whose slots ``start`` to ``stop`` are scored meanwhile."""

    def __init__(self, cache: BoundedCache, start: int, stop: int) -> None:
        self.cache, self.start, self.stop = cache, start, stop
        self.wants_unrotated = cache.handler.wants_unrotated
        self.scores: list[Tensor] = []
        """``[B, H, stop - start]``, per layer."""

    def attend(
        self, layer: int, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, softmax: Softmax, x: LayerInput = None
    ) -> Tensor:
        out = self.cache.handler.attend(layer, q_BQTD, k_BHTD, v_BHTD, softmax, x)
        rows, T, sinks = self.cache.bounded[layer].rows, q_BQTD.shape[2], min(SINKS, self.start)
        read = [torch.arange(*span, device="cpu") for span in ((0, sinks), (self.start, self.stop), (rows - T, rows))]
        index_N = torch.cat(read).to(q_BQTD.device)
        k_BHND = self.cache.bounded[layer].slots("keys")[:, :, index_N]
        if self.cache.context.ropes is not None:  # nothing is evicted yet, so a slot's rank is its position
            keys, queries = self.cache.context.ropes[layer].both_tables(index_N, q_BQTD.dtype)
            q_BQTD = rotate(q_BQTD, *(table[-T:] for table in queries))
            if self.cache.context.positions.span is not None:
                k_BHND = rotate(k_BHND, *keys)
        self.scores.append(most_attention(q_BQTD, k_BHND, sinks, softmax.scaling))
        return out


@dataclass(frozen=True)
class KVzip:
    """The oracle with one prompt's settings. It reads all of the prompt but the last ``local_len`` tokens, and keeps
    ``budget - local_len`` of their slots. The other tokens count against the budget and are kept.

    Args:
        joint: whether all heads and layers share the slots by score, as published, in whole rows a head on a layer's
            average. Otherwise every head of every layer keeps the same number.

    Raises:
        ValueError: settings that it cannot meet; names setting and bound.
    """

    settings: Resolved
    joint: bool = False

    def __post_init__(self) -> None:
        settings, least = self.settings, self.settings.local_len + SINKS
        name = "kvzip(joint=true)" if self.joint else "kvzip"
        asked = {"kv_bits": settings.kv_bits, "one_shot": settings.one_shot, "protect": read_protect(settings.protect)}
        if given := [option for option, value in asked.items() if value]:
            raise ValueError(f"policy={name} stores what it keeps as it is, in one form: leave {given[0]} out")
        if settings.budget <= least:
            raise ValueError(
                f"policy={name}, budget={settings.budget}: must be above {least}: local_len={least - SINKS} and {SINKS} sinks"
            )

    @torch.inference_mode()
    def read(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, chat: bool = False
    ) -> BoundedCache:
        """A cache of the best slots of a prompt's context. An ``Answer`` continues from it with the whole prompt.

        Args:
            chat: the prompt is a rendered chat template, so the context is repeated in the assistant's turn.

        Raises:
            ValueError: a prompt without context; a backbone with windowed layers.
        """
        settings, tail = self.settings, self.settings.local_len
        if tail >= len(ids):
            raise ValueError(f"the prompt's {len(ids)} tokens must be above local_len={tail}")
        context = ids[: len(ids) - tail]
        # between a request and its answer: of a template, from the end of a user's turn to the assistant's first word
        suffix = render_prompt(tokenizer, "")[1].removeprefix("\n\n") if chat else "\n"
        asked = list(requests(partial(tokenizer.encode, add_special_tokens=False), context, suffix))
        longest, scores = max(len(request) for _, _, request in asked), []
        cache = BoundedCache(settings.budget, POLICY, prompt_length=len(ids) + longest, positions=settings.positions)
        with attach(model) as attached:
            prefill(model, context, cache)
            if any(rows.window is not None for rows in cache.bounded):
                raise ValueError("kvzip repeats the context with full attention: this backbone has windowed layers")
            for start, stop, request in asked:
                repetition, seen = Repetition(cache, start, stop), cache.get_seq_length()
                request_1T = torch.tensor([request], device=model.device)
                place_1T = torch.arange(seen, seen + len(request), device=model.device)[None]
                with attached.handled_by(repetition):
                    attached.model(request_1T, position_ids=place_1T, use_cache=False, logits_to_keep=1)
                for rows in cache.bounded:
                    rows.count(-len(request))  # the request is taken back
                scores.append(torch.stack(repetition.scores))
        compress(cache, torch.cat(scores, -1), settings.budget - tail, self.joint)
        state = cache.state
        state.settings = replace(settings, chunk=CHUNK, stabilizers=0)  # what rows then say
        state.schedule = replace(state.schedule, chunk=CHUNK, stabilizers=0, local_len=tail, prompt_length=len(ids))
        state.change_context(schedule=state.schedule)  # in which nothing more is evicted
        return cache


def shares(scores_LBHS: Tensor, keep: int) -> list[int]:
    """Slots a head keeps on average in each layer, when the best ``L * H * keep`` of all layers stay; they sum to
    ``L * keep``: layers are rounded down, and those that lose most by it get one more."""
    L, _, H, S = scores_LBHS.shape
    best = scores_LBHS.flatten().argsort(descending=True, stable=True)[: scores_LBHS.numel() // S * keep]
    count_L = (best // (scores_LBHS.numel() // L)).bincount(minlength=L) // scores_LBHS.shape[1]
    share_L = count_L // H
    share_L[(count_L % H).argsort(descending=True, stable=True)[: L * keep - int(share_L.sum())]] += 1
    return share_L.tolist()


def compress(cache: BoundedCache, scores_LBHS: Tensor, keep: int, joint: bool) -> None:
    """Keep the best slots of every layer and head, the sinks first."""
    if scores_LBHS.shape[-1] <= keep:
        return
    scores_LBHS[..., :SINKS] = 2.0  # above every attention weight
    means = shares(scores_LBHS, keep) if joint else [keep] * len(scores_LBHS)
    for i, (score_BHS, mean) in enumerate(zip(scores_LBHS, means, strict=True)):
        rows, (B, H, S) = cache.bounded[i], score_BHS.shape
        pool = score_BHS.reshape(B, 1, H * S) if joint else score_BHS
        none = torch.zeros_like(pool, dtype=torch.bool)
        stay_BHS = (rank_of(pool, none, ~none) < (H * mean if joint else mean)).view(B, H, S)
        if joint:
            ragged = BoundedLayer(RaggedRows(rows.capacity), Plain())
            keys, values = rows.slots("keys"), rows.slots("values")
            ragged.lazy_initialization(keys, values)
            ragged.append(keys, values, rows.slots("scores"))
            ragged.number = i
            cache.layers[i] = rows = ragged
        rows.keep(stay_BHS, mean)
