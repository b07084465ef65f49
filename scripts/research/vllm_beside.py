"""vLLM with its own cache, with a bounded one, and ``locret-serve``, side by side on a CPU.

    .venv-vllm/bin/python scripts/research/vllm_beside.py decode --prompt 1000 --budget 256   # 16 at once, offline; CPU seconds
    .venv-vllm/bin/python scripts/research/vllm_beside.py fit             # requests of 32,768 tokens in 400 MiB
    .venv-vllm/bin/python scripts/research/vllm_beside.py serve --locret-serve .venv/bin/locret-serve   # 1 and 8 clients, HTTP

Run it with the environment of ``scripts/test_vllm.sh``. One JSON object a line. Each engine has a process of its own, one after
another; ``--rounds`` repeats the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BACKBONE, HEADS = str(ROOT / "checkpoints/SmolLM2-135M-Instruct"), str(ROOT / "checkpoints/smollm2-135m-locret")
BUDGET, PORT = 512, 8790
KINDS: dict[str, dict[str, Any] | None] = {
    "vllm": None,
    "bounded, streaming": {"policy": "streaming"},
    "bounded, lookahead-locret": {"policy": "lookahead-locret", "heads": HEADS},
}
SIZES = {"texts": 16, "tokens": 32, "prompt": 200, "budget": BUDGET}
"""Slots of ``decode``; a chunk is as large as the budget."""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def engine(kind: str, budget: int = BUDGET, **rest: Any) -> Any:
    from vllm import LLM

    section = KINDS[kind]
    settings = {"budget": budget, "chunk": budget, "stabilizers": 64, "positions": "compact"}
    return LLM(
        BACKBONE, dtype="float32", enforce_eager=True, disable_log_stats=True, enable_prefix_caching=False,
        additional_config={"locret": settings | (section or {})},
        logits_processors=[] if section is None else ["locret_kit.vllm:Requests"], **rest,
    )  # fmt: skip


def decode(kind: str, texts: int, tokens: int, prompt: int, budget: int, blocks: int = 3) -> Iterator[dict[str, Any]]:
    """CPU and wall seconds of ``tokens`` steps, each of which decodes one token of ``texts`` prompts of ``prompt`` tokens; so
    several times, one after another."""
    import torch
    from vllm import SamplingParams

    # A token is 45 KiB in all layers.
    rows = max(prompt + blocks * tokens + 100, 2 * budget)
    memory = (texts + 1) * rows * 48 * 1024
    llm = engine(kind, budget, kv_cache_memory_bytes=memory, max_model_len=2048, max_num_seqs=texts)
    draw = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, detokenize=False)
    for i in range(texts):
        ids = torch.randint(20, 49000, (prompt,), generator=draw).tolist()
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    while len(llm.llm_engine.step()) < texts:  # until all prompts are read
        pass
    llm.llm_engine.step()
    for _ in range(blocks):
        began = time.process_time(), time.perf_counter()
        for _ in range(tokens):
            assert len(llm.llm_engine.step()) == texts
        cpu, wall = time.process_time() - began[0], time.perf_counter() - began[1]
        sizes = {"texts": texts, "prompt": prompt, "budget": budget, "tokens": tokens}
        yield sizes | {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2)}


def fit(kind: str) -> dict[str, Any]:
    """Requests of 32,768 tokens that 400 MiB hold; 0 where vLLM refuses to start."""
    rest = {"max_model_len": 32768, "hf_overrides": {"max_position_embeddings": 32768}}
    try:
        llm = engine(kind, kv_cache_memory_bytes=400 << 20, **rest)
    except ValueError as error:
        return {"requests": 0, "said": str(error)[:120]}
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    if KINDS[kind] is not None:
        return {"requests": config.num_blocks - 1}
    return {"requests": config.num_blocks * config.kv_cache_groups[0].kv_cache_spec.block_size // 32768}


@contextmanager
def server(kind: str, locret_serve: str) -> Iterator[Any]:
    """A server that answers, and its process."""
    import httpx
    import psutil

    vllm = ["--dtype", "float32", "--max-num-batched-tokens", "512", "--max-model-len", "8192", "--port", str(PORT)]
    bounded = [
        sys.executable,
        "-m",
        "locret_kit.cli.vllm",
        "--model",
        BACKBONE,
        "--ckpt",
        HEADS,
        "--sessions",
        "8",
        *vllm,
    ]
    settings = ["--budget", str(BUDGET), "--chunk", str(BUDGET), "--stabilizers", "64"]
    words = {
        "vllm": [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", BACKBONE, "--enforce-eager",
                 "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "400M", *vllm],
        "bounded": [*bounded, *settings],
        "locret-serve": [locret_serve, "--ckpt", HEADS, "--model", BACKBONE, "--sessions", "8", "--dtype", "float32",
                         "--documents", "0", "--shared-prefixes", "0", "--port", str(PORT), *settings],
    }[kind]  # fmt: skip
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            time.sleep(0.5)
            try:
                if httpx.get(f"http://127.0.0.1:{PORT}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                assert process.poll() is None, f"{kind} did not start"
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def serve(kind: str, clients: int, locret_serve: str, each: int = 3, tokens: int = 48) -> dict[str, Any]:
    """Tokens a second over HTTP: each client sends ``each`` prompts of some 600 tokens, one after another."""
    import httpx

    with server(kind, locret_serve) as process:
        model = httpx.get(f"http://127.0.0.1:{PORT}/v1/models").json()["data"][0]["id"]
        counts: list[tuple[int, int]] = []

        def one(client: int, number: int) -> None:
            words = " ".join(f"{(client * 31 + number * 7 + i) * i % 9973}" for i in range(150))
            body = {"model": model, "prompt": words, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            usage = httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=600).json()["usage"]
            counts.append((usage["prompt_tokens"], usage["completion_tokens"]))

        def client(number: int) -> None:
            for i in range(each):
                one(number, i)

        one(99, 0)  # what is compiled once
        counts.clear()
        processes = [process, *process.children(recursive=True)]
        cpu, began = sum(sum(p.cpu_times()[:2]) for p in processes), time.perf_counter()
        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        cpu = sum(sum(p.cpu_times()[:2]) for p in processes) - cpu
    read, new = (sum(part) for part in zip(*counts, strict=True))
    return {
        "clients": clients, "prompt_tokens": read, "new_tokens": new, "wall_s": seconds, "cpu_s": cpu,
        "tokens_per_s": new / seconds, "tokens_per_cpu_s": new / cpu,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["decode", "fit", "serve"])
    parser.add_argument("--kind", help="one alone, in this process")
    parser.add_argument("--rounds", type=int, default=1)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--locret-serve", default="locret-serve")
    args = parser.parse_args()
    if args.kind is not None:
        own = (getattr(args, name) for name in SIZES)
        for row in decode(args.kind, *own) if args.what == "decode" else [fit(args.kind)]:
            print(json.dumps({"what": args.what, "kind": args.kind, **row, "load": os.getloadavg()[0]}), flush=True)
        return
    for _ in range(args.rounds):
        if args.what == "serve":
            for kind in ("vllm", "bounded", "locret-serve"):
                for clients in (1, 8):
                    row = serve(kind, clients, args.locret_serve)
                    print(json.dumps({"what": "serve", "kind": kind, **row, "load": os.getloadavg()[0]}), flush=True)
            continue
        for kind in KINDS:
            sizes = [word for name in SIZES for word in (f"--{name}", str(getattr(args, name)))]
            words = [sys.executable, __file__, args.what, "--kind", kind, *sizes]
            done = subprocess.run(words, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
            rows = re.findall(r"^\{.*\}$", done.stdout, re.M)
            print("\n".join(rows) or f"{kind}: {done.stderr[-400:]}", flush=True)


if __name__ == "__main__":
    main()
