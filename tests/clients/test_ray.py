"""Two replicas on two processors behind Ray Serve: they serve, one dies, clients leave."""

from __future__ import annotations

import json
import os

import httpx
import psutil
import pytest
from demo_server import WORDS
from http_bodies import chat, sent, until
from serve_process import free_port

os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray import serve

from locret_kit.serving.ray import app, lacking


@pytest.fixture(scope="module")
def front():
    """The address of two replicas."""
    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        serve.run(app({"replicas": "2", "options": " ".join(WORDS)}))
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def servers() -> dict[psutil.Process, dict[str, float]]:
    """The replicas' servers that are ready, and what each counts."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if "locret_kit.cli.serve" not in " ".join(process.cmdline()):
                continue
            (port,) = [one.laddr.port for one in process.net_connections("tcp") if one.status == "LISTEN"]
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).raise_for_status()
        except (psutil.NoSuchProcess, httpx.HTTPError, ValueError):  # one ends, or is still loading
            continue
        figures = [line.split() for line in answer.text.splitlines() if line.startswith("locret_") and "{" not in line]
        found[process] = {name: float(value) for name, value in figures}
    return found


def count(name: str) -> float:
    """A figure of all servers."""
    return sum(figures[f"locret_{name}"] for figures in servers().values())


def test_a_replica_dies_between_two_turns(front):
    messages = [{"role": "user", "content": f"{'The harbour was quiet. ' * 100} What is the capital of France?"}]
    until(lambda: len(servers()) == 2, 120)
    for turn in range(4):
        if turn == 2:
            max(servers().items(), key=lambda one: one[1]["locret_requests_total"])[0].parent().kill()
        answer = chat(front, messages, max_tokens=12)
        assert answer.status_code == 200, answer.text
        said = answer.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And then? ({turn})"}]
    until(lambda: len(servers()) == 2, 120)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_clients_that_leave_are_noticed(front, stream):
    """Those whose prompts are read, and those that wait behind them."""
    text = " ".join(f"In {1000 + i} the town had {i * i % 977} houses." for i in range(3000))
    body = {"messages": [{"role": "user", "content": f"{stream} {text}"}], "max_tokens": 500, "stream": stream}
    data = json.dumps(body).encode()
    clients = [sent(front, "/v1/chat/completions", data) for _ in range(4)]
    until(lambda: count("requests_running") >= 1 and count("requests_running") + count("requests_waiting") >= 4, 120)
    cancelled = count("cancelled_total")
    for client in clients:
        client.close()
    until(lambda: not count("requests_running") + count("requests_waiting"), 15)
    assert count("cancelled_total") - cancelled >= 4


def test_what_a_cluster_lacks():
    assert lacking(2, {"CPU": 1.0, "GPU": 0.0}, {"CPU": 2.0}) == ""
    said = lacking(2, {"CPU": 1.5, "GPU": 1.0}, {"CPU": 2.0})
    assert "3 CPUs, and the cluster has 2" in said and "2 GPUs, and the cluster has 0" in said
