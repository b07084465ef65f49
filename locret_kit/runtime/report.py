"""Cost of a run: tokens, seconds, rows, bytes; and the origin of a report: hash of the heads, versions."""

import hashlib
import platform
from dataclasses import asdict, dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from locret_kernels import provenance as origin
from locret_kernels.provenance import peak_memory

from ..backbones.weight_bits import precision_of
from ..cache.bounded import BoundedCache
from ..cache.context import CacheCounters
from ..heads import RetainingHeads, state_of
from ..settings import Resolved


def weights_hash(heads: RetainingHeads) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the weights, as float32 in their published order and by name.

    Heads that were cast to a coarser dtype have another hash: take it as they are loaded.
    """
    digest = hashlib.sha256()
    for name, weight in state_of(heads, torch.float32).items():
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Versions of python, torch, transformers and locret_kit; of a checkout also its commit."""
    versions = {"python": platform.python_version(), **origin.versions("torch", "transformers", "locret_kit")}
    here = origin.commit(origin.ROOT)
    return {**versions, "commit": here} if here else versions


@dataclass(frozen=True)
class Report:
    """Figures of one prompt and its answer. Seconds are wall clock; scoring (the statistics of attention included),
    selecting and compacting are host time within them."""

    policy: str
    settings: Resolved
    prompt_tokens: int
    new_tokens: int
    prefill_s: float
    decode_s: float
    score_s: float
    select_s: float
    compact_s: float
    evictions: int
    evicted_rows: int
    kept_rows: list[int]
    """Rows of a key/value head (on average where heads differ) after prefill, per layer."""
    cache_bytes: int
    peak_bytes: int
    device: str
    dtype: str
    computed_share: float | None
    """Share of the prompt's attention that sparse prefill computed, 0 to 1; None where prefill was not sparse."""
    decoding: str
    """'cpu', 'graph', or 'dynamic' and why."""
    attention: str
    """Operator that read chunks of the prompt: 'sdpa' (PyTorch chooses), 'cpu' (the compiled call), or the one that a timed trial
    chose on a card: 'flash' with its implementation, or 'cudnn'."""
    versions: dict[str, str]
    host_bytes: int = 0
    """Bytes of evicted slots that are stored in the host's memory."""
    recall: dict[str, float] | None = None
    """Counters of what came back, see ``cache.stages``; None where nothing can."""
    read_before: int = 0
    """Tokens of the prompt that the cache held when it began, such as a document's."""

    @classmethod
    def of(
        cls, model: PreTrainedModel, cache: BoundedCache, *, prompt_tokens: int, new_tokens: int, prefill_s: float,
        decode_s: float, kept_rows: list[int], read_before: int, earlier: CacheCounters,
    ) -> Self:  # fmt: skip
        """Gather the figures of a finished run. ``earlier``: the cache's counters when it began."""
        c = cache.counters
        return cls(
            policy=cache.policy.name, settings=cache.settings, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
            prefill_s=prefill_s, decode_s=decode_s, kept_rows=kept_rows, read_before=read_before,
            score_s=c.score_s - earlier.score_s, select_s=c.select_s - earlier.select_s,
            compact_s=c.compact_s - earlier.compact_s,
            evictions=c.evictions, evicted_rows=c.evicted_rows, cache_bytes=cache.nbytes,
            peak_bytes=peak_memory(model.device), device=str(model.device), dtype=precision_of(model),
            computed_share=c.computed_share, decoding=c.decoding, attention=cache.context.attention, versions=versions(),
            host_bytes=cache.state.host_nbytes, recall=asdict(cache.context.recalls) if cache.policy.recall else None,
        )  # fmt: skip

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, of those that were read."""
        return (self.prompt_tokens - self.read_before) / max(self.prefill_s, 1e-9)

    @property
    def decode_rate(self) -> float:
        """New tokens a second."""
        return self.new_tokens / max(self.decode_s, 1e-9)

    def to_dict(self) -> dict[str, object]:
        """Fields of ``--report FILE.json``."""
        figures, rates = asdict(self), {"prefill_tok_s": self.prefill_rate, "decode_tok_s": self.decode_rate}
        return {**figures.pop("settings"), **figures, **rates}

    def lines(self) -> list[str]:
        """Lines for a person to read on stderr."""
        low, high = min(self.kept_rows), max(self.kept_rows)
        rows = f"{high}" if low == high else f"{low} to {high}"
        s = self.settings
        sparse = "" if self.computed_share is None else f"; {self.computed_share:.1%} of the attention computed"
        bits = f" ({s.kv_bits} bits)" if s.kv_bits else ""
        share = f" ({s.share} of the prompt)" if s.share else ""
        slots = f"budget {s.budget}{share}, chunk {s.chunk}, stabilizers {s.stabilizers}, local {s.local_len}"
        slots = "every slot kept" if low > s.budget else slots  # a budget without effect
        recall = []
        if (r := self.recall) is not None:
            recall = [
                f"recall: {r['stored_slots']} slots stored ({self.host_bytes / 2**20:.1f} MiB of host memory), {r['lookups']} "
                f"lookups brought {r['blocks']} blocks back, {r['hits']} of them were there, "
                f"{r['loaded_bytes'] / 2**20:.1f} MiB loaded; {r['recall_s']:.1f} s"
            ]
        attention = "" if self.attention in ("sdpa", "cpu") else f"; attention by {self.attention}"
        before = f" ({self.read_before} more were read before)" if self.read_before else ""
        return [
            f"prefill: {self.prompt_tokens - self.read_before} tokens{before} in {self.prefill_s:.1f} s "
            f"({self.prefill_rate:.0f} tok/s){sparse}; "
            f"decoding: {self.new_tokens} tokens in {self.decode_s:.1f} s ({self.decode_rate:.1f} tok/s){attention}",
            f"cache: {rows} rows a head and layer after prefill, {self.evictions} evictions, "
            f"{self.cache_bytes / 2**20:.1f} MiB of buffers{bits}; peak memory {self.peak_bytes / 2**20:.0f} MiB",
            f"policy {self.policy}: {slots}, {s.positions} positions; scoring {self.score_s:.1f} s, "
            f"selecting {self.select_s:.1f} s, compacting {self.compact_s:.1f} s",
            *recall,
        ]
