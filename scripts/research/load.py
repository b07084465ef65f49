"""Last used 2026-11-23, for docs/results/serving.md.

Measure a server under load: write tables of docs/results/serving.md.

    python scripts/research/load.py run --ckpt HEADS --mix mixed --requests 60 --clients 16 -o ours.json
    python scripts/research/load.py run --ckpt HEADS --mix mixed --requests 60 --clients 16 --server transformers -o theirs.json
    python scripts/research/load.py check ours.json --ckpt HEADS          # each answer against that request alone
    python scripts/research/load.py page load ours.json theirs.json

``run`` starts a server in a process of its own, on loopback: ``locret-serve``, or ``transformers serve`` with the same
backbone, both in float32. A closed loop has ``--clients`` clients that each wait for their answer; an open one (``--rate``)
sends as many requests per second whether answers come or not. Prompts are stretches of the Jargon File whose lengths, seed
and order the mix fixes; answers are greedy. ``--most-seconds`` ends a run, whatever is still missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from transformers import AutoConfig, AutoTokenizer

from locret_kit import BoundedCache, RetainingHeads
from locret_kit.backbones.load import load_backbone, resolve_model
from locret_kit.files import write_text
from locret_kit.planning.backbone_sizes import BackboneSizes
from locret_kit.planning.inference_plan import Setting, plan_inference
from locret_kit.runtime.provenance import versions
from locret_kit.runtime.session import generate
from locret_kit.samples.haystack import load_text
from locret_kit.settings import RunSettings
from locret_kit.text.template import render_messages

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "serving.md"
HOST = "127.0.0.1"
QUESTION = "\n\nWhat is this text about?"
SAMPLE_SECONDS = 0.1
"""Between two looks at the server's memory."""
MOST_REQUESTS = 1000


@dataclass(frozen=True)
class Mix:
    """Lengths in tokens, from and to: of prompts (uniform in the logarithm) and of answers."""

    prompts: tuple[int, int]
    answers: tuple[int, int]
    seed: int


MIXES = {
    "mixed": Mix((256, 8000), (16, 64), 20),
    "short": Mix((64, 512), (32, 128), 21),
    "decoding": Mix((64, 128), (128, 128), 22),
}


@dataclass(frozen=True)
class Ask:
    """One request."""

    text: str
    new: int
    at: float
    """Seconds after the start, in an open loop."""

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]


@dataclass
class Outcome:
    """What became of a request. Times are seconds after it was sent."""

    status: int = 0
    """Of HTTP; 0 where the run ended before, or the connection broke."""
    text: str = ""
    times: list[float] = field(default_factory=list)
    """When each piece of text came."""
    prompt_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    done: bool = False
    right: bool | None = None
    """Whether that request alone has the same answer; None where that was not checked."""


def asks(mix: Mix, tokenizer: Any, count: int, rate: float | None) -> list[Ask]:
    """The requests of a mix."""
    ids = tokenizer(load_text("jargon"), verbose=False).input_ids
    rng, found, at = random.Random(mix.seed), [], 0.0
    for _ in range(count):
        length = int(math.exp(rng.uniform(*(math.log(n) for n in mix.prompts))))
        start = rng.randrange(len(ids) - length)
        text = tokenizer.decode(ids[start : start + length]) + QUESTION
        found.append(Ask(text, rng.randint(*mix.answers), at))
        at += rng.expovariate(rate) if rate else 0.0
    return found


# ---- servers ---------------------------------------------------------------------------------------------------------


class Server:
    """A server in a process of its own."""

    def __init__(self, words: Sequence[str], port: int, log: Path) -> None:
        self.words, self.url, self.log = list(words), f"http://{HOST}:{port}", log
        with log.open("wb") as out:
            self._running = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self._process = psutil.Process(self._running.pid)

    def wait(self, seconds: float = 300.0) -> None:
        """Until it answers. Raises RuntimeError where it ends before, or takes longer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._running.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"{shlex.join(self.words)} does not answer: {self.log.read_text()[-2000:]}")

    def memory(self) -> int:
        """Resident bytes, those of its children too."""
        found = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                found += process.memory_info().rss
        return found

    def cpu_seconds(self) -> float:
        """Of the process so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        self._running.terminate()
        try:
            self._running.wait(30)
        except subprocess.TimeoutExpired:
            self._running.kill()
            self._running.wait()


def start(args: argparse.Namespace, backbone: str, folder: Path) -> Server:
    """A fresh server at a free port."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    bind = ("--host", HOST, "--port", str(port))
    if args.server == "locret":
        words = [sys.executable, "-m", "locret_kit.cli.serve", "--ckpt", args.ckpt, "--dtype", "float32"]
        words += ["--sessions", str(args.sessions), "--queue", str(args.queue), *bind, *args.more]
    else:
        program = Path(sys.executable).with_name("transformers")
        words = [str(program), "serve", backbone, "--device", "cpu", "--dtype", "float32", *bind, *args.more]
    return Server(words, port, folder / "server.log")


def planned(args: argparse.Namespace, heads: RetainingHeads, ready: int, backbone: str) -> dict[str, int]:
    """Bytes that ``locret-serve`` should need at most: as it was when it was ready, its caches, and the widest moment of a
    forward with the mask that a CPU's attention takes. ``locret-plan`` counts the same."""
    setting = Setting(
        MIXES["mixed"].prompts[1], RunSettings().resolved(heads.config.inference, None).run, dtype="float32",
        d_hidden=heads.config.d_hidden,
    )  # fmt: skip
    plan = plan_inference(BackboneSizes.of(AutoConfig.from_pretrained(backbone)), setting)
    mask = 2 * 4 * setting.chunk * (setting.budget + setting.chunk)  # PyTorch's own copy too
    parts = {"ready": ready, "caches": args.sessions * plan.cache, "forward": plan.workspace + mask}
    return parts | {"all": sum(parts.values())}


# ---- clients ---------------------------------------------------------------------------------------------------------


async def answer(client: httpx.AsyncClient, ask: Ask, model: str, outcome: Outcome, *, usage: bool) -> None:
    """Send one request and follow its stream. ``usage``: whether the server must be asked for it."""
    body: dict[str, object] = {"model": model, "messages": ask.messages, "max_tokens": ask.new, "temperature": 0}
    body |= {"stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}
    began = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            outcome.status = response.status_code
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return
                found = event.get("usage") or {}
                outcome.prompt_tokens = found.get("prompt_tokens", outcome.prompt_tokens)
                outcome.new_tokens = found.get("completion_tokens", outcome.new_tokens)
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        outcome.text += piece
                        outcome.times.append(time.perf_counter() - began)
                    outcome.done = outcome.done or choice.get("finish_reason") is not None
    except httpx.TransportError as error:
        print(f"a connection broke: {error!r}", file=sys.stderr)
    finally:
        outcome.seconds = time.perf_counter() - began


async def drive(args: argparse.Namespace, server: Server, found: list[Ask], model: str) -> dict[str, Any]:
    """All requests, and the server's memory meanwhile."""
    outcomes = [Outcome() for _ in found]
    memory: list[int] = []
    limits = httpx.Limits(max_connections=None)
    timeout = httpx.Timeout(10.0, read=None)

    async def watch() -> None:
        while True:
            memory.append(await asyncio.to_thread(server.memory))
            await asyncio.sleep(SAMPLE_SECONDS)

    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=timeout) as client:

        async def one(number: int) -> None:
            await answer(client, found[number], model, outcomes[number], usage=args.server == "locret")

        async def closed(numbers: Iterator[int]) -> None:
            for number in numbers:  # shared: each client takes the next request
                await one(number)

        async def opened(number: int) -> None:
            await asyncio.sleep(found[number].at)
            await one(number)

        watching, began, before = asyncio.create_task(watch()), time.perf_counter(), server.cpu_seconds()
        numbers = iter(range(len(found)))
        work = [opened(number) for number in numbers] if args.rate else [closed(numbers) for _ in range(args.clients)]
        try:
            await asyncio.wait_for(asyncio.gather(*work), args.most_seconds)
        except TimeoutError:
            print(f"cut off after {args.most_seconds} s", file=sys.stderr)
        seconds, cpu = time.perf_counter() - began, server.cpu_seconds() - before
        watching.cancel()
    return {"seconds": seconds, "cpu": cpu, "memory": memory, "outcomes": [asdict(outcome) for outcome in outcomes]}


def machine() -> str:
    """Cores, and the threads that each server's OpenMP takes."""
    cores = os.cpu_count()
    return f"{cores} CPU cores ({platform.machine()}), {os.environ.get('OMP_NUM_THREADS', cores)} threads"


def run(args: argparse.Namespace) -> None:
    """One server, one mix."""
    heads = RetainingHeads.from_pretrained(args.ckpt)
    backbone = resolve_model(heads.config.backbone)
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    found = asks(MIXES[args.mix], tokenizer, args.requests, args.rate)
    model = backbone if args.server == "transformers" else ""
    with tempfile.TemporaryDirectory() as folder:
        server = start(args, backbone, Path(folder))
        try:
            server.wait()
            # The first forward of a process takes memory and time of its own; a budget of its own leaves no cache waiting.
            warm = {
                "model": model,
                "messages": [{"role": "user", "content": "Hello"}],
                "max_tokens": 2,
                "temperature": 0,
            }
            own = {"budget": 1023} if args.server == "locret" else {}
            httpx.post(f"{server.url}/v1/chat/completions", json=warm | own, timeout=120).raise_for_status()
            time.sleep(1.5)  # what it freed goes back to the system within half a second
            ready = server.memory()
            made = asyncio.run(drive(args, server, found, model))
        finally:
            server.stop()
    loop = f"{args.rate} requests per second" if args.rate else str(args.clients)
    made |= {
        "server": args.server, "mix": args.mix, "loop": loop, "rate": args.rate, "requests": args.requests,
        "command": shlex.join(["python", "scripts/research/load.py", *sys.argv[1:]]), "date": time.strftime("%Y-%m-%d"),
        "versions": versions(), "machine": machine(),
        "load": round(os.getloadavg()[1], 1), "ready": ready, "sessions": args.sessions,
        "planned": planned(args, heads, ready, backbone) if args.server == "locret" else None,
    }  # fmt: skip
    write_text(Path(args.out), json.dumps(made))
    print("\n".join(f"{name}: {value}" for name, value in figures(made).items()))


# ---- right or wrong ---------------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> None:
    """Compare answers of ``locret-serve`` with runs of their own, short prompts first; the file gains what was found, request
    by request."""
    path = Path(args.file)
    made = json.loads(path.read_text(encoding="utf-8"))
    heads = RetainingHeads.from_pretrained(args.ckpt)
    model, tokenizer = load_backbone(resolve_model(heads.config.backbone), dtype="float32", device="cpu")
    found = asks(MIXES[made["mix"]], tokenizer, made["requests"], made["rate"])
    pairs = [pair for pair in zip(found, made["outcomes"], strict=True) if pair[1]["done"]]
    for ask, outcome in sorted(pairs, key=lambda pair: pair[1]["prompt_tokens"])[: args.most]:
        ids = tokenizer(render_messages(tokenizer, ask.messages)[1], add_special_tokens=False).input_ids
        cache = BoundedCache(None, None, heads, prompt_length=len(ids))
        alone, _ = generate(model, tokenizer, ids, cache, max_new_tokens=ask.new)
        outcome["right"] = alone == outcome["text"]
        print(f"{len(ids)} tokens: {'right' if outcome['right'] else 'another answer'}", file=sys.stderr, flush=True)
        write_text(path, json.dumps(made))


# ---- the page --------------------------------------------------------------------------------------------------------


def percentiles(values: Sequence[float]) -> str:
    """p50, p95 and p99."""
    if not values:
        return "-"
    rank = sorted(values)
    return " / ".join(f"{rank[min(len(rank) - 1, math.ceil(p * len(rank)) - 1)]:.2f}" for p in (0.5, 0.95, 0.99))


def mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def figures(made: dict[str, Any]) -> dict[str, str]:
    """Rows of the table."""
    outcomes = made["outcomes"]
    done = [one for one in outcomes if one["done"]]
    refused = sum(one["status"] == 429 for one in outcomes)
    checked = [one["right"] for one in outcomes if one["right"] is not None]
    gaps = [b - a for one in done for a, b in zip(one["times"], one["times"][1:], strict=False)]
    plan, peak, seconds = made["planned"], max(made["memory"]), made["seconds"]
    read = sum(one["prompt_tokens"] for one in done)
    # Of an answer that was cut off the server says no number: a piece of text is a token, but for parts of characters.
    new = sum(one["new_tokens"] if one["done"] else len(one["times"]) for one in outcomes)
    return {
        "clients": made["loop"],
        "answered": f"{len(done)} of {len(outcomes)}",
        "refused (429)": str(refused),
        "failed or cut off": str(len(outcomes) - len(done) - refused),
        "the same as that request alone": f"{sum(checked)} of {len(checked)}" if checked else "not checked",
        "seconds": f"{seconds:.0f}",
        "CPU seconds of the server": f"{made['cpu']:.0f}",
        "prompt tokens of whole answers": str(read),
        "new tokens": str(new),
        "new tokens per second": f"{new / seconds:.2f}",
        "new tokens per CPU second": f"{new / made['cpu']:.2f}",
        "seconds to the first token, p50 / p95 / p99": percentiles([one["times"][0] for one in done if one["times"]]),
        "seconds between tokens, p50 / p95 / p99": percentiles(gaps),
        "resident memory when ready": mib(made["ready"]),
        "resident memory, largest": mib(peak),
        "planned": f"{mib(plan['all'])} ({mib(plan['caches'])} of caches)" if plan else "-",
        "largest, of what was planned": f"{peak / plan['all']:.2f}" if plan else "-",
    }


def page(args: argparse.Namespace) -> None:
    """Rewrite one block of the page: a column for each run."""
    runs = [json.loads(Path(file).read_text(encoding="utf-8")) for file in args.files]
    names = {"locret": "locret-serve", "transformers": "transformers serve"}
    columns = [figures(made) for made in runs]
    first, found = runs[0], runs[0]["versions"]
    lengths = [one["prompt_tokens"] for made in runs for one in made["outcomes"] if one["done"]]
    lines = [
        f"{first['date']}, commit {found.get('commit', found['locret_kit'])}, torch {found['torch']}, transformers "
        f"{found['transformers']}, float32, {first['machine']}, load {first['load']} (5 minutes). Mix `{first['mix']}`: "
        f"prompts of {min(lengths)} to {max(lengths)} tokens.",
        "",
        "```bash",
        *(made["command"] for made in runs),
        "```",
        "",
        "| | " + " | ".join(names[made["server"]] for made in runs) + " |",
        "|---" * (len(runs) + 1) + "|",
        *(f"| {name} | " + " | ".join(column[name] for column in columns) + " |" for name in columns[0]),
    ]
    begin, end = f"<!-- {args.name}:begin -->", f"<!-- {args.name}:end -->"
    head, rest = PAGE.read_text(encoding="utf-8").split(begin)
    write_text(PAGE, f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end)[1]}")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    load = commands.add_parser("run", help="start a server and load it")
    load.add_argument("--ckpt", required=True)
    load.add_argument("--server", choices=["locret", "transformers"], default="locret")
    load.add_argument("--mix", choices=list(MIXES), default="mixed")
    load.add_argument("--requests", type=int, default=200)
    load.add_argument("--clients", type=int, default=16)
    load.add_argument("--rate", type=float, help="requests per second: an open loop")
    load.add_argument("--most-seconds", type=float, default=1800.0)
    load.add_argument("--sessions", type=int, default=8)
    load.add_argument("--queue", type=int, default=64)
    load.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="options for the server, after all others")
    load.add_argument("-o", "--out", required=True)
    load.set_defaults(do=run)
    right = commands.add_parser("check", help="compare answers with each request alone")
    right.add_argument("file")
    right.add_argument("--ckpt", required=True)
    right.add_argument("--most", type=int, default=MOST_REQUESTS)
    right.set_defaults(do=check)
    table = commands.add_parser("page", help="write a table")
    table.add_argument("name", choices=["load", "open", "decoding"])
    table.add_argument("files", nargs="+")
    table.set_defaults(do=page)
    args = parser.parse_args()
    if getattr(args, "requests", 1) not in range(1, MOST_REQUESTS + 1):
        parser.error(f"--requests={args.requests} must be from 1 to {MOST_REQUESTS}")
    args.do(args)


if __name__ == "__main__":
    main()
