"""Last used 2026-11-26, for docs/results/speed.md.

Measure a bounded prompt and decoding on random models with the shapes of Qwen 3 4B and Llama 3.1 8B, packed in 4 bits.

    python scripts/research/large_gguf.py --model qwen3-4b llama3.1-8b --folder FOLDER [--length 1024] [--budget 768]

A file is written to FOLDER once: Q4_0, words and the last layer Q6_K, as llama.cpp's own files of that name have them; weights
and tokenizer are made up, so answers mean nothing and times and memory everything. With a full cache the time of a token does not
depend on the length of the text. Ceilings (bytes read of the mapped file, products of bytes in registers) are measured in the
same run, before and after.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from compare_llamacpp import put, rows_of
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from locret_kernels import cpp
from locret_kernels.cases import packed_matrix
from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.gguf import packed_modules
from locret_kit.backbones.gguf.packed_modules import PackedLinear
from locret_kit.backbones.load import load_backbone
from locret_kit.backbones.spec import spec_of
from locret_kit.heads import HeadsConfig
from locret_kit.runtime.cpu_decoder import cpu_decoder
from locret_kit.runtime.provenance import versions
from locret_kit.runtime.session import Sampling, decode, prefill
from locret_kit.settings import RunSettings

CEILINGS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "ceilings.cpp"
CONTEXT = 40960


class Shape(NamedTuple):
    """Sizes of a published configuration."""

    architecture: str
    layers: int
    hidden: int
    between: int
    heads: int
    kv_heads: int
    head: int
    words: int
    theta: float
    tied: bool


SHAPES = {
    "qwen3-4b": Shape("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 1e6, True),
    "llama3.1-8b": Shape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 5e5, False),
}


def write(path: Path, shape: Shape) -> None:
    """Make the file."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.between)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_freq_base(shape.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    words = [*bytes_to_unicode().values(), "th"]
    writer.add_token_list([*words, *(f"<{i}>" for i in range(len(words), shape.words))])
    writer.add_token_types([TokenType.NORMAL] * len(words) + [TokenType.UNUSED] * (shape.words - len(words)))
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(shape.words - 1)
    inner, outer = shape.heads * shape.head, shape.kv_heads * shape.head
    matrices = {
        "attn_q": (inner, shape.hidden),
        "attn_k": (outer, shape.hidden),
        "attn_v": (outer, shape.hidden),
        "attn_output": (shape.hidden, inner),
        "ffn_gate": (shape.between, shape.hidden),
        "ffn_up": (shape.between, shape.hidden),
        "ffn_down": (shape.hidden, shape.between),
    }
    norms = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
    if shape.architecture == "qwen3":
        norms |= {"attn_q_norm": shape.head, "attn_k_norm": shape.head}
    made = {name: packed_matrix(*size, "Q4_0").numpy() for name, size in matrices.items()}
    table = packed_matrix(shape.words, shape.hidden, "Q6_K").numpy()
    for name in ("token_embd",) if shape.tied else ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", table, raw_dtype=GGMLQuantizationType.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(shape.hidden, np.float32))
    for layer in range(shape.layers):
        for name, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
        for name, data in made.items():
            writer.add_tensor(
                f"blk.{layer}.{name}.weight", np.roll(data, layer, 0), raw_dtype=GGMLQuantizationType.Q4_0
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Ceilings(NamedTuple):
    """What the processor can do, with all its threads."""

    operations: float
    """Products and sums of bytes per second."""
    bandwidth: float
    """Bytes read per second."""

    @classmethod
    def measure(cls, matrix: Tensor) -> Ceilings:
        """The best of five times each.

        Args:
            matrix: a packed one that no cache holds: it is read where the file is mapped, each thread onwards in a part of its
                own, as decoding reads.
        """
        limits = cpp.load(CEILINGS)
        limits.locret_integer_peak.argtypes = [ctypes.c_int64, ctypes.c_int]
        limits.locret_read_rate.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        limits.locret_integer_peak.restype = limits.locret_read_rate.restype = ctypes.c_double
        threads = torch.get_num_threads()
        return cls(
            max(limits.locret_integer_peak(400_000, threads) for _ in range(5)),
            max(limits.locret_read_rate(matrix.data_ptr(), matrix.nbytes, threads) for _ in range(5)),
        )


class Stopwatch:
    """Seconds inside one function that other functions call."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self, *args: object) -> Tensor:
        began = time.perf_counter()
        out = self.function(*args)
        self.seconds += time.perf_counter() - began
        return out


def measure(path: Path, args: argparse.Namespace) -> str:
    """A row of the table, of a model that nothing else in this process has held."""
    model, _ = load_backbone(str(path), dtype="float32", device="cpu")
    ceilings = Ceilings.measure(model.lm_head.weight)
    config = HeadsConfig.for_backbone(spec_of(model.config), path.name, args.width)
    heads = RetainingHeads(config).requires_grad_(False).to(torch.bfloat16)
    ids = torch.randint(0, model.config.vocab_size - 1, (args.length,)).tolist()
    cache = BoundedCache(RunSettings.of({"budget": args.budget}), None, heads, prompt_length=args.length)
    products = packed_modules.packed_product = Stopwatch(packed_modules.packed_product)
    with attach(model), torch.inference_mode():
        cache.bind(model)
        began = time.perf_counter()
        logits = prefill(model, ids, cache)
        read, inside = time.perf_counter() - began, products.seconds
        rest = dict(prompt=ids, max_new_tokens=args.new_tokens + 2, sampling=Sampling(), stop=frozenset())
        tokens = decode(model, cache, logits, **rest)
        next(tokens)
        next(tokens)  # the first forward of one token makes tables
        began = time.perf_counter()
        said = sum(1 for _ in tokens)
        wrote = time.perf_counter() - began
    matrices = [m for name, m in model.named_modules() if isinstance(m, PackedLinear) and name != "lm_head"]
    work = 2 * args.length * sum(m.in_features * m.out_features for m in matrices)
    decoder = cpu_decoder(model)
    assert not isinstance(decoder, str), decoder
    per_token = decoder.weight_bytes(heads) + rows_of(cache)
    # Other work on the machine only lowers them.
    integers, bandwidth = (max(pair) for pair in zip(ceilings, Ceilings.measure(model.lm_head.weight), strict=True))
    file = path.stat().st_size / 2**30
    return (
        f"| {path.stem} | {file:.2f} | {peak_memory():.2f} | {args.length / read:.2f} | {inside / read:.0%} | "
        f"{work / inside / integers:.2f} of {integers / 1e9:.0f} Gop/s | {said / wrote:.2f} | {per_token / 1e9:.2f} | "
        f"{per_token * said / wrote / bandwidth:.2f} of {bandwidth / 1e9:.1f} GB/s |"
    )


def peak_memory() -> float:
    """GiB that this process has held, pages of the mapped file included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--folder", type=Path, required=True, help="where the files lie, 2.4 and 4.7 GB")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=768)
    parser.add_argument("--width", type=int, default=1024, help="of the retaining heads")
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args()
    rows = []
    for name in args.model:
        path = args.folder / f"{name}.Q4_0.gguf"
        if not path.exists():
            args.folder.mkdir(parents=True, exist_ok=True)
            write(path.with_suffix(".part"), SHAPES[name])
            path.with_suffix(".part").rename(path)
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rows.append(process.submit(measure, path, args).result())
        print(rows[-1], file=sys.stderr, flush=True)
    made, command = versions(), shlex.join(sys.argv[1:])
    lines = [
        f"`python scripts/research/large_gguf.py {command}`; {time.strftime('%Y-%m-%d')}, commit "
        f"{made.get('commit', made['locret_kit'])}, torch {made['torch']}, {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"load {os.getloadavg()[0]:.1f} (1 minute). {args.length:,} tokens of prompt, budget {args.budget}, heads of width "
        f"{args.width}, {args.new_tokens} new tokens, float32 activations.",
        "",
        "| random weights | file, GiB | peak memory | prompt, tokens per second | in products | products, of the integer peak "
        "| decoding, tokens per second | GB per token | decoding, of the read rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    put("large", [*lines, *rows])


if __name__ == "__main__":
    main()
