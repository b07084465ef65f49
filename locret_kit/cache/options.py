"""Options of a cache before its prompt and its model are known, and the arguments of each forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..backbones.handlers import Arguments
from ..backbones.spec import text_config
from ..heads import RetainingHeads, loaded
from ..policies import Policy
from ..policies.capabilities import Subject, refuse
from ..policies.grammar import parse_policy
from ..settings import Resolved, RunSettings
from .context import Context, Stage
from .due import Schedule
from .storage.codec import check_storage


@dataclass(frozen=True)
class CacheOptions:
    """Settings, a policy, and its retaining heads."""

    settings: RunSettings
    policy: Policy
    heads: RetainingHeads | None
    """None where the policy needs none."""
    published: Mapping[str, object]
    """Settings that the heads were published with."""
    stages: tuple[Stage, ...] = ()
    """Further stages, after those of the policy."""

    @classmethod
    def of(
        cls,
        settings: RunSettings | int | float | None,
        policy: str | Policy | None,
        heads: RetainingHeads | str | Path | None,
        given: Mapping[str, object],
        stages: Sequence[Stage] = (),
    ) -> CacheOptions:
        """Options as ``BoundedCache`` takes them. Raises as it does."""
        heads = loaded(heads)
        # Heads name the policy that they were measured with.
        if policy is None:
            policy = heads.config.policy if heads is not None else "locret"
        if isinstance(policy, str):
            policy = parse_policy(policy)
        twice = given if isinstance(settings, RunSettings) else given.keys() & {"budget"}
        if settings is not None and twice:
            raise ValueError(f"{', '.join(twice)}: given twice, by settings and by name")
        if not isinstance(settings, RunSettings):
            settings = RunSettings.of(given if settings is None else {"budget": settings, **given})
        needed = policy.heads_for(heads)
        # Refused here and not at the first forward: a model takes minutes to load.
        check_storage(settings.kv_bits, policy)
        published = heads.config.inference if heads is not None else {}
        return cls(settings, policy, needed, published, tuple(stages))

    def at(self, prompt_length: int | None) -> tuple[Resolved, Schedule]:
        """Settings and schedule of a prompt of ``prompt_length`` tokens. Raises ValueError where the prompt must be
        longer, shorter, or of known length."""
        if prompt_length is None:
            refuse("prompt of unknown length", Subject(self.policy))
        resolved = self.settings.resolved(self.published, prompt_length)
        schedule = Schedule.of(resolved, prompt_length)
        check_reread(self.policy, schedule)
        return resolved, schedule


def check_reread(policy: Policy, schedule: Schedule) -> None:
    """Raise ValueError where the prompt's end cannot be read twice as the policy asks; names setting and bound."""
    if policy.reread is None:
        return
    name, s = f"policy={policy.name!r}", schedule
    if s.one_shot:
        raise ValueError(f"{name} reads the prompt's last tokens twice: one_shot=True holds none of them back")
    if s.prompt_length is None:
        raise ValueError(f"{name} reads the end of the prompt twice: pass prompt_length=")
    if not 1 <= s.local_len <= s.chunk:
        raise ValueError(
            f"{name} reads the prompt's last local_len={s.local_len} tokens twice: from 1 to chunk={s.chunk} of them"
        )


def loses_state(tokens: int, seen: int) -> str:
    """The refusal of further tokens where layers of the backbone lose their state between pieces of a text."""
    return (
        f"{tokens} tokens after {seen}: layers of this backbone lose their state between pieces of a text, so give "
        "the whole prompt in one forward, without prefill_chunk_size"
    )


def checked_arguments(arguments: Arguments, ctx: Context, seen: int, rows: int) -> Arguments:
    """The arguments of a forward that continues a cache, after ``seen`` tokens of which it holds ``rows``. A mask that
    shows what the cache shows is left to it.

    Raises:
        ValueError: a mask other than the cache's own, other places in the text, or a second piece where a backbone takes one.
    """
    ids = arguments.get("input_ids")
    new = arguments.get("inputs_embeds") if ids is None else ids
    if new is None:
        return arguments
    tokens, mask = new.shape[1], arguments.get("attention_mask")
    # Backbones with several kinds of layers take a mask for each, by its name.
    masks, kinds = {None: mask}, dict[int, str]()
    if isinstance(mask, dict):
        masks, kinds = mask, dict(enumerate(getattr(text_config(ctx.model), "layer_types", None) or ()))
    for given in masks.values():
        if isinstance(given, Tensor) and given.dim() == 2 and not bool(given.all()):
            raise ValueError(
                f"attention_mask has {int((given == 0).sum())} padded positions; a bounded cache takes one text, and a "
                "padded batch a BatchCache"
            )
    _refuse_other_places(seen, tokens, arguments.get("position_ids"))
    ctx.description.check_places(seen + tokens)
    if not ctx.description.in_pieces and seen and tokens > 1:
        raise ValueError(loses_state(tokens, seen))
    for kind, given in masks.items():
        if given is None:
            continue
        dims = given.dim() if isinstance(given, Tensor) else 0
        if dims == 4:
            own = [one for one in ctx.spec.layers if (of := kinds.get(one.index)) == kind or of not in masks]
            for window, chunked in dict.fromkeys((layer.window, layer.chunked) for layer in own):
                _refuse_other_mask(given, seen, tokens, rows, window, chunked)
        elif dims != 2 or given.shape[1] < seen + tokens:
            shape = list(given.shape) if dims else type(given).__name__
            raise ValueError(
                f"attention_mask={shape}: a bounded cache is causal, it takes ones {[1, seen + tokens]} or none"
            )
    if isinstance(mask, dict):
        return {**arguments, "attention_mask": dict.fromkeys(mask)}
    return arguments if mask is None or dims == 2 else {**arguments, "attention_mask": None}


def _refuse_other_mask(mask: Tensor, seen: int, tokens: int, rows: int, window: int | None, chunked: bool) -> None:
    """Raise ValueError unless a mask ``[B, H, T, S]`` shows every token what a layer of the cache shows it. Columns are all
    tokens of the text or, in a mask that a model has made, as many of the newest as the cache has rows."""
    columns, known = mask.shape[3], mask.dtype == torch.bool or mask.is_floating_point()
    if mask.shape[2] != tokens or columns not in (seen + tokens, rows + tokens) or not known:
        shape = [1, 1, tokens, seen + tokens]
        raise ValueError(f"attention_mask={list(mask.shape)} of {mask.dtype} must be {shape} of bool or float")
    at_S = torch.arange(seen + tokens - columns, seen + tokens, device=mask.device)
    at_T1 = at_S[-tokens:, None]
    sees_TS = at_S <= at_T1
    if window is not None:
        sees_TS &= at_S >= (at_T1 // window * window if chunked else at_T1 - window + 1)
    # Below -1e4 a softmax gives exactly 0.
    same = mask == sees_TS if mask.dtype == torch.bool else torch.where(sees_TS, mask == 0, mask <= -1e4)
    if not bool(same.all()):
        at = same.logical_not().nonzero()[0].tolist()
        sees = "all up to itself" if window is None else f"{'its chunk of' if chunked else 'the newest'} {window}"
        raise ValueError(
            f"attention_mask{at}={mask[tuple(at)].item()}: in this cache a token sees {sees}, so it takes no other "
            "mask (packed texts, images, padding)"
        )


def _refuse_other_places(seen: int, tokens: int, position_ids: object) -> None:
    """New tokens must continue where the cache ends. Calling `generate` twice with the same text or with ``use_cache=False``
    violates this, and so do a packed text and an image, whose tokens have places in two dimensions."""
    if not tokens or (isinstance(position_ids, Tensor) and not position_ids.numel()):
        raise ValueError(f"no new tokens: this cache has seen {seen}, and generate takes those again before new ones")
    if not isinstance(position_ids, Tensor):
        return
    # Compared with every row: of a model that reads images positions have three axes.
    places_T = torch.arange(seen, seen + tokens, device=position_ids.device)
    if position_ids.shape[-1:] != (tokens,) or not bool((position_ids == places_T).all()):
        first, last = int(position_ids.flatten()[0]), int(position_ids.flatten()[-1])
        raise ValueError(
            f"position_ids={first} to {last} must be {seen} to {seen + tokens - 1}, where this cache goes on: it takes one text, "
            "in order and once, without use_cache=False; another one needs reset() or a new cache"
        )
