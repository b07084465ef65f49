"""``locret-serve --ckpt heads --port 8000``: OpenAI's protocol over bounded caches."""

from __future__ import annotations

import logging
import math
import re
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.serve_options import SERVE, ServeOptions
from ..naming import last_part, parse_bytes, prefixed_errors
from ..settings import read_protect
from .command import entry, note

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from ..serving.process import LoadingApp

ORIGIN = re.compile(r"https?://[^/?#\s*]+|null")
"""An origin as browsers write it."""
LAST = 30
"""Seconds after the grace for a forward to end, files to be written and last responses to be sent."""


def keys_of(args: ServeOptions) -> tuple[str, ...]:
    """The API keys. Raises ValueError if the file has none or cannot be read."""
    if args.api_key_file is None:
        return ()
    with prefixed_errors(f"api_key_file={args.api_key_file!r} cannot be read", OSError, UnicodeDecodeError):
        lines = Path(args.api_key_file).read_text(encoding="utf-8-sig").splitlines()
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ValueError(f"api_key_file={args.api_key_file!r} holds no key")
    return keys


def hosts_of(args: ServeOptions) -> frozenset[str]:
    """Host names of the server. Raises ValueError for a text that is neither a name nor an address."""
    from ..serving.process import ANY, name_of

    names = set()
    for option, given in (("host", args.host), *(("allowed_hosts", given) for given in args.allowed_hosts)):
        name = given if given == ANY else name_of(given) or name_of(f"[{given}]")
        if not name:
            raise ValueError(f"{option}={given!r} must be a name or an address, such as example.org")
        names.add(name)
    return frozenset(names)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ValueError with host and port."""
    with prefixed_errors(f"cannot listen on host={host} port={port}", OSError):
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def run(args: ServeOptions) -> int:
    """Listen, load, serve. Raises ValueError or OSError with a one-line message."""
    import uvicorn

    from ..serving.process import ANY, HeaderTimeout, LoadingApp, Stoppable

    if isinstance(args.budget, float):
        raise ValueError(f"budget={args.budget}: a session's slots must be known before the start: give an integer")
    if read_protect(args.run.protect) - {"first"}:
        raise ValueError(f"protect={args.run.protect!r}: the server supports 'first' only")
    keys, hosts = keys_of(args), hosts_of(args)
    if wrong := next((origin for origin in args.cors_origins if origin != ANY and not ORIGIN.fullmatch(origin)), None):
        raise ValueError(f"cors_origins={wrong!r} must be an origin, such as http://localhost:3000, or *")
    loading = LoadingApp()
    failed: list[Exception] = []

    def opened() -> None:
        try:
            note(f"ready: {load(args, keys, hosts, loading, address)}")
        except Exception as error:
            failed.append(error)
            served.should_exit = True

    with listen(args.host, args.port) as listener:
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
        config = uvicorn.Config(  # uvicorn's own log_config would close the handlers of others
            loading, http=HeaderTimeout, ws="none", lifespan="off", log_config=None, log_level="warning", access_log=False,
            timeout_graceful_shutdown=math.ceil(args.grace) + LAST,
        )  # fmt: skip
        served = Stoppable(config, lambda: loading.stop(args.grace))
        threading.Thread(target=opened, name="locret-load", daemon=True).start()  # Ctrl-C does not wait for it
        served.run([listener])
    if failed:
        raise failed[0]
    return 0


def load(args: ServeOptions, keys: tuple[str, ...], hosts: frozenset[str], loading: LoadingApp, address: str) -> str:
    """Load the model, build the server and install it for requests; returns a description of it. The address is said where all
    that is named is there. Raises ValueError, OSError."""
    from ..answers.forms import UNKNOWN, answer_form
    from ..backbones.probe import describe
    from ..planning.inference_plan import Setting
    from ..planning.server_caches import Caches, refuse_unbounded
    from ..policies.grammar import parse_policy
    from ..serving.app import make_app
    from ..serving.engine_thread import EngineThread
    from ..serving.process import give_back
    from ..serving.state import Limits, Server
    from ..serving.store import Store
    from .loading import resolve_choice

    policies = [parse_policy(name) for name in args.policies]
    chosen = resolve_choice(args.ckpt, args.model, args.adapter, args.policy, args)
    refuse_unbounded(chosen.policy, *policies)
    name = args.model_name or last_part(args.ckpt or chosen.backbone)
    limits = Limits(
        args.max_prompt_tokens, args.max_answer_tokens, documents=args.documents, strict=args.strict_max_tokens
    )
    server = Server(None, name, keys, tuple(args.policies), limits, hosts, frozenset(args.cors_origins))
    store = None
    if args.session_dir is not None:
        store = Store(args.session_dir, parse_bytes(args.session_disk, "session_disk"))
        server.salt = store.salt
    tokenizer = chosen.open_tokenizer(args)
    note(address)
    loading.stop, loading.app = server.stop, make_app(server)
    model, _ = chosen.load(args, tokenizer)
    server.defaults = sampling_defaults(args, model.generation_config)
    engine = EngineThread(
        model, tokenizer, args.run, chosen.policy, chosen.heads, sessions=args.sessions,
        store=store, policies=policies, shared_prefixes=args.shared_prefixes, thoughts=args.thoughts,
        document_budget=args.document_budget, published=chosen.published,
    )  # fmt: skip
    spec, dtype = describe(model).spec, str(model.dtype).removeprefix("torch.")
    largest = Setting(args.max_prompt_tokens, engine.settings_for(engine.document_budget), dtype=dtype)
    caches = Caches.of(
        spec, largest, engine.spec.policies, args.sessions, args.documents, args.shared_prefixes, args.thoughts
    )
    server.limits = replace(limits, upload_bytes=max(limits.upload_bytes, 2 * (caches.each + caches.stored)))
    server.restore(engine)
    give_back(server.ended)
    server.engine = engine
    known = answer_form(tokenizer, tools=True).calls != UNKNOWN
    form = "" if known else "; its form of tool calls is unknown: calls stay text"
    return f"{name}, {caches}; temperature {server.defaults.get('temperature', 1):g} where a request has none{form}"


def sampling_defaults(args: ServeOptions, generation: GenerationConfig | None) -> dict[str, float]:
    """Default sampling of requests: from an option, or from a backbone whose generation_config.json samples."""
    from ..serving.bodies import DEFAULTS

    chosen = generation.to_diff_dict() if generation is not None and generation.do_sample else {}
    if args.temperature is not None:
        chosen["temperature"] = args.temperature
    return {name: float(chosen[name]) for name in DEFAULTS if chosen.get(name) is not None}


main = entry(SERVE, run, also=(RuntimeError,))


if __name__ == "__main__":
    sys.exit(main())
