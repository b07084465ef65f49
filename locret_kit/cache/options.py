"""Options of a cache before its prompt and its model are known, and the arguments of each forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..backbones.decoder_attention import Arguments
from ..heads import RetainingHeads, loaded
from ..policies import Policy
from ..policies.capabilities import Subject, refuse
from ..policies.grammar import parse_policy
from ..settings import Resolved, RunSettings
from .due import Schedule
from .storage.codec import check_storage
from .view import check_reread


@dataclass(frozen=True)
class CacheOptions:
    """Settings, a policy, and its retaining heads."""

    settings: RunSettings
    policy: Policy
    heads: RetainingHeads | None
    """None where the policy needs none."""
    published: Mapping[str, object]
    """Settings that the heads were published with."""

    @classmethod
    def of(
        cls,
        settings: RunSettings | int | float | None,
        policy: str | Policy | None,
        heads: RetainingHeads | str | Path | None,
        given: Mapping[str, object],
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
        return cls(settings, policy, needed, published)

    def at(self, prompt_length: int | None) -> tuple[Resolved, Schedule]:
        """Settings and schedule of a prompt of ``prompt_length`` tokens. Raises ValueError where the prompt must be
        longer, shorter, or of known length."""
        if prompt_length is None:
            refuse("prompt of unknown length", Subject(self.policy))
        resolved = self.settings.resolved(self.published, prompt_length)
        schedule = Schedule.of(resolved, prompt_length)
        check_reread(self.policy, schedule)
        return resolved, schedule


# ---- what a forward over a cache must not be given -------------------------------------------------------------------


def checked_arguments(arguments: Arguments, seen: int, *, in_pieces: bool = True) -> Arguments:
    """The arguments of a forward that continues a cache, after ``seen`` tokens. Masks that a model with
    several parts has made for its decoder are left to the cache.

    Args:
        in_pieces: whether a text may be read in several forwards of more than one token.

    Raises:
        ValueError: padding, tokens that see later ones, other places in the text, or a second piece.
    """
    mask = arguments.get("attention_mask")
    # Backbones with several kinds of layers hand a mask for each: each is checked, and then left to the cache.
    if isinstance(mask, dict):
        for made in mask.values():
            _check_mask(made)
        arguments = {**arguments, "attention_mask": dict.fromkeys(mask)}
    elif _check_mask(mask):
        arguments = {**arguments, "attention_mask": None}
    ids = arguments.get("input_ids")
    new = arguments.get("inputs_embeds") if ids is None else ids
    if new is not None:
        _refuse_other_places(seen, new.shape[1], arguments.get("position_ids"))
        if not in_pieces and seen and new.shape[1] > 1:
            raise ValueError(
                f"{new.shape[1]} tokens after {seen}: layers of this backbone lose their state between pieces of a text, so give "
                "the whole prompt in one forward, without prefill_chunk_size"
            )
    return arguments


def _check_mask(mask: object) -> bool:
    """Whether a mask is one that a model has made for its decoder. Raises ValueError for padding, and for a mask that is not
    a text's."""
    if mask is None:
        return False
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask={shape}: a bounded cache is causal, it takes ones [batch, tokens] or none")
    if mask.dim() == 2:
        if mask.shape[1] > 1 and not bool(mask.all()):
            raise ValueError(
                f"attention_mask has {int((mask == 0).sum())} padded positions; a bounded cache takes one text, and a "
                "padded batch a BatchCache"
            )
        return False
    sees_TS = (mask if mask.dtype == torch.bool else mask == 0)[0, 0]
    T, S = sees_TS.shape
    later = torch.ones_like(sees_TS).triu_(S - T + 1)
    # What a query sees ends at its own token and has no gap: a text, in windows or not.
    gaps = sees_TS.long().diff(dim=1) == -1
    ends = torch.zeros_like(gaps)
    if S > 1:
        at_T = torch.arange(S - T, S, device=mask.device).clamp(max=S - 2)
        ends[torch.arange(T, device=mask.device), at_T] = True
    if bool((sees_TS & later).any()) or bool((gaps & ~ends).any()):
        raise ValueError(
            "attention_mask lets tokens see later ones, or hides some (an image, or padding): a bounded cache takes text"
        )
    return True


def _refuse_other_places(seen: int, tokens: int, position_ids: object) -> None:
    """New tokens must continue where the cache ends. Calling `generate` twice with the same text or with ``use_cache=False``
    violates this, and so do a packed text and an image, whose tokens have places in two dimensions."""
    if not tokens or (isinstance(position_ids, Tensor) and not position_ids.numel()):
        raise ValueError(f"no new tokens: this cache has seen {seen}, and generate takes those again before new ones")
    if not isinstance(position_ids, Tensor) or position_ids.dim() < 2:
        return
    # Compared with every row: of a model that reads images positions have three axes.
    places_T = torch.arange(seen, seen + tokens, device=position_ids.device)
    if position_ids.shape[-1] != tokens or not bool((position_ids == places_T).all()):
        first, last = int(position_ids.flatten()[0]), int(position_ids.flatten()[-1])
        raise ValueError(
            f"position_ids={first} to {last} must be {seen} to {seen + tokens - 1}, where this cache goes on: it takes one text, "
            "in order and once, without use_cache=False; another one needs reset() or a new cache"
        )
