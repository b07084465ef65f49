"""Backbone, retaining heads and policy of the commands that answer: named first, loaded when all else is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..config.machine import Machine
    from ..heads import HeadsConfig, RetainingHeads
    from ..policies.base import Policy


@dataclass(frozen=True)
class Chosen:
    """What a run is made of; of the backbone the name alone."""

    backbone: str
    heads: RetainingHeads | None
    policy: Policy
    adapter: str | None
    warnings: tuple[str, ...]

    @property
    def config(self) -> HeadsConfig | None:
        """The heads' configuration."""
        return self.heads.config if self.heads is not None else None

    def load(self, machine: Machine) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The backbone and its tokenizer.

        Raises:
            ValueError, OSError: it cannot be loaded, or the heads have other shapes.
        """
        from ..backbones.families import spec_of, text_config
        from ..backbones.load import load_backbone

        model, tokenizer = load_backbone(
            self.backbone, dtype=machine.dtype, device=machine.device, adapter=self.adapter,
            weight_bits=machine.weight_bits,
        )  # fmt: skip
        if self.heads is not None:
            self.heads.check_backbone(spec_of(text_config(model)))
        return model, tokenizer


def choose(
    ckpt: str | None, model: str | None, adapter: str | None, policy: str | None, kv_bits: int | None = None
) -> Chosen:
    """Backbone, heads and policy by the names that a user gives: the heads name what he leaves open.

    Raises:
        ValueError, OSError: nothing is named, heads that cannot be read, an unknown policy, one that needs heads or does
            not store ``kv_bits``.
    """
    from ..backbones.load import choose_adapter, other_backbone
    from ..cache.storage.quantised import check_storage
    from ..heads import RetainingHeads
    from ..policies.grammar import parse_policy

    named = parse_policy(policy) if policy is not None else None
    if named is not None:
        check_storage(kv_bits, named)
        if named.needs_heads and not ckpt:
            raise ValueError(f"policy={named.name!r} needs retaining heads: give --ckpt")
    if not ckpt and not model:
        raise ValueError("give --ckpt (heads, which name their backbone) or --model")
    heads = RetainingHeads.from_pretrained(ckpt, backbone=model) if ckpt else None
    config = heads.config if heads else None
    chosen = named or parse_policy(config.policy if config else "streaming")
    check_storage(kv_bits, chosen)
    name = model or (config.backbone if config else "")
    adapter, warning = choose_adapter(config.adapter if config else None, adapter)
    other = other_backbone(config.backbone, name) if config else None
    return Chosen(name, heads, chosen, adapter, tuple(line for line in (warning, other) if line))
