"""Interfaces of vLLM that the kit uses: names outside its public interface, each with its probe. A release with all of them is
taken. ``scripts/test_vllm.sh --probe`` checks that its scheduler still gives a request one page.
"""

import inspect
from collections.abc import Iterator
from importlib import import_module

ATTENTION = "vllm.v1.attention.backend"
CACHES = "vllm.v1.kv_cache_interface"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
PROCESSOR = "vllm.v1.sample.logits_processor"
LAYERS = "vllm.model_executor.layers"
REGISTRY = "vllm.v1.attention.backends.registry"
INTERFACES = (
    # Attention within a layer's forward, and what a forward has in all of them.
    (ATTENTION, "AttentionBackend.customize_spec", ("spec",)),
    (ATTENTION, "AttentionBackend.get_impl_cls", ()),
    (ATTENTION, "AttentionBackend.get_builder_cls", ()),
    (ATTENTION, "AttentionBackend.supported_kv_cache_layouts", ()),
    (ATTENTION, "AttentionBackend.forward_includes_kv_cache_update", ()),
    (ATTENTION, "AttentionImpl.forward", ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")),
    (ATTENTION, "AttentionMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata", "fast_build")),
    (ATTENTION, "CommonAttentionMetadata", ("query_start_loc_cpu", "seq_lens", "block_table_tensor")),
    (REGISTRY, "register_backend", ("backend", "class_path")),
    (REGISTRY, "AttentionBackendEnum.CPU_ATTN", ()),
    (REGISTRY, "AttentionBackendEnum.CUSTOM", ()),
    # One block a request.
    (CACHES, "CircularBufferSpec", ("block_size", "num_kv_heads", "head_size", "dtype", "state_content_bytes", "dcp_sharded")),
    (CACHES, "CircularBufferSpec.max_num_blocks_per_req", ("vllm_config", "max_len")),
    (CACHES, "KVCacheLayout.LBHNC", ()),
    # Which requests there are.
    (PROCESSOR, "LogitsProcessor.validate_params", ()),
    (PROCESSOR, "LogitsProcessor.update_state", ("batch_update",)),
    (PROCESSOR, "BatchUpdate", ("removed", "added", "moved")),
    (PROCESSOR, "MoveDirectionality.SWAP", ()),
    # A model that is measured, and rotary embeddings that leave queries and keys as they are.
    ("vllm.config", "get_layers_from_vllm_config", ("vllm_config", "layer_type")),
    ("vllm.config", "get_current_vllm_config_or_none", ()),
    ("vllm.forward_context", "set_forward_context", ("attn_metadata", "vllm_config", "num_tokens", "skip_compiled")),
    ("vllm.model_executor.custom_op", "CustomOp.register_oot", ("_decorated_op_cls", "name")),
    ("vllm.model_executor.custom_op", "op_registry_oot", ()),
    (f"{LAYERS}.attention", "Attention", ("num_heads", "head_size", "scale", "num_kv_heads")),
    (f"{LAYERS}.attention_layer_base", "AttentionLayerBase.get_attn_backend", ()),
    (f"{LAYERS}.mamba.abstract", "MambaBase", ()),
    (f"{LAYERS}.rotary_embedding", "Phi3LongRoPEScaledRotaryEmbedding.forward", ("positions", "query", "key")),
    (f"{LAYERS}.rotary_embedding.base", "RotaryEmbeddingBase", ("head_size", "rotary_dim", "max_position_embeddings", "dtype")),
    ("vllm.model_executor.models.utils", "extract_layer_index", ("layer_name",)),
    # Documents.
    (CONNECTOR, "KVConnectorBase_V1.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    (CONNECTOR, "KVConnectorBase_V1.update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    (CONNECTOR, "KVConnectorBase_V1.build_connector_meta", ("scheduler_output",)),
    (CONNECTOR, "KVConnectorBase_V1.register_kv_caches", ("kv_caches",)),
    (CONNECTOR, "KVConnectorBase_V1.start_load_kv", ("forward_context",)),
    (CONNECTOR, "SupportsHMA.request_finished_all_groups", ("request", "block_ids")),
    # The server.
    ("vllm.entrypoints.cli.serve", "make_arg_parser", ("parser",)),
    ("vllm.entrypoints.cli.serve", "validate_parsed_serve_args", ("args",)),
    ("vllm.entrypoints.launchers.api_server.entry", "build_and_serve", ()),  # locret-vllm puts its own in its place
    ("vllm.entrypoints.launchers.api_server.entry", "run_server", ("args",)),
    # Ranks.
    ("vllm.distributed", "get_tensor_model_parallel_rank", ()),
    ("vllm.distributed", "get_tensor_model_parallel_world_size", ()),
    ("vllm.distributed", "tensor_model_parallel_all_reduce", ("input_",)),
)  # fmt: skip
"""A module, a name in it, and parameters or fields of those that the kit uses."""


def missing() -> Iterator[str]:
    """Interfaces that the installed release lacks, each in words."""
    for module, name, used in INTERFACES:
        try:
            found: object = import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            yield f"it has no {module}.{name}"
            continue
        if used and (absent := [one for one in used if one not in _parameters(found)]):
            yield f"{module}.{name} takes no {', '.join(absent)}"


def _parameters(found: object) -> set[str]:
    """Parameters of a function or of a class, with the fields of a class and of those that it derives from."""
    fields = {name for kind in getattr(found, "__mro__", ()) for name in getattr(kind, "__annotations__", {})}
    return fields | {*inspect.signature(found).parameters}  # type: ignore[arg-type]
