"""Retaining heads: one small MLP a layer from a token's q, k, v (before RoPE) to its predicted importance.

Source: Locret, section 3.2. A head depends on one token alone, so a score is computed once, when the token enters.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from .backbones.families import BackboneSpec
from .cis import TARGETS

WORDS = ("positions", "policy")
"""The settings for inference that are words; the others are integers."""


@dataclass(frozen=True)
class HeadsConfig:
    """What a checkpoint says of its heads, its backbone and the settings it was made for."""

    backbone: str
    """Hub id (or path) of the backbone the heads were trained on."""
    model_type: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    activation: str
    d_hidden: int
    """Width of the hidden layer (d_R in the paper)."""
    target: str = "logit"
    """The unit of the scores: 'logit' (raw, pre-softmax) or 'log_prob'."""
    adapter: str | None = None
    """PEFT adapter on the backbone while the heads were trained."""
    inference: dict[str, Any] = field(default_factory=dict)
    """Settings used when the caller gives none: budget, chunk, stabilizers, local_len, positions, policy."""

    @classmethod
    def for_backbone(cls, spec: BackboneSpec, backbone: str, d_hidden: int, **rest: Any) -> HeadsConfig:
        """The configuration of heads of width ``d_hidden`` for a backbone."""
        dims = {
            k: getattr(spec, k) for k in ("model_type", "n_layers", "n_heads", "n_kv_heads", "head_dim", "activation")
        }
        return cls(backbone=backbone, d_hidden=d_hidden, **dims, **rest)

    @property
    def policy(self) -> str:
        """The policy that they were published with."""
        return self.inference.get("policy") or "locret"

    def check(self) -> None:
        """Raise ValueError naming the first field of another type, or out of its bound."""
        for name, kind in (("backbone", str), ("model_type", str), ("activation", str), ("inference", dict)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a {kind.__name__}")
        integers = {name: getattr(self, name) for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "d_hidden")}
        integers |= {
            f"inference.{name}": value
            for name, value in self.inference.items()
            if name not in WORDS and value is not None
        }
        for name, value in integers.items():
            low = 0 if name in ("inference.stabilizers", "inference.local_len") else 1
            if type(value) is not int or value < low:
                raise ValueError(f"{name}={value!r} must be an integer, at least {low}")
        words = {"adapter": self.adapter} | {f"inference.{name}": self.inference.get(name) for name in WORDS}
        for name, value in words.items():
            if not isinstance(value, (str, type(None))):
                raise ValueError(f"{name}={value!r} must be a name")
        if self.target not in TARGETS:
            raise ValueError(f"target={self.target!r} must be one of: {', '.join(TARGETS)}")

    def mismatches(self, spec: BackboneSpec) -> list[str]:
        """One line for each dimension in which a backbone is not the one the heads were made for."""
        names = ("model_type", "n_layers", "n_heads", "n_kv_heads", "head_dim")
        pairs = [(n, getattr(self, n), getattr(spec, n)) for n in names]
        return [f"{n}: heads have {mine}, the backbone has {theirs}" for n, mine, theirs in pairs if mine != theirs]

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, as ``config.json`` has them."""
        return asdict(self)


class RetainingHead(nn.Module):
    """``fc2(act(fc1([q; k; v])))`` without biases; ``[B, heads, T, D]`` inputs to predicted CIS ``[B, H, T]``."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear((config.n_heads + 2 * config.n_kv_heads) * config.head_dim, config.d_hidden, bias=False)
        self.fc2 = nn.Linear(config.d_hidden, config.n_kv_heads, bias=False)
        self.act = ACT2FN[config.activation]

    def forward(self, q_BQTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        x_BTE = torch.cat((q_BQTD, k_BHTD, v_BHTD), dim=1).transpose(1, 2).flatten(2)
        hidden = self.act(F.linear(x_BTE.to(self.fc1.weight.dtype), self.fc1.weight))
        return self.fc2(hidden).transpose(1, 2).float()


class RetainingHeads(nn.Module):
    """The heads of every layer of one backbone, with their configuration. ``heads[i]`` scores layer ``i``."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(RetainingHead(config) for _ in range(config.n_layers))

    def __getitem__(self, layer: int) -> RetainingHead:
        return self.layers[layer]  # type: ignore[return-value]

    def check_backbone(self, spec: BackboneSpec) -> None:
        """Raise ValueError naming every dimension in which ``spec`` is not the backbone of these heads."""
        if wrong := self.config.mismatches(spec):
            raise ValueError(f"these heads are for {self.config.backbone}: " + "; ".join(wrong))

    @classmethod
    def from_pretrained(
        cls,
        source: str,
        *,
        revision: str | None = None,
        backbone: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | None = None,
        local_files_only: bool = False,
    ) -> RetainingHeads:
        """Load from a folder, a ``.pt`` or published ``.bin`` file, or a Hub repository. See ``checkpoint.load_heads``."""
        from .checkpoint import load_heads

        return load_heads(
            source, revision=revision, backbone=backbone,
            token=token, cache_dir=cache_dir, local_files_only=local_files_only,
        )  # fmt: skip

    def save_pretrained(self, folder: str, dtype: torch.dtype | None = None) -> None:
        """Write ``model.safetensors`` and ``config.json`` into ``folder``, atomically; by default nothing is rounded."""
        from .checkpoint import save_heads

        save_heads(self, folder, dtype)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        commit_message: str = "Upload retaining heads",
        token: str | None = None,
        **facts: Any,
    ) -> str:
        """Publish as one commit with a model card, and return its address. ``facts``: see ``card.write_release``."""
        from .card import publish

        return publish(self, repo_id, private=private, message=commit_message, token=token, **facts)
