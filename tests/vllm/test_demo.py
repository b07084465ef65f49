"""The demo backbone, in float32: tokens of vLLM with a bounded cache equal those of ``BoundedCache``, over long prompts too."""

import ctypes
import gc
from pathlib import Path

import psutil
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from locret_kit.cache.pages import page_bytes
from locret_kit.policies.grammar import parse_policy
from locret_kit.settings import RunSettings
from locret_kit.vllm.server_settings import Pages

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = ROOT / "checkpoints" / "SmolLM2-135M-Instruct", str(ROOT / "checkpoints" / "smollm2-135m-locret")
SETTINGS = dict(budget=512, chunk=512, stabilizers=64, local_len=64)
LAYERS = 2
"""Of the backbone, where memory is measured."""
pytestmark = pytest.mark.backbone


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(BACKBONE, dtype=torch.float32).eval().requires_grad_(False)


def prompt(tokens: int) -> list[int]:
    """Text that goes on and does not repeat itself."""
    text = " ".join(f"In {1000 + i} the town had {i * i % 977} houses and {i * 7 % 613} boats." for i in range(700))
    return list(AutoTokenizer.from_pretrained(BACKBONE)(text).input_ids[:tokens])


@pytest.mark.parametrize(("positions", "tokens"), [("compact", 8000), ("original", 700)])
def test_a_long_prompt(model, positions, tokens):
    """By what the heads were published with. Other policies, on a tiny model: ``test_models``."""
    settings = {**SETTINGS, "positions": positions, "heads": HEADS, "policy": "lookahead-locret"}
    size = {"kv_cache_memory_bytes": 300 << 20, "max_num_batched_tokens": 2048, "max_model_len": 8192}
    with tiny.started(BACKBONE, settings, **size) as llm:
        (answer,) = tiny.generate(llm, [prompt(tokens)], 24)
    assert answer == tiny.kit(model, prompt(tokens), 24, **settings)


def test_memory_does_not_grow_with_the_text(tmp_path):
    """A few layers of it, from 4,096 to 131,072 tokens: one page, as many bytes as planned, and the same resident memory."""
    config = AutoConfig.from_pretrained(BACKBONE)
    config.num_hidden_layers = LAYERS
    config.save_pretrained(tmp_path)
    weights = load_file(BACKBONE / "model.safetensors")
    layers = {f"model.layers.{i}." for i in range(LAYERS)}
    save_file(
        {name: x for name, x in weights.items() if "layers" not in name or name.startswith(tuple(layers))},
        tmp_path / "model.safetensors", {"format": "pt"},
    )  # fmt: skip
    settings = RunSettings.of(SETTINGS).resolved({}, None)
    pages = Pages(page_bytes(config, settings, [parse_policy("streaming")], torch.float32), 2)
    section = {**SETTINGS, "policy": "streaming", "positions": "compact"}
    more = dict(max_num_batched_tokens=2048, max_model_len=1 << 17)
    more["hf_overrides"] = {"max_position_embeddings": 1 << 17}
    with tiny.started(tmp_path, section, kv_cache_memory_bytes=pages.bytes, **more) as llm:
        assert sum(tensor.size for tensor in tiny.scheduler(llm).kv_cache_config.kv_cache_tensors) == pages.bytes
        resident = []
        for tokens in (4096, 4096, 4096, (1 << 17) - 1):  # the first ones touch what is touched once
            ids = (torch.arange(tokens) * 7919 % 49000 + 17).tolist()
            tiny.generate(llm, [ids], 1)
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free goes back, or the number is of chance
            resident.append(psutil.Process().memory_info().rss)
        assert resident[-1] <= 1.02 * resident[-2], resident
