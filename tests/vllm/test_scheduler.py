"""What vLLM's scheduler makes of one block a request, without a model: run it against a newer release before anything else.

``scripts/test_vllm.sh --probe`` with ``LOCRET_VLLM_VERSION``.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CacheConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheLayout, create_kv_cache_views
from vllm.v1.request import Request

from locret_kit.cache.pages import PageShape, RowPool
from locret_kit.vllm.attention_backend import BoundedSpec

LAYERS, BLOCKS, LONGEST = 30, 10, 131072
SHAPE = PageShape(3, 9, 64, 1024, torch.bfloat16, statistics=1, recent=4)
SPEC = BoundedSpec.of(SimpleNamespace(shape=SHAPE))


@pytest.fixture(scope="module")
def config():
    """Blocks of vLLM's own making, in as many bytes as that many pages have."""
    cache = CacheConfig(block_size=SHAPE.rows, enable_prefix_caching=False)
    cache.kv_cache_layout = "LBHNC"
    told = SimpleNamespace(
        cache_config=cache, scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        model_config=SimpleNamespace(
            max_model_len=LONGEST, original_max_model_len=LONGEST, supports_kv_cache_grouping=False
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, tensor_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=None, num_prefill_lookahead_tokens=0, max_in_flight_tokens=2048, kv_transfer_config=None,
    )  # fmt: skip
    layers = {f"model.layers.{i}.self_attn.attn": SPEC for i in range(LAYERS)}
    memory = BLOCKS * LAYERS * SHAPE.nbytes
    # From 0.33 on layers are grouped first.
    groups = [core.get_global_kv_cache_groups(told, [layers])] if hasattr(core, "get_global_kv_cache_groups") else []
    return core.get_kv_cache_configs(told, [layers], [memory], *groups)[0]


def manager(config, **rest) -> KVCacheManager:
    settings = dict(
        max_model_len=LONGEST, scheduler_block_size=SHAPE.rows, hash_block_size=SHAPE.rows, enable_caching=False
    )
    return KVCacheManager(config, max_in_flight_tokens=2048, **settings | rest)


def request(number: int, tokens: int = 100_000) -> Request:
    return Request(f"r{number}", list(range(tokens)), SamplingParams(max_tokens=4096), None)


def test_a_block_is_a_page(config):
    assert SPEC.page_size_bytes == SHAPE.nbytes and config.num_blocks == BLOCKS and len(config.kv_cache_groups) == 1
    tensor = config.kv_cache_tensors[0]
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    for view in create_kv_cache_views(raw, SPEC, BLOCKS, KVCacheLayout.LBHNC, tensor):
        assert RowPool(SHAPE, view, len(view)).keys.shape == (BLOCKS * 3 * 1024, 64)


def test_a_request_has_one_block_for_its_whole_life(config):
    pool, requests = manager(config), [request(i) for i in range(12)]
    admitted = [
        pool.allocate_slots(one, 512, full_sequence_must_fit=True, has_scheduled_reqs=False) for one in requests
    ]
    assert [blocks is not None for blocks in admitted] == [True] * 9 + [False] * 3  # block 0 is vLLM's own
    first = requests[0]
    (mine,) = pool.get_block_ids(first.request_id)
    assert len(mine) == 1
    for step in range(300):  # to the end of the prompt, and on
        first.num_computed_tokens += 512 if step < 195 else 1
        new = pool.allocate_slots(first, 512 if step < 194 else 1)
        assert new is not None and not any(new.blocks)
    assert pool.get_block_ids(first.request_id) == (mine,)
    pool.free(first)
    assert pool.allocate_slots(requests[9], 512, full_sequence_must_fit=True) is not None
