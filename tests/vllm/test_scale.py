"""Several engines behind one address: data parallelism, and Ray Serve LLM by ``examples/ray/locret-vllm.yaml``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import tiny
import yaml
from serve_process import free_port
from word_texts import word_tokenizer, words

from locret_kit.documents.document import Document

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = dict(budget=64, chunk=32, stabilizers=8, local_len=16, positions="compact", policy="snapkv")
LESS = SETTINGS | {"budget": 48}
TOKENS = 24
pytestmark = pytest.mark.scale


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Folders of a model and of a library, prompts of which one begins with a document, and their tokens by two budgets."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = tiny.make(folder / "model", "llama"), word_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    (book, *rest) = tiny.prompts((400, 20, 90, 150, 300))
    prompts, wanted = [[*book, 8190, 8191], *rest], []
    for settings in (SETTINGS, LESS):
        document = Document.read(model, tokenizer, words(book), chat=False, **settings)
        (library := folder / f"library-{settings['budget']}").mkdir()
        document.save(library / "book.locret")
        assert list(document.prompt(" " + words(prompts[0][-2:]))) == prompts[0]
        caches = [document.fork_for(len(prompts[0])), *[None] * len(rest)]
        wanted.append(
            [tiny.kit(model, ids, TOKENS, cache, **settings) for ids, cache in zip(prompts, caches, strict=True)]
        )
    return folder, prompts, wanted


def ask(url: str, ids: list[int]) -> tuple[int, list[int]]:
    """Status and tokens of a greedy answer."""
    body = {
        "model": "demo",
        "prompt": ids,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    return answer.status_code, answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else []


def test_data_parallel(served, tmp_path):
    folder, prompts, (wanted, _) = served
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        sys.executable, "-m", "locret_kit.cli.vllm", "--model", str(folder / "model"), "--served-model-name", "demo",
        "--data-parallel-size", "2", "--sessions", "4", "--documents", str(folder / "library-64"), "--port", str(port),
        "--dtype", "float32", "--max-model-len", "2048", *(f"{name}={value}" for name, value in SETTINGS.items()),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while "ready: " not in (said := (tmp_path / "log").read_text()):
                assert server.poll() is None, said[-3000:]
                time.sleep(0.5)
            assert "8 requests fit" in said
            with ThreadPoolExecutor(20) as pool:
                answers = [*pool.map(lambda ids: ask(url, ids), prompts * 4)]
            assert answers == [(200, tokens) for tokens in wanted] * 4
            served_by = {line.split('engine="')[1][0]: float(line.split()[-1])
                         for line in httpx.get(f"{url}/metrics").text.splitlines()
                         if line.startswith("vllm:request_success_total") and 'reason="length"' in line}  # fmt: skip
            assert sum(served_by.values()) == 20 and min(served_by["0"], served_by["1"]) > 0
        finally:
            server.terminate()
            server.wait(60)


def deploy(folder: Path, path: Path, address: str, port: int, section: dict) -> None:
    """Run the example's application on a CPU."""
    manifest = yaml.safe_load((ROOT / "examples" / "ray" / "locret-vllm.yaml").read_text())
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    llm["model_loading_config"]["model_source"] = str(folder / "model")
    llm["accelerator_config"], engine = {"kind": "cpu"}, llm["engine_kwargs"]
    del engine["attention_backend"]
    engine |= {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048, "kv_cache_memory_bytes": 8 << 20}
    engine["additional_config"]["locret"] = {**section, "documents": str(folder / f"library-{section['budget']}")}
    config["http_options"] = {"port": port}
    path.write_text(yaml.safe_dump(config))
    serve = Path(sys.executable).with_name("serve")
    subprocess.run([serve, "run", "--non-blocking", path], check=True, env={**os.environ, "RAY_ADDRESS": address})


def replicas() -> set[psutil.Process]:
    """Processes of replicas that live."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if "ray::ServeReplica:locret:LLMServer" in " ".join(child.cmdline()):
                found.add(child)
    return found


def test_ray_serve_llm(served, tmp_path, monkeypatch):
    """Two replicas: one is killed, and a change of the settings is rolled out, while requests come."""
    for name, value in {
        "USAGE_STATS_ENABLED": 0,
        "worker_niceness": 0,
        "SERVE_PROXY_READY_CHECK_TIMEOUT_S": 120,
    }.items():
        monkeypatch.setenv(f"RAY_{name}", str(value))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    import ray
    from ray import serve

    folder, prompts, wanted = served
    url, count = f"http://127.0.0.1:{(port := free_port())}", Counter()
    address = ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False).address_info["gcs_address"]

    def until(known: list[list[list[int]]], done) -> None:
        """Ask until something is so; what is answered with status 200 is one of the known answers."""
        end = time.monotonic() + 300
        with ThreadPoolExecutor(len(prompts)) as pool:
            while not done():
                assert time.monotonic() < end
                for i, (status, tokens) in enumerate(pool.map(lambda ids: ask(url, ids), prompts)):
                    count[status] += 1
                    assert status != 200 or tokens in [answers[i] for answers in known]

    try:
        deploy(folder, tmp_path / "a.yaml", address, port, SETTINGS)
        end = time.monotonic() + 300
        while serve.status().applications["locret"].status != "RUNNING":
            assert time.monotonic() < end
            time.sleep(1)
        until(wanted[:1], lambda: count[200] >= 20)
        assert count.keys() == {200}
        (dead := next(iter(replicas()))).kill()
        until(wanted[:1], lambda: len(replicas() - {dead}) == 2 and count[200] >= 60)
        assert count[500] <= len(prompts)  # those that it was answering
        failed = count[500]
        deploy(folder, tmp_path / "b.yaml", address, port, LESS)
        until(wanted, lambda: [ask(url, ids) for ids in prompts] == [(200, tokens) for tokens in wanted[1]])
        assert count[500] == failed and sum(count.values()) == count[200] + failed
    finally:
        serve.shutdown()
        ray.shutdown()
