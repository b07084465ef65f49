"""Tiny random models written as files, random heads for them, vLLM over them, and the kit's own cache as the reference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_decoders.needed import Sizes
from tiny_decoders.shrink import tiny_decoder
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm import LLM, EngineArgs, SamplingParams
from vllm.config import VllmConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.v1.attention import selector

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.backbones.probe import describe
from locret_kit.heads import HeadsConfig, RetainingHeads
from locret_kit.vllm.worker import PROCESSOR, State

COMMON = dict(
    vocab_size=8192, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, initializer_range=0.3, bos_token_id=1,
    eos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
)  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama"),
    "wide": dict(model_type="llama", head_dim=64),  # vLLM's own attention takes no smaller heads
    "llama3-rope": dict(
        model_type="llama",
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    "yarn": dict(
        model_type="qwen2",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
        },
    ),
    "mistral": dict(model_type="mistral", sliding_window=None),
    "mistral-window": dict(model_type="mistral", sliding_window=48),
    "qwen2": dict(model_type="qwen2"),
    "qwen3": dict(model_type="qwen3"),
    "phi3": dict(model_type="phi3", sliding_window=None),
    "phi3-longrope": dict(
        model_type="phi3", sliding_window=None, original_max_position_embeddings=128, rope_parameters=LONGROPE
    ),
    "gemma3": dict(
        model_type="gemma3_text", sliding_window=48, num_hidden_layers=6, query_pre_attn_scalar=16,
        architectures=["Gemma3ForCausalLM"],
    ),
}  # fmt: skip
"""What differs from ``COMMON``."""
MEASURED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {}, "mixtral": {}, "olmoe": {}, "gpt_oss": {}, "smollm3": {}, "granite": {}, "olmo3": {}, "exaone4": {},
    "gemma2": {"tie_word_embeddings": True}, "cohere2": {"tie_word_embeddings": True},
    "gemma4_text": {"tie_word_embeddings": True, "num_experts": None},
    "olmo2": {}, "glm4": {}, "glm4_moe": {"head_dim": 16}, "qwen2_moe": {}, "apertus": {}, "ernie4_5_moe": {},
    "helium": {"intermediate_size": 128},
}  # fmt: skip
"""Others, by model type: what differs from the tiny decoders of the other tests."""
HYBRIDS: dict[str, dict[str, Any]] = {
    "falcon_h1": {}, "lfm2_moe": {"tie_word_embeddings": True},
    "qwen3_next": {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "lfm2": {
        "tie_word_embeddings": True, "conv_dim": 64, "block_dim": 64, "block_ff_dim": 96, "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    },
}  # fmt: skip
"""Whose layers hold a state. The kit runs them with later releases of transformers than vLLM takes."""
UNLIKE = {"act_fn.alpha": -30.0, "e_score_correction_bias": 0.0}
"""Weights that vLLM uses otherwise than transformers, with values for which that is the same: xIELU's are bfloat16 in vLLM, and
its router on CPUs ignores the bias."""
SIZES = Sizes(vocab=8192, window=48, context=4096)
LENGTHS = (20, 64, 65, 96, 150, 300, 517, 700)
"""Tokens of the prompts: below and above the budget, at and beside boundaries."""


def make(folder: Path, name: str) -> PreTrainedModel:
    """A random model in float32, written into a folder."""
    torch.manual_seed(0)
    if (changes := {**MEASURED, **HYBRIDS}.get(name)) is not None:
        model = tiny_decoder(name, changes, SIZES)
        for weight_name, weight in model.named_parameters():
            for part, value in UNLIKE.items():
                if part in weight_name:
                    weight.fill_(value)
    else:
        settings = {**COMMON, **MODELS[name]}
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model.save_pretrained(folder)
    if name == "cohere2":  # vLLM takes one token more into its windows than transformers
        model.config.__class__.from_pretrained(folder, sliding_window=SIZES.window - 1).save_pretrained(folder)
    return model


def make_heads(folder: Path, model: PreTrainedModel, backbone: Path) -> str:
    """Random heads for a model, written into a folder."""
    heads = RetainingHeads(HeadsConfig.for_backbone(describe(model).spec, str(backbone), 8))
    for weight in heads.parameters():
        nn.init.normal_(weight, std=0.3)
    heads.save_pretrained(folder, torch.float32)
    return str(folder)


def make_both(folder: Path, name: str) -> tuple[PreTrainedModel, str]:
    """A model in ``folder/model``, and heads for it in ``folder/heads``."""
    model = make(folder / "model", name)
    return model, make_heads(folder / "heads", model, folder / "model")


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Prompts without a repeated token: equal tokens would have equal scores, and rounding would choose between them."""
    draws = (torch.Generator().manual_seed(i) for i in range(len(lengths)))
    return [(3 + torch.randperm(8189, generator=draw)[:n]).tolist() for draw, n in zip(draws, lengths, strict=True)]


def options(section: dict[str, Any] | None) -> dict[str, Any]:
    """vLLM's options of a tiny engine."""
    return dict(
        dtype="float32", enforce_eager=True, max_model_len=2048, kv_cache_memory_bytes=8 << 20, max_num_seqs=8,
        max_num_batched_tokens=48, skip_tokenizer_init=True, disable_log_stats=True, enable_prefix_caching=False,
        **({} if section is None else {"additional_config": {"locret": section}, "logits_processors": [PROCESSOR]}),
    )  # fmt: skip


def configuration(model: Path, section: dict[str, Any], **rest: Any) -> VllmConfig:
    """The configuration of an engine that is not started."""
    return EngineArgs(str(model), **options(section) | rest).create_engine_config()


def forget() -> None:
    """Leave nothing of an engine, or of a configuration that was read, to the next one of this process."""
    State.worker = State.server = State.section = None
    State.alone = False


@contextmanager
def started(model: str | Path, section: dict[str, Any] | None, **rest: Any) -> Iterator[LLM]:
    """vLLM with a bounded cache in this process; its own attention where ``section`` is None."""
    selector._cached_get_attn_backend.cache_clear()  # a process has one engine, and vLLM chooses for it once
    llm = None
    try:
        llm = LLM(str(model), **options(section) | rest)
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        forget()


def params(tokens: int, **own: Any) -> SamplingParams:
    """So many greedy tokens. ``own``: what a request asks for by itself."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=own or None)


def generate(llm: LLM, ids: Sequence[Sequence[int]], tokens: int, **own: Any) -> list[list[int]]:
    """Greedy tokens of several prompts at once."""
    found = llm.generate([{"prompt_token_ids": list(one)} for one in ids], params(tokens, **own), use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in found]


def kit(
    model: PreTrainedModel, ids: Sequence[int], tokens: int, cache: BoundedCache | None = None, **settings: Any
) -> list[int]:
    """The same by ``BoundedCache``, which reads the whole prompt in one forward, or what ``cache`` has not read of it."""
    cache = BoundedCache(prompt_length=len(ids), **settings) if cache is None else cache
    seen, out = cache.get_seq_length(), []
    with attach(model), torch.inference_mode():
        new = torch.tensor([list(ids)[seen:]])
        for _ in range(tokens):
            at = torch.arange(seen, seen + new.shape[1])[None]
            logits = model(new, **{CACHE: cache}, position_ids=at).logits[0, -1]
            seen += new.shape[1]
            out.append(int(logits.argmax()))
            new = torch.tensor([[out[-1]]])
    return out


def scheduler(llm: LLM) -> Any:
    """vLLM's scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]


def free_pages(llm: LLM) -> int:
    """Pages that no request has."""
    return int(scheduler(llm).kv_cache_manager.block_pool.get_num_free_blocks())
