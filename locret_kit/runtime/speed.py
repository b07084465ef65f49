"""Speed of a run, predicted from the operations that it launches: those of a layer's steady prefill chunk and of a decoded
token, recorded on PyTorch's meta device at the model's real sizes, each with its floating-point operations and bytes.

The floor is what the card's ceilings allow: a prefill's products and attention at the matmul ceiling; a token's weights,
keys and values at the copy ceiling. A prediction adds up, operation by operation, the longest of its time computing, its
time moving bytes, and the smallest kernel's (``cards``). Launches overlap with work, so the host is not counted: graphs
decode, and a chunk's kernels take longer than their launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ..backbones.intercept import attach
from ..backbones.releases import forward
from ..backbones.spec import decoder_of, spec_of
from ..backbones.weight_bits import gguf_types
from ..cache.bounded import BoundedCache
from ..cache.storage.packing import BITS
from ..heads import HeadsConfig, RetainingHeads
from ..planning.backbone_sizes import ITEM_BYTES, BackboneSizes
from ..planning.cards import Card
from ..planning.inference_plan import Setting
from .graph_decoder import GraphDecoder
from .launches import PARTS, Operation, Recorder


@dataclass(frozen=True)
class Recorded:
    """Launches of one layer, and of a whole decoded token."""

    chunk: tuple[Operation, ...]
    """Launches of one layer, in a prefill chunk that begins with a full cache."""
    token: tuple[Operation, ...]
    """Launches of one layer, for a decoded token."""
    around: tuple[Operation, ...]
    """Launches outside of the layers, for a decoded token."""
    waits: tuple[str, ...]
    """Places at which the host would wait for the device."""


def record(config: PretrainedConfig, setting: Setting) -> Recorded:
    """The operations of a layer at a full cache, of a model without memory for it.

    Raises:
        BackendUnavailable: Triton is not installed, whose kernels are recorded.
        ValueError: a setting whose kernels' work is not known here, or cannot be decoded as a graph.
    """
    policy = setting.policy
    unknown = {
        f"dtype={setting.dtype}": setting.dtype == "float32",
        f"weight_bits={setting.weight_bits}": setting.weight_bits is not None,
        f"weights of {gguf_types(config)}": gguf_types(config) is not None,
        f"kv_bits={setting.run.kv_bits}": setting.run.kv_bits in BITS,
        f"policy={policy.name}": policy.keeps_everything or policy.ragged or bool(policy.statistics - {"count"})
        or policy.recent(setting.chunk) > 0 or policy.merge is not None or policy.needs_logits,
    }  # fmt: skip
    if wrong := [name for name, is_unknown in unknown.items() if is_unknown]:
        raise ValueError(
            f"{', '.join(wrong)}: speed is predicted for policies that score as tokens enter, in half precision"
        )
    from locret_kernels.backend import function

    function("attend", "triton")
    from locret_kernels import common

    small = deepcopy(config)
    small.num_hidden_layers = 2  # the second one makes no tables that all layers share
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:2]
    spec, dtype = spec_of(small), getattr(torch, setting.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small, dtype=dtype, attn_implementation="sdpa")
        heads = RetainingHeads(HeadsConfig.for_backbone(spec, "recorded", setting.width)) if setting.width else None
    model.eval().requires_grad_(False)
    run, chunk = replace(setting.run, backend="triton", one_shot=False), setting.chunk
    tokens = (ceil(setting.budget / chunk) + 2) * chunk
    recorder = Recorder()
    with common.recorded(recorder.launch), recorder, torch.no_grad(), attach(model):
        cache = BoundedCache(run, setting.policy, heads, prompt_length=tokens)
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
        with _layers(model, recorder):
            for start in range(0, tokens, chunk):
                recorder.inside = "chunk" if start == tokens - 2 * chunk else ""
                forward(model, ids[:, start : start + chunk], cache, logits_to_keep=1)
            decoder = GraphDecoder(model, cache)
            recorder.rows = cache.kept_rows[1]
            recorder.inside, recorder.where = "token", "around"
            decoder([cache], [0])
    made = recorder.made
    return Recorded(tuple(made["chunk"]), tuple(made["token"]), tuple(made["around"]), tuple(recorder.waits))


@contextmanager
def _layers(model: PreTrainedModel, recorder: Recorder) -> Iterator[None]:
    """Operations of the second layer go where ``inside`` says; those of the first one, which also makes what layers share,
    nowhere."""
    outside = ""

    def enter(layer: int, *call: object) -> None:
        nonlocal outside
        outside, recorder.where = recorder.where, recorder.inside if layer else ""

    def leave(*call: object) -> None:
        recorder.where = outside

    with ExitStack() as stack:
        for i, layer in enumerate(decoder_of(model).layers):
            stack.callback(layer.register_forward_pre_hook(partial(enter, i)).remove)
            stack.callback(layer.register_forward_hook(leave).remove)
        yield


@dataclass(frozen=True)
class Speed:
    """A prediction for one card. Seconds."""

    card: Card
    setting: Setting
    layers: int
    recorded: Recorded
    token_floor: float

    @property
    def chunk_floor(self) -> float:
        """Floor of a layer's steady chunk: its products and attention at the matmul ceiling."""
        return sum(x.flops for x in self.recorded.chunk) / self.card.matmul

    @property
    def chunk(self) -> float:
        """Seconds of a layer's steady chunk."""
        return self._sum(self.recorded.chunk)

    @property
    def newer_chunk(self) -> float | None:
        """Seconds of a layer's steady chunk with FlashAttention-3; None where the card has none."""
        card = self.card
        return None if card.newer is None else replace(self, card=replace(card, attention=card.newer)).chunk

    @property
    def token(self) -> float:
        """Seconds of a decoded token at a full cache, as a CUDA graph."""
        return self.layers * self._sum(self.recorded.token) + self._sum(self.recorded.around)

    def _sum(self, operations: tuple[Operation, ...]) -> float:
        return sum(x.seconds(self.card) for x in operations)

    def lines(self) -> list[str]:
        """A table for people."""

        def share(floor: float, seconds: float) -> str:
            return f"floor {1e3 * floor:.3g} ms, predicted {1e3 * seconds:.3g} ms: {100 * floor / seconds:.0f}% of the floor"

        rate = self.setting.chunk / (self.layers * self.chunk)
        newer = [] if self.newer_chunk is None else [
            f"  {share(self.chunk_floor, self.newer_chunk)}, with FlashAttention-3 installed"
        ]  # fmt: skip
        return [
            f"{self.card.name}, predicted and not measured: {self.setting}",
            f"a prefill chunk of {self.setting.chunk} tokens over a full cache, one of {self.layers} layers: "
            f"{len(self.recorded.chunk)} launches",
            *self._parts(self.recorded.chunk),
            f"  {share(self.chunk_floor, self.chunk)}; {rate:,.0f} tokens/s",
            *newer,
            f"a decoded token over a full cache, as a graph, one of {self.layers} layers: {len(self.recorded.token)} launches",
            *self._parts(self.recorded.token),
            f"  the whole token: {share(self.token_floor, self.token)}; {1 / self.token:,.0f} tokens/s",
        ]  # fmt: skip

    def _parts(self, operations: tuple[Operation, ...]) -> list[str]:
        by_part = {part: tuple(x for x in operations if x.part == part) for part in PARTS}
        return [
            f"  {part:<27} {1e3 * self._sum(group):8.3f} ms {len(group):4} launches"
            for part, group in by_part.items()
            if group
        ]


def bytes_read(backbone: BackboneSizes, tied: bool, dtype: str, rows: int, kv_bits: int | None = None) -> int:
    """Bytes that a decoded token must read: the weights, of input embeddings one row at most, and keys and values."""
    spec, table = backbone.spec, 0 if tied else backbone.vocab * backbone.hidden
    numbers, item = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * rows, ITEM_BYTES[dtype]
    return item * (backbone.parameters - table) + numbers * (kv_bits or 8 * item) // 8


def predict(config: PretrainedConfig, setting: Setting, card: Card, recorded: Recorded | None = None) -> Speed:
    """The speed of a run on a card. ``recorded`` spares recording again for another card."""
    backbone = BackboneSizes.of(config)
    least = bytes_read(backbone, config.tie_word_embeddings, setting.dtype, setting.budget, setting.run.kv_bits)
    return Speed(card, setting, backbone.spec.n_layers, recorded or record(config, setting), least / card.copy)
