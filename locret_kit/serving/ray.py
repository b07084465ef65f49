"""Several servers behind one port, on Ray Serve: ``serve run locret_kit.serving.ray:app replicas=2 options="--ckpt heads ..."``.

Each replica is a ``locret-serve`` in a process of its own, and knows nothing of the others: another replica reads a conversation
anew, and has no document of this one. A front passes requests on; keys, bounds and errors are the servers' own.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Mapping

import httpx
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..processes import python

LOG = logging.getLogger("ray.serve")
BODY = 256 << 20
"""Bytes of a request's body, at most; the servers' own bounds are below."""
TRIES = 3
"""Replicas that are asked before an answer has begun."""
LEASH = "import ctypes, signal; ctypes.CDLL(None).prctl(1, signal.SIGTERM)"
"""Asks Linux for a SIGTERM when the thread that started this process ends (PR_SET_PDEATHSIG)."""
HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "content-length", "server", "date"}
"""Headers that are of one connection. ``Host`` goes on to the server, which checks it."""


class Child:
    """``locret-serve`` in a process that ends when this one does.

    Raises:
        RuntimeError: it ended before it was ready.
    """

    def __init__(self, words: list[str]) -> None:
        self.url = ""
        self.process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._said = threading.Event()
        # The kernel tells the child when the thread that has started it ends, so that thread stays.
        threading.Thread(target=self._run, args=(words,), name="locret-serve", daemon=True).start()
        self._said.wait()
        while self.alive:
            try:
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise RuntimeError(" ".join(self._lines[-3:]) or "locret-serve has ended")

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def _run(self, words: list[str]) -> None:
        command = python("locret_kit.cli.serve", *words, "--host", "127.0.0.1", "--port", "0", before=LEASH)
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines = [*self._lines[-20:], line.strip()]
            if not self.url and line.startswith("http://"):
                self.url = line.strip()
                self._said.set()
            else:
                LOG.info("%s", line.strip())
        self.process.wait()
        self._said.set()

    def stop(self) -> None:
        """Tell it to stop."""
        if self.process is not None:
            self.process.terminate()


class Replica:
    """One server. ``words``: of ``locret-serve``."""

    def __init__(self, words: list[str]) -> None:
        self._child = Child(words)
        limits = httpx.Limits(max_connections=None)  # the server bounds requests itself, and says so
        self._client = httpx.AsyncClient(base_url=self._child.url, timeout=httpx.Timeout(10, read=None), limits=limits)

    def __del__(self) -> None:
        self._child.stop()

    async def check_health(self) -> None:
        """Raise RuntimeError where the server has ended: Ray starts another replica then."""
        if not self._child.alive:
            raise RuntimeError("locret-serve has ended")

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> AsyncIterator[tuple[int, dict[str, str]] | bytes]:
        """The server's status and headers, then the bytes of its answer as they come."""
        async with self._client.stream(method, path, headers=headers, content=body) as answer:
            yield answer.status_code, {name: value for name, value in answer.headers.items() if name not in HOP}
            async for piece in answer.aiter_raw():
                yield piece


class Front:
    """Takes requests and has replicas answer them. It says what the cluster lacks for them, which Ray waits for in silence.

    Args:
        number: of replicas, each of which needs ``cpus`` and ``gpus``.
    """

    def __init__(self, replicas: DeploymentHandle, number: int, cpus: float, gpus: float) -> None:
        self._replicas = replicas
        if said := lacking(number, {"CPU": cpus, "GPU": gpus}, ray.cluster_resources()):
            LOG.warning("%s", said)

    async def __call__(self, request: Request) -> Response:
        """An answer as the replica's server gives it, streamed or whole."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > BODY:
                return problem(413, f"the body must be at most {BODY} bytes")
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        asked = self._replicas.options(stream=True).answer
        for _ in range(TRIES):
            pieces = asked.remote(request.method, path, headers, bytes(body))
            try:
                status, said = await anext(pieces)
            except RayActorError:  # the replica has died before it said anything, and another may be asked
                continue
            return StreamingResponse(pieces, status, said)
        return problem(503, "the replica that was asked has died; try again")


def problem(status: int, message: str) -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse(
        {"error": {"message": message, "type": "server_error", "param": None, "code": None}}, status,
        {"retry-after": "1"} if status == 503 else None,
    )  # fmt: skip


def lacking(replicas: int, each: Mapping[str, float], cluster: Mapping[str, float]) -> str:
    """What a cluster lacks for as many replicas, in one sentence; '' where it lacks nothing."""
    lacks = [
        f"{replicas * amount:g} {name}s, and the cluster has {cluster.get(name, 0):g}"
        for name, amount in each.items()
        if replicas * amount > cluster.get(name, 0)
    ]
    if not lacks:
        return ""
    return f"replicas={replicas} need {'; '.join(lacks)}: those that find none wait for it. Give fewer, or cpus=0.5 for each"


def app(args: dict[str, str]) -> serve.Application:
    """The application of ``serve run``.

    Args:
        args: ``options``: words of ``locret-serve``. ``replicas``: their number. ``cpus``, ``gpus``: of each.

    Raises:
        ValueError: an unknown name, or --session-dir.
    """
    given = {"options": "", "replicas": "1", "cpus": "1", "gpus": "0"}
    for name in args:
        if name not in given:
            raise ValueError(f"unknown argument {name!r}. There are: {', '.join(given)}.")
    given |= args
    words = shlex.split(given["options"])
    if any(word.lstrip("-").partition("=")[0].replace("-", "_") == "session_dir" for word in words):
        raise ValueError("options have --session-dir, which is one server's: replicas keep conversations in memory")
    number = int(given["replicas"])
    actor = {"num_cpus": float(given["cpus"]), "num_gpus": float(given["gpus"])}
    deployed = serve.deployment(
        Replica, name="Replica", num_replicas=number, max_ongoing_requests=1000, health_check_period_s=2,
        graceful_shutdown_timeout_s=30, ray_actor_options=actor,
    )  # fmt: skip
    # A front passes bytes on: it takes no processor from the replicas.
    front = serve.deployment(Front, name="Front", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})
    return front.bind(deployed.bind(words), number, actor["num_cpus"], actor["num_gpus"])
