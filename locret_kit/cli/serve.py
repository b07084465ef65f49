"""``locret-serve --ckpt heads --port 8000``: OpenAI's protocol over bounded caches."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from pathlib import Path

from ..config.reader import read
from ..config.serve import SERVE, ServeOptions
from .command import command
from .loading import check_run, choose


def keys_of(args: ServeOptions) -> tuple[str, ...]:
    """The API keys. Raises ValueError for a file without any, or one that cannot be read."""
    if args.api_key_file is None:
        return ()
    try:
        lines = Path(args.api_key_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file={args.api_key_file!r} cannot be read") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ValueError(f"api_key_file={args.api_key_file!r} holds no key")
    return keys


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError, naming both."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"host={host} port={port} cannot be listened on: {error.strerror}") from error


def run(args: ServeOptions) -> int:
    """Listen, load, serve. Raises ValueError or OSError with a one-line message."""
    import uvicorn

    from ..policies.grammar import parse_policy
    from ..serving.app import Limits, Server, make_app
    from ..serving.engine import Engine

    if isinstance(args.budget, float):
        raise ValueError(f"budget={args.budget}: a session's slots must be known before the start: give an integer")
    keys = keys_of(args)
    for name in args.policies:
        parse_policy(name)
    chosen = choose(args.ckpt, args.model, args.adapter, args.policy, args.kv_bits)
    check_run(args, chosen.config)
    name = args.model_name or Path(args.ckpt or chosen.backbone).name
    limits = Limits(args.max_prompt_tokens, args.max_answer_tokens, documents=args.documents)
    server = Server(None, name, keys, tuple(args.policies), limits)

    def load() -> Engine:
        model, tokenizer = chosen.load(args)
        settings = args.run.resolved(chosen.config.inference if chosen.config else {}, None).run
        return Engine(model, tokenizer, settings, chosen.policy, chosen.heads, sessions=args.sessions, queue=args.queue)

    async def start() -> None:
        try:
            server.engine = await asyncio.to_thread(load)
        except Exception as error:
            failed.append(error)
            uvicorn_server.should_exit = True
            return
        print(f"ready: {name}, {args.sessions} sessions", file=sys.stderr, flush=True)

    failed: list[Exception] = []
    with listen(args.host, args.port) as listener:
        host = f"[{args.host}]" if ":" in args.host else args.host
        print(f"http://{host}:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        config = uvicorn.Config(
            make_app(server, start), log_level="warning", access_log=False, timeout_graceful_shutdown=10
        )
        uvicorn_server = uvicorn.Server(config)
        uvicorn_server.run([listener])
    if failed:
        raise failed[0]
    return 0


@command("locret-serve", also=(RuntimeError,), usage=2)
def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 after an error said in one line, 2 after words that are no options; 130 after Ctrl-C."""
    args = read(SERVE, sys.argv[1:] if argv is None else argv)
    if args is None:
        return 0
    args.load_plugin()
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
