"""Memory of a server's caches: how many there are at most, and the bytes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..backbones.spec import BackboneSpec
from ..naming import show
from ..policies import Policy
from ..settings import Thoughts
from .backbone_sizes import ITEM_BYTES, BackboneSizes
from .inference_plan import Setting, cache_bytes, store_bytes


def refuse_unbounded(*policies: Policy) -> None:
    """Raise ValueError for a policy that evicts nothing."""
    for policy in policies:
        if policy.keeps_everything:
            raise ValueError(f"policy={policy.name!r} evicts nothing, so no number bounds a server's memory with it")


@dataclass(frozen=True)
class Caches:
    """The caches of a server.

    Attributes:
        each: bytes of one, that of the policy that needs most.
    """

    each: int
    sessions: int
    documents: int
    shared_prefixes: int
    stored: int = 0
    """Bytes of one's store in the host's memory, where evicted slots may come back."""
    per_session: int = 1

    @classmethod
    def of(
        cls, spec: BackboneSpec, setting: Setting, policies: Sequence[Policy], sessions: int, documents: int,
        shared_prefixes: int, thoughts: Thoughts = "evicted",
    ) -> Caches:  # fmt: skip
        """The caches of a server with such settings. If ``thoughts`` are dropped, a session has a second one, of the prefix that
        later prompts share.

        Raises:
            ValueError: a policy that evicts nothing, so that no number bounds its memory.
        """
        refuse_unbounded(*policies)
        settings = [replace(setting, policy=policy) for policy in policies]
        each = max(cache_bytes(spec, each) for each in settings)
        stored = max(store_bytes(spec, each) for each in settings)
        return cls(each, sessions, documents, shared_prefixes, stored, 1 + (thoughts == "dropped"))

    @property
    def count(self) -> int:
        return self.sessions * self.per_session + self.documents + self.shared_prefixes

    @property
    def bytes(self) -> int:
        """Bytes of all caches on the device."""
        return self.count * self.each

    def __str__(self) -> str:
        return (
            f"{self.sessions} sessions{' of two caches' if self.per_session > 1 else ''}, {self.documents} documents and "
            f"{self.shared_prefixes} shared prefixes: "
            f"{self.count} caches of {show(self.each)}, {show(self.bytes)}"
            + (f", and {show(self.count * self.stored)} of host memory for what they evict" if self.stored else "")
        )


def decoding_bytes(backbone: BackboneSizes, setting: Setting, sessions: int) -> int:
    """Bytes that ``sessions`` answers, decoded together, need in addition to those of a chunk. They are the hidden states of a
    token and its logits, in the model's dtype, and in float32 with their probabilities."""
    item = ITEM_BYTES[setting.dtype]
    return sessions * (3 * backbone.hidden * item + backbone.vocab * (item + 4 + 4))
