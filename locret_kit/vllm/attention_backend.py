"""vLLM's attention backend: append, attend and evict within a layer's forward, over pages of constant size; and the choice
between it and vLLM's own, for the engine that is being built.

An engine asks for it by the logits processor ``requests.Requests``.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.attention import backend as attention
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheLayout

from .measure import measure
from .pages import EnginePages, EngineStep, Turn
from .worker import NOBODY, State, is_bounded, worker_here


@dataclass(frozen=True, kw_only=True)
class BoundedSpec(CircularBufferSpec):
    """One block a request. vLLM finds the manager of its base class, which claims a block when a request comes and no other."""

    @classmethod
    def of(cls, pages: EnginePages) -> Self:
        """The block that is a page."""
        shape = pages.shape
        return cls(
            block_size=shape.rows, num_kv_heads=shape.heads, head_size=shape.head_dim, dtype=shape.dtype,
            state_content_bytes=shape.row_bytes, dcp_sharded=False,
        )  # fmt: skip

    def max_num_blocks_per_req(self, vllm_config: object, max_len: int) -> int:
        """The width of the block table: of one block, but vLLM's runner for CPUs computes the slots of all positions in it, and
        reads ``position // block_size``."""
        return int(cdiv(max_len, self.block_size))


class BoundedBackend(attention.AttentionBackend):
    """Attention of a bounded cache."""

    forward_includes_kv_cache_update = True  # vLLM writes no row by itself
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"  # vLLM looks it up in its own list

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[attention.MultipleOf]:
        return [attention.MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # the pages of a layer lie end to end

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == attention.AttentionType.DECODER)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: object) -> BoundedSpec:
        # The largest of all layers, as the model was measured; a layer with a window asks twice.
        measure(worker_here())
        return BoundedSpec.of(worker_here().pages)

    @staticmethod
    def get_impl_cls() -> type[attention.AttentionImpl]:
        return BoundedImpl

    @staticmethod
    def get_builder_cls() -> type[attention.AttentionMetadataBuilder]:
        return BatchBuilder


class BatchBuilder(attention.AttentionMetadataBuilder):
    """Builds the metadata that all layers of a forward share. Graphs are piecewise, and attention is between the pieces."""

    def __init__(
        self, kv_cache_spec: BoundedSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.worker = worker_here()
        if len(layer_names) != (layers := self.worker.pages.spec.n_layers):
            said = f"vLLM puts {len(layer_names)} of {layers} layers into a group of its caches"
            raise ValueError(f"{said}: a request would have a page in each")

    def build(
        self, common_prefix_len: int, common_attn_metadata: attention.CommonAttentionMetadata, fast_build: bool = False
    ) -> attention.AttentionMetadata:
        c = common_attn_metadata
        starts = c.query_start_loc_cpu.tolist()
        # Exact without speculative decoding; the lengths on the device would be waited for.
        known = c.seq_lens if c.seq_lens.device.type == "cpu" else c.seq_lens_cpu_upper_bound
        lengths, pages = known.tolist(), c.block_table_tensor[:, 0].tolist()
        turns, worker = [], self.worker
        for row, (start, end, length, page) in enumerate(zip(starts, starts[1:], lengths, pages, strict=False)):
            if end > start and page != NOBODY:
                turns.append(Turn(page, start, end, length - (end - start)))
                if length == end - start:
                    worker.pages.begin(page, worker.text(worker.requests[row]))
        return EngineStep(worker.pages, turns)


class BoundedImpl(attention.AttentionImpl):
    """Attention of one layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: object, sliding_window: int | None,
        kv_cache_dtype: str, logits_soft_cap: float | None = None, attn_type: str = attention.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, **rest: object,
    ) -> None:  # fmt: skip
        """Options of vLLM's attention layer; ``sinks`` has shape [Q]. Raises ValueError for an unknown option."""
        others = {"alibi_slopes": alibi_slopes, **rest}
        if unknown := [f"{name}={value}" for name, value in others.items() if value not in (None, False, 0, -1)]:
            raise ValueError(f"this model's attention has {', '.join(unknown)}, which a bounded cache has not")
        self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        self.softmax = scale, logits_soft_cap or None, sinks
        self.plain = not logits_soft_cap and sinks is None
        """Whether the softmax has a scaling alone."""
        self.shared = kv_sharing_target_layer_name is not None
        self.number = -1
        """Place of the layer in ``BackboneSpec.layers``."""

    def forward(
        self, layer: attention.AttentionLayer, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: attention.AttentionMetadata | None, output: Tensor, output_scale: object = None,
        output_block_scale: object = None,
    ) -> Tensor:  # fmt: skip
        """Attention of the new tokens, written to ``output``: zeros in a run that measures or warms up.

        Args:
            query: [T, Q, D]. key, value: [T, H, D]. output: [T, Q, D]. kv_cache: the layer's pages.
        """
        if attn_metadata is None:  # a run that measures or warms up
            if State.trace is not None:
                empty = query[:, :0]  # keys of a layer that reads another's
                State.trace[layer.layer_name] = query.clone(), (empty if key is None else key).clone()
            return output.zero_()
        attn_metadata.attend(self.number, query, key, value, kv_cache, self.softmax, output)
        return output


def __getattr__(name: str) -> type[attention.AttentionBackend]:
    """``OnCpu``: the attention of the engine that is being built. vLLM looks it up by this name."""
    if name != "OnCpu":
        raise AttributeError(name)
    if is_bounded():
        return BoundedBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
