"""Retaining heads as a press of NVIDIA's kvpress, so that they run in its pipeline and stand on its leaderboard.

    from kvpress import AdaKVPress
    from locret_examples.press import LocretPress, arguments_for_kvpress

    press = AdaKVPress(LocretPress(compression_ratio=0.5, heads="user/heads"))
    with arguments_for_kvpress(model), press(model): ...

kvpress cuts a whole prompt once, with positions as they were; `BoundedCache` reads it chunk by chunk in a fixed budget. Scores
are the same: of ``locret``, and with ``lookahead=3`` of ``lookahead-locret``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from locret_kit.backbones.libraries import cache_among
from locret_kit.backbones.probe import describe
from locret_kit.backbones.spec import text_config
from locret_kit.cis import mean_of_next
from locret_kit.heads import RetainingHeads

INSTALL = "pip install datasets; pip install --no-deps kvpress==0.5.5 cachetools fire termcolor"
"""kvpress pins an older transformers, so it is installed without its dependencies."""

try:
    from kvpress import ScorerPress
except ModuleNotFoundError:

    @dataclass
    class ScorerPress:  # type: ignore[no-redef]
        """A stand-in for kvpress's class where kvpress is not installed: scores alone."""

        compression_ratio: float = 0.0

        def __call__(self, model: PreTrainedModel) -> object:
            raise ImportError(f"kvpress is missing: {INSTALL}")


@contextmanager
def arguments_for_kvpress(model: PreTrainedModel) -> Iterator[None]:
    """Hand later hooks of the attention layers what kvpress 0.5.5 asks for, ``past_key_values`` and ``cache_position``.

    transformers 5.24 calls the first ``cache`` and no longer hands on the second.
    """

    def add(module: nn.Module, args: tuple[object, ...], given: dict[str, Any], output: object) -> None:
        given.setdefault("past_key_values", cache_among(args, given))
        given.setdefault("cache_position", given["position_ids"].reshape(-1, given["hidden_states"].shape[1])[0])

    layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    hooks = [layer.register_forward_hook(add, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class LocretPress(ScorerPress):
    """A press that scores with retaining heads.

    Raises:
        ValueError: neither heads nor a name of some; ``stabilizers`` or ``lookahead`` below 0; a model that the heads do not fit.
    """

    heads: RetainingHeads | str | None = None
    """The heads, or their folder or Hub repository."""
    stabilizers: int = 0
    """The newest tokens, which are kept whatever their score; as Locret's local part of the cache."""
    lookahead: int = 0
    """Next tokens with whose scores a token's own is averaged."""

    def __post_init__(self) -> None:
        if hasattr(super(), "__post_init__"):
            super().__post_init__()
        if self.heads is None:
            raise ValueError("heads=... is missing: retaining heads, their folder or their Hub repository")
        for name in ("stabilizers", "lookahead"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Load the heads, and put them where the model is."""
        config, description = text_config(model), describe(model)
        if (unlike := description.unlike_llama) is not None:
            raise ValueError(
                f"model_type={config.model_type!r}: kvpress's hooks see no queries before RoPE there: {unlike}"
            )
        if not isinstance(self.heads, RetainingHeads):
            self.heads = RetainingHeads.from_pretrained(str(self.heads), backbone=config.name_or_path or None)
        self.heads.check_backbone(description.spec)
        self.heads.to(device=model.device).requires_grad_(False)

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, object],
    ) -> Tensor:
        """Scores ``[B, H, T]`` of hidden states ``[B, T, E]`` and values ``[B, H, T, D]``; keys are those after RoPE and are left
        aside."""
        if not isinstance(self.heads, RetainingHeads):
            raise ValueError(f"heads={self.heads!r} are not loaded: use `with press(model): ...`")
        with torch.no_grad():
            q_BQTD, k_BHTD = before_rope(module, hidden_states, self.heads.config.n_kv_heads)
            score_BHT: Tensor = self.heads[int(module.layer_idx)](q_BQTD, k_BHTD, values)  # type: ignore[arg-type]
        T = score_BHT.shape[-1]
        score_BHT = mean_of_next(score_BHT, torch.arange(T, device=score_BHT.device), self.lookahead)
        score_BHT[..., T - min(self.stabilizers, T) :] = torch.inf
        return score_BHT


def before_rope(module: Any, hidden_BTE: Tensor, n_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Queries ``[B, Q, T, D]`` and keys ``[B, H, T, D]`` of an attention layer before RoPE, after its norms if it has them."""
    D = module.head_dim
    if hasattr(module, "qkv_proj"):
        joined = module.qkv_proj(hidden_BTE)
        width = joined.shape[-1] - 2 * n_kv_heads * D
        q, k = joined[..., :width], joined[..., width : width + n_kv_heads * D]
    else:
        q, k = module.q_proj(hidden_BTE), module.k_proj(hidden_BTE)
    q, k = q.unflatten(-1, (-1, D)), k.unflatten(-1, (-1, D))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    return q.transpose(1, 2), k.transpose(1, 2)
