"""Last used 2026-11-26, for docs/results/speed.md.

Measure prefill and decoding beside ``model.generate`` and llama.cpp, on a CPU: print its provenance and
the lines of scripts/research/logs/tables/llamacpp.csv.

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary llama-cpp-python llama-cpp-python
    python scripts/research/compare_llamacpp.py --ckpt checkpoints/smollm2-135m-locret --gguf FILE.gguf [FILE.gguf ...]

llama.cpp is compiled for the processor that runs it (some seven minutes), and has flash attention, with its cache in float16
and, for short prompts, in 8 bits. All ways read the same tokens, by turns, in one run, one length after another; each generates
as many tokens, greedily, whatever they are. llama.cpp runs in processes of its own. One token reads weights as the compiled
call holds them, retaining heads, and the rows of the cache. A share of the bandwidth is these bytes by the rate of tokens, over
the bytes that copying a large tensor moves.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.gguf import is_gguf
from locret_kit.backbones.load import load_backbone, load_tokenizer, resolve_model
from locret_kit.runtime.drivers.cpu import cpu_driver
from locret_kit.runtime.drivers.graph import NoDriver
from locret_kit.runtime.report import versions
from locret_kit.runtime.session import Sampling, prefill
from locret_kit.samples.haystack import load_text
from locret_kit.settings import RunSettings

sys.path.append(str(Path(__file__).parents[1]))
from decoding import decode

COPIED = 1 << 28
"""Bytes of the tensor that is copied."""
Rates = tuple[float, float]
"""Tokens per second of prefill and of decoding."""

_LLAMA = None
SHORT = 4096
"""Longest prompt of all ways. Longer ones are read by the kit with each file and the float model, and by llama.cpp with the file
that it read fastest before, its cache in float16."""


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    source, seconds = torch.ones(COPIED // 4), []
    target = torch.empty_like(source)
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return 2 * COPIED / min(seconds)


class Ours:
    """The kit, with a model of a type and rows of some bits."""

    def __init__(self, ckpt: str, ids: list[int], name: str, dtype: str, kv_bits: int | None, budget: int) -> None:
        self.heads = RetainingHeads.from_pretrained(ckpt)
        self.model, _ = load_backbone(name, dtype=dtype, device="cpu")
        self.ids, self.kv_bits, self.budget = ids, kv_bits, budget
        self.read = 0

    @torch.inference_mode()
    def __call__(self, new: int) -> Rates:
        settings = RunSettings.of({"budget": self.budget, "kv_bits": self.kv_bits})
        cache = BoundedCache(settings, None, self.heads, prompt_length=len(self.ids))
        with attach(self.model):
            cache.bind(self.model)
            began = time.perf_counter()
            logits = prefill(self.model, self.ids, cache)
            read = time.perf_counter() - began
            rest = dict(prompt=self.ids, max_new_tokens=new + 1, sampling=Sampling(), stop=frozenset())
            tokens = decode(self.model, cache, logits, **rest)
            next(tokens)
            next(tokens)  # the first forward of one token makes tables
            began = time.perf_counter()
            said = sum(1 for _ in tokens)
            wrote = time.perf_counter() - began
        try:
            weights = cpu_driver(self.model).weight_bytes(cache.context.heads)
        except NoDriver:
            weights = bytes_of(self.model, self.heads)
        self.read = weights + rows_of(cache)
        return len(self.ids) / read, said / wrote


class Generate:
    """``model.generate`` with full attention."""

    def __init__(self, model: torch.nn.Module, ids: list[int]) -> None:
        self.model, self.ids, self.read = model, ids, bytes_of(model)

    @torch.inference_mode()
    def __call__(self, new: int) -> Rates:
        # One token takes a prefill and a choice; the rest of the time is that of the others.
        seconds = []
        for count in (1, 1 + new):
            began = time.perf_counter()
            rest = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
            self.model.generate(torch.tensor([self.ids]), attention_mask=torch.ones(1, len(self.ids)), **rest)
            seconds.append(time.perf_counter() - began)
        spec = self.model.config
        self.read = bytes_of(self.model) + 2 * len(self.ids) * self.model.dtype.itemsize * (
            spec.num_hidden_layers * spec.num_key_value_heads * spec.head_dim
        )
        return len(self.ids) / seconds[0], new / (seconds[1] - seconds[0])


def bytes_of(*modules: torch.nn.Module) -> int:
    """Of all weights."""
    return sum(x.nbytes for module in modules for x in module.parameters())


def rows_of(cache: BoundedCache) -> int:
    """Bytes of keys and values, with the levels of those in few bits, that attention of one token reads."""
    return sum(sum(x.nbytes for x in rows.varlen().rows) * rows.rows // rows.capacity for rows in cache.bounded)


def start_llama(path: str, context: int, threads: int, kv_bits: int | None) -> None:
    """Load a GGUF file, in the process that answers."""
    global _LLAMA
    import llama_cpp

    kind = llama_cpp.GGML_TYPE_F16 if kv_bits is None else llama_cpp.GGML_TYPE_Q8_0
    _LLAMA = llama_cpp.Llama(
        path, n_ctx=context, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, flash_attn=True,
        type_k=kind, type_v=kind, verbose=False,
    )  # fmt: skip


def ask_llama(ids: list[int], new: int) -> Rates:
    """Tokens are the likeliest; the first comes of the prompt."""
    assert _LLAMA is not None
    _LLAMA.reset()
    began = time.perf_counter()
    _LLAMA.eval(ids)
    read, token = time.perf_counter() - began, _LLAMA.sample(temp=0.0)
    began = time.perf_counter()
    for _ in range(new):
        _LLAMA.eval([token])
        token = _LLAMA.sample(temp=0.0)
    return len(ids) / read, new / (time.perf_counter() - began)


def measure(args: argparse.Namespace, ids: list[int], theirs: Sequence[Path]) -> tuple[list[list[str]], Path]:
    """Lines of the table for one length of prompt, and the file that llama.cpp read fastest of ``theirs``."""
    bandwidth = copy_bandwidth()
    backbone = resolve_model(RetainingHeads.from_pretrained(args.ckpt).config.backbone)
    short = len(ids) <= SHORT
    floats = not is_gguf(backbone)  # heads of a packed backbone have no float model beside it
    kinds = [(backbone, dtype, None) for dtype in (("float32", "bfloat16") if short else ("float32",)) if floats]
    kinds += [(str(file), "float32", bits) for file in args.gguf for bits in ((None, 4) if short else (None,))]
    ours = {
        f"`--model {Path(name).name} --dtype {dtype}" + (f" --kv-bits {bits}`" if bits else "`"): Ours(
            args.ckpt, ids, name, dtype, bits, args.budget
        )
        for name, dtype, bits in kinds
    }
    ways: dict[str, Callable[[int], Rates]] = {**ours}
    read, files = {}, {}
    if short and floats:
        full = Generate(next(iter(ours.values())).model, ids)
        ways["`model.generate`, full attention, float32"] = full
        read["`model.generate`, full attention, float32"] = full.read
    with ExitStack() as processes:
        for file in theirs:
            for bits in (None, 8) if short else (None,):
                process = processes.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
                process.submit(start_llama, str(file), len(ids) + args.new_tokens + 8, args.threads, bits).result()
                name = f"llama.cpp, {file.name}, cache in {'float16' if bits is None else '8 bits'}"
                ways[name] = lambda new, process=process: process.submit(ask_llama, ids, new).result()
                read[name], files[name] = file.stat().st_size, file
        rounds: dict[str, list[Rates]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, ask in ways.items():
                rounds[name].append(ask(args.new_tokens))
                print(f"{len(ids)}, {name}: {rounds[name][-1]}", file=sys.stderr, flush=True)
    bandwidth = max(bandwidth, copy_bandwidth())
    read |= {name: way.read for name, way in ours.items()}
    rates = {name: [median(column) for column in zip(*some, strict=True)] for name, some in rounds.items()}
    best = [max(column) for column in zip(*(rates[name] for name in files), strict=True)]
    rows = [
        [
            f"{len(ids):,}",
            name,
            f"{prefill_rate:.0f}",
            f"{rate:.1f}",
            f"{prefill_rate / best[0]:.1f}",
            f"{rate / best[1]:.2f}",
            f"{read[name] / 2**20:.0f}",
            f"{read[name] * rate / bandwidth:.0%}",
        ]
        for name, (prefill_rate, rate) in rates.items()
    ]
    return rows, files[max(files, key=lambda name: rates[name][0])]


def write(args: argparse.Namespace) -> None:
    """Print the run and its lines."""
    from llama_cpp import __version__, llama_print_system_info

    tokenizer = load_tokenizer(RetainingHeads.from_pretrained(args.ckpt).config.backbone)
    ids = tokenizer(load_text("jargon"), verbose=False).input_ids
    ids *= -(-max(args.lengths) // len(ids))
    rows, theirs = [], args.gguf
    for length in sorted(args.lengths):
        added, fastest = measure(args, ids[:length], theirs)
        rows += added
        theirs = [fastest] if length >= SHORT else args.gguf
    made, system = versions(), " ".join(llama_print_system_info().decode().split())
    print(
        f"`python scripts/research/compare_llamacpp.py {shlex.join(sys.argv[1:])}`; {time.strftime('%Y-%m-%d')}, commit "
        f"{made.get('commit', made['locret_kit'])}, torch {made['torch']}, llama-cpp-python {__version__} ({system}), "
        f"{os.cpu_count()} CPU cores ({platform.machine()}), {args.threads} threads, load {os.getloadavg()[0]:.1f} (1 minute). "
        f"Budget {args.budget}, {args.new_tokens} new tokens, {args.rounds} rounds (medians); shares are of the best rates of "
        "llama.cpp at that length.",
    )
    csv.writer(sys.stdout, lineterminator="\n").writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--gguf", type=Path, nargs="+", required=True, help="the same backbone as GGUF files")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    write(args)


if __name__ == "__main__":
    main()
