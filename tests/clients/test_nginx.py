"""A prompt that takes longer to read than a proxy waits for a byte."""

import json
import subprocess
import time

import httpx
import pytest
from serve_process import free_port

SILENCE = 10
CONFIG = """daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port}; client_max_body_size 64m; proxy_read_timeout {silence}s;
        location / {{ proxy_pass {url}; proxy_set_header Host $http_host; }}
    }}
}}
"""


def long_text(begin: int) -> str:
    """About 40,000 tokens, with one fact in their middle."""
    lines = [f"In {begin + i} the town had {i * i % 977} houses and a harbour." for i in range(2000)]
    lines.insert(1000, "The keeper of the lighthouse was called Osbert.")
    return " ".join(lines)


@pytest.fixture
def proxy(url, tmp_path):
    """The address of an nginx before the server."""
    port = free_port()
    config = CONFIG.format(folder=tmp_path, port=port, silence=SILENCE, url=url)
    (tmp_path / "nginx.conf").write_text(config)
    nginx = subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")])
    try:
        for _ in range(100):
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        nginx.terminate()
        nginx.wait(10)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_long_prompt_behind_a_proxy_that_cuts(proxy, stream):
    text = long_text(1000 + stream)  # no two begin alike, so each is read
    messages = [{"role": "user", "content": f"{text}\nHow is the keeper of the lighthouse called?"}]
    began, said = time.monotonic(), b""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "stream": stream}
    with httpx.stream("POST", f"{proxy}/v1/chat/completions", json=body, timeout=600) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_raw():
            said += piece
    last = said.decode().split("data: ")[-2] if stream else said.decode()
    choice = json.loads(last)["choices"][0]
    assert choice["finish_reason"] in ("stop", "length")
    assert time.monotonic() - began > 1.5 * SILENCE, "read before the proxy would have cut: a longer text is needed"
