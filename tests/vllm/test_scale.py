"""A thousand requests at one server; several engines behind one address: data parallelism, and Ray Serve LLM by
``examples/ray/locret-vllm.yaml``.
"""

import asyncio
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
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
        pairs = zip(prompts, caches, strict=True)
        wanted.append([tiny.kit(model, ids, TOKENS, cache, **settings) for ids, cache in pairs])
    return folder, prompts, wanted


def ask(url: str, ids: list[int]) -> tuple[int, list[int]]:
    """Status and tokens of a greedy answer."""
    body = {"model": "demo", "prompt": ids, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    return answer.status_code, answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else []


def stream(url: str, ids: list[int], tokens: int, begun: Callable[[], object]) -> list[str]:
    """Data of the events of a greedy answer, after status 200. ``begun`` is called at the first, and the connection ends well."""
    body = {"model": "demo", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: "):
                data.append(line.removeprefix("data: "))
                if len(data) == 1:
                    begun()
    return data


def ending(data: list[str]) -> str:
    """How a stream ended: by its last choice, by an error, or as if nothing were missing."""
    events = [json.loads(one) for one in data if one != "[DONE]"]
    if any("error" in event for event in events):
        return "error"
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    return reasons[-1] if reasons[-1] and data[-1] == "[DONE]" else "silent"


@contextmanager
def serving(folder: Path, log: Path, sessions: int, *words: str) -> Iterator[tuple[str, psutil.Process]]:
    """The address of ``locret-vllm``, and its process."""
    command = [
        sys.executable, "-m", "locret_kit.cli.vllm", "--model", str(folder / "model"), "--served-model-name", "demo",
        "--documents", str(folder / "library-64"), "--dtype", "float32", "--max-model-len", "2048", *words,
        "--sessions", str(sessions), "--port", str(port := free_port()), *(f"{k}={v}" for k, v in SETTINGS.items()),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        while "ready: " not in (said := log.read_text()):
            assert server.poll() is None, said[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(60)


def metrics(url: str, name: str) -> dict[str, float]:
    """Values of one of vLLM's metrics, by their labels."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {line.split()[0]: float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{")}


def test_data_parallel(served, tmp_path):
    folder, prompts, (wanted, _) = served
    with serving(folder, tmp_path / "log", 4, "--data-parallel-size", "2") as (url, _):
        assert "8 requests fit" in (tmp_path / "log").read_text()
        with ThreadPoolExecutor(20) as pool:
            answers = [*pool.map(lambda ids: ask(url, ids), prompts * 4)]
        assert answers == [(200, tokens) for tokens in wanted] * 4
        answered = [n for labels, n in metrics(url, "request_success_total").items() if 'reason="length"' in labels]
        assert len(answered) == 2 and sum(answered) == 20 and min(answered) > 0


@pytest.mark.parametrize("streams", [1, 3])
def test_a_stream_whose_engine_dies_ends_with_an_error(served, tmp_path, streams):
    folder, prompts, _ = served
    with serving(folder, tmp_path / "log", streams) as (url, process), ThreadPoolExecutor(streams) as pool:
        begun = threading.Semaphore(0)
        answers = [pool.submit(stream, url, ids, 1500, begun.release) for ids in prompts[1:][:streams]]
        assert all(begun.acquire(timeout=120) for _ in answers)
        (engine,) = (one for one in process.children(recursive=True) if "EngineCore" in " ".join(one.cmdline()))
        engine.kill()
        assert [ending(answer.result()) for answer in answers] == ["error"] * streams


CLIENTS, SESSIONS = 32, 6
REFUSED = (
    {"vllm_xargs": {"budget": 65}}, {"vllm_xargs": {"budget": 8}}, {"vllm_xargs": {"policy": "tova"}}, {"seed": 1}, {"n": 0},
    {"vllm_xargs": {"kv_transfer_params": 1}}, {"max_tokens": -1}, {"temperature": -1}, {"temperature": 1, "top_k": 10**22},
    {"prompt": []}, {"prompt": [8192]}, {"prompt": [1] * 2048}, {"prompt": [[5], []]}, {"prompt": {}, "stream": True},
    {"model": "other"}, {"logprobs": 99}, {"min_tokens": 99}, {"allowed_token_ids": []}, {"structured_outputs": {"regex": "(("}},
)  # fmt: skip
"""Reasons for which a request is refused."""


class Clients:
    """Requests that end in many ways. ``wanted``: tokens by the number of a prompt and what is asked for besides."""

    def __init__(self, url: str, prompts: list[list[int]], wanted: dict[tuple[int, str], list[int]]) -> None:
        self.url, self.prompts, self.wanted = url, prompts, wanted

    def body(self, draw: random.Random, **rest: object) -> tuple[dict[str, object], list[int]]:
        number, own = draw.choice([*self.wanted])
        body = {
            "model": "demo", "prompt": self.prompts[number], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "vllm_xargs": json.loads(own), **rest,
        }  # fmt: skip
        return body, self.wanted[number, own]

    async def post(self, **rest: object) -> httpx.Response:
        return await self.http.post("/v1/completions", **rest)

    async def whole(self, draw: random.Random) -> None:
        body, wanted = self.body(draw)
        assert (await self.post(json=body)).json()["choices"][0]["token_ids"] == wanted

    async def sampled(self, draw: random.Random) -> None:
        body, _ = self.body(draw, temperature=1, n=3, logprobs=2, prompt=self.prompts[1:3])
        choices = (await self.post(json=body)).json()["choices"]
        assert [len(choice["token_ids"]) for choice in choices] == [TOKENS] * 6

    async def stream(self, draw: random.Random, most: int = TOKENS, longest: int = TOKENS) -> None:
        body, wanted = self.body(draw, stream=True, max_tokens=longest)
        tokens: list[int] = []
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"] or ()
                if len(tokens) >= most:
                    break
        assert len(tokens) >= most and tokens[:TOKENS] == wanted[: len(tokens)]

    async def left(self, draw: random.Random) -> None:
        await self.stream(draw, draw.randrange(1, 20), 1000)

    async def hung_up(self, draw: random.Random) -> None:
        """A socket that is closed or reset: in the middle of the request, in the queue, in the prompt, while tokens come."""
        prompt, stream = self.prompts[0] * draw.randrange(1, 4), draw.random() < 0.5
        content = json.dumps(self.body(draw, prompt=prompt, max_tokens=800, stream=stream)[0])
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
        data = f"{head}{len(content)}\r\n\r\n{content}".encode()
        _, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        if draw.random() < 0.5:
            reset = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.write(data[: len(data) if draw.random() < 0.7 else len(data) // 2])
        await writer.drain()
        await asyncio.sleep(draw.random() ** 2 / 2)
        writer.transport.abort()

    async def refused(self, draw: random.Random) -> None:
        answer = await self.post(json=self.body(draw)[0] | (asked := draw.choice(REFUSED)))
        assert answer.status_code >= 400 and answer.json()["error"], asked

    async def run(self, requests: int, vanishing: Path) -> None:
        """So many, of which ``CLIENTS`` at once. A folder vanishes on the way."""
        kinds = [self.whole, self.hung_up] * 4 + [self.stream, self.left] * 3 + [self.refused] * 2 + [self.sampled]
        free = asyncio.Semaphore(CLIENTS)

        async def one(number: int) -> None:
            async with free:
                draw = random.Random(number)
                await draw.choice(kinds)(draw)
            if number == requests // 2:
                shutil.rmtree(vanishing)

        self.http = httpx.AsyncClient(base_url=self.url, timeout=120)  # one that hangs fails
        async with self.http, asyncio.TaskGroup() as group:
            for number in range(requests):
                group.create_task(one(number))


def test_a_thousand_requests(served, tmp_path):
    """Each ends, by the kit's tokens where it has an answer; then every page is free, memory is what it was, and the server
    answers as before."""
    folder, prompts, (wanted, less) = served
    model, library = tiny.make(tmp_path / "model", "llama"), tmp_path / "library-64"
    word_tokenizer().save_pretrained(tmp_path / "model")
    known = {}
    for i, ids in enumerate(prompts):
        known |= {(i, "{}"): wanted[i], (i, '{"budget": 48}'): less[i]}
        known[i, '{"policy": "knorm"}'] = tiny.kit(model, ids, TOKENS, **SETTINGS | {"policy": "knorm"})

    def memory_after(requests: int) -> int:
        shutil.copytree(folder / "library-64", library, dirs_exist_ok=True)
        asyncio.run(Clients(url, prompts, known).run(requests, library))
        end = time.monotonic() + 120
        while sum((metrics(url, "num_requests_running") | metrics(url, "num_requests_waiting")).values()):
            assert time.monotonic() < end
            time.sleep(0.2)
        assert [*metrics(url, "kv_cache_usage_perc").values()] == [0]
        with ThreadPoolExecutor(SESSIONS) as pool:
            assert [*pool.map(lambda ids: ask(url, ids), prompts)] == [(200, tokens) for tokens in wanted]
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))

    shutil.copytree(folder / "library-64", library)
    words = ("--max-num-seqs", "9", "--max-num-batched-tokens", "64", "--policies", "knorm")
    with serving(tmp_path, tmp_path / "log", SESSIONS, *words) as (url, process):
        before = memory_after(300)  # what is made once, and what malloc keeps
        assert memory_after(1000) < 1.05 * before


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
    for name, value in (("USAGE_STATS_ENABLED", 0), ("worker_niceness", 0), ("SERVE_PROXY_READY_CHECK_TIMEOUT_S", 120)):
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
        assert ray.cluster_resources()["CPU"] - ray.available_resources()["CPU"] == 5  # as the page says
        until(wanted[:1], lambda: count[200] >= 20)
        assert count.keys() == {200}
        assert 2 * len(prompts) <= 16  # streams of two replicas
        with ThreadPoolExecutor(2 * len(prompts)) as pool:
            begun = threading.Semaphore(0)
            streams = [pool.submit(stream, url, ids, 500, begun.release) for ids in prompts * 2]
            assert all(begun.acquire(timeout=120) for _ in streams)
            (dead := next(iter(replicas()))).kill()
            assert {ending(one.result()) for one in streams} == {"error", "length"}
        until(wanted[:1], lambda: len(replicas() - {dead}) == 2 and count[200] >= 60)
        assert count[500] <= len(prompts)  # those that it was answering
        failed = count[500]
        deploy(folder, tmp_path / "b.yaml", address, port, LESS)
        until(wanted, lambda: [ask(url, ids) for ids in prompts] == [(200, tokens) for tokens in wanted[1]])
        assert count[500] == failed and sum(count.values()) == count[200] + failed
    finally:
        serve.shutdown()
        ray.shutdown()
