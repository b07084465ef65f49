"""vLLM's block of memory that is a request's page."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import CircularBufferSpec

from ..cache.together import PageShape


@dataclass(frozen=True, kw_only=True)
class BoundedSpec(CircularBufferSpec):
    """One block a request. vLLM finds the manager of its base class, which claims a block when a request comes and no other."""

    @classmethod
    def of(cls, shape: PageShape) -> BoundedSpec:
        """The block that is such a page."""
        return cls(
            block_size=shape.rows, num_kv_heads=shape.heads, head_size=shape.head_dim, dtype=shape.dtype,
            state_content_bytes=shape.row_bytes, dcp_sharded=False,
        )  # fmt: skip

    def max_num_blocks_per_req(self, vllm_config: object, max_len: int) -> int:
        """The width of the block table: of one block, but vLLM's runner for CPUs computes the slots of all positions in it, and
        reads ``position // block_size``."""
        return int(cdiv(max_len, self.block_size))
