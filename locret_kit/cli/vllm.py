"""``locret-vllm --ckpt heads --budget 4096``: ``vllm serve`` with a page of constant size for each request."""

from __future__ import annotations

import asyncio
import os
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ..config.schema import read
from ..config.serve_options import VLLM, VllmOptions, shared_out
from ..naming import show
from ..vllm.refusals import DOCUMENTS, check_version, refuse
from ..vllm.startup import refusals
from .command import command, load_plugin

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

    from ..vllm.server_settings import ServerSettings

ONCE = 1 << 30
"""Seconds between uvicorn's notices. It counts from 1970, so exactly one comes, at the start."""


def run(args: VllmOptions, theirs: list[str]) -> int:
    """Check everything, then serve until stopped. Raises ValueError or OSError with a one-line message."""
    check_version()
    from vllm.platforms import current_platform

    # What is said already stays. Processes are spawned, as by vllm serve. On a CPU a request for logprobs would wait minutes for
    # a compiler; on a card the newer runner has logits processors of another kind.
    name, value = ("TORCH_COMPILE_DISABLE", "1") if current_platform.is_cpu() else ("VLLM_USE_V2_MODEL_RUNNER", "0")
    for variable, default in (("VLLM_WORKER_MULTIPROC_METHOD", "spawn"), (name, value)):
        os.environ.setdefault(variable, default)
    from vllm.entrypoints.cli.serve import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="locret-vllm"))
    if (named := parser.parse_args(theirs).model_tag) is not None:  # as vllm serve MODEL
        if args.model not in (None, named):
            raise ValueError(f"model={args.model!r} and {named!r}: leave one out")
        args = replace(args, model=named)
    server, model = served_by(args)
    options = parser.parse_args([*theirs, "--model", model])
    page = settle(options, server, args.sessions, theirs)
    validate_parsed_serve_args(options)
    with refusals() as started:
        asyncio.run(serve(options, server, page, started))
    return 0


def served_by(args: VllmOptions) -> tuple[ServerSettings, str]:
    """Settings of the server, and the backbone's name. Raises ValueError or OSError for heads and a policy that do
    not fit each other, or vLLM."""
    from ..backbones.gguf import is_gguf
    from ..backbones.load import resolve_model
    from ..heads import shipped_for
    from ..vllm.server_settings import ServerSettings, VllmSettings, untrained
    from .loading import resolve_choice

    alone = args.model and not args.ckpt and shipped_for(args.model) is None
    policy = args.policy or (untrained() if alone else None)
    chosen = resolve_choice(args.ckpt, args.model, None, policy, args)
    if chosen.adapter is not None:
        raise ValueError(f"adapter={chosen.adapter!r}: vLLM takes weights as they are; merge it into the model first")
    if is_gguf(chosen.backbone):
        raise ValueError(
            f"model={chosen.backbone!r} is a GGUF file, which locret-serve runs: for vLLM name the float model"
        )
    for line in chosen.warnings:
        print(line, file=sys.stderr)
    section = VllmSettings(
        **asdict(args.run), heads=chosen.ckpt, policy=chosen.policy.name, policies=args.policies, documents=args.documents,
        plugin=args.plugin,
    )  # fmt: skip
    return ServerSettings(section), resolve_model(chosen.backbone)


def settle(options: Namespace, server: ServerSettings, sessions: int | None, theirs: list[str]) -> int:
    """Set vLLM's options that depend on the kit's, and refuse contradictions. Returns the bytes of a request's
    pages, or 0 if vLLM keeps states besides them."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from ..backbones.load import choose_precision, load_config, pick_device
    from ..cache.rotation import Positions
    from ..vllm.pages import Ranks
    from ..vllm.server_settings import Pages
    from ..vllm.worker import Worker, engine_options

    refuse(options.__dict__)
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in theirs if word.startswith("--")}
    section, settings, config = server.section, server.settings, load_config(options.model, options.revision)
    options.__dict__.update(engine_options(server, options.additional_config, options.logits_processors))
    if "long_prefill_token_threshold" not in given:  # one long prompt leaves room in a step for others
        options.long_prefill_token_threshold = max(settings.chunk, 512)
    if sessions is not None and "max_num_seqs" not in given:
        options.max_num_seqs = sessions
    if current_platform.is_cpu():
        options.enforce_eager = True
        if options.dtype == "auto":
            precision = choose_precision(pick_device("cpu"))
            options.dtype = str(precision).partition(":")[0]
            print(f"precision: {precision}", file=sys.stderr)
    else:
        options.attention_backend = "CUSTOM"
    overrides, longest = options.hf_overrides or {}, options.max_model_len or 0
    trained = overrides.get("max_position_embeddings", getattr(config, "max_position_embeddings", None))
    places = Positions.parse(settings.positions or "compact", trained or 0)
    if trained is not None and longest > trained and places.span is not None:  # a text may be as long as it likes
        if (reach := places.largest(settings.budget + settings.chunk, longest)) > trained:
            raise ValueError(
                f"max_model_len={longest}: budget={settings.budget}, chunk={settings.chunk} and positions={settings.positions} "
                f"reach {reach} positions, and the model's window has {trained}"
            )
        options.hf_overrides = {**overrides, "max_position_embeddings": longest}
    if section.documents is not None:
        if options.kv_transfer_config is not None:
            raise ValueError("documents=... and --kv-transfer-config: vLLM has one connector: leave one out")
        options.kv_transfer_config = KVTransferConfig(
            kv_connector=DOCUMENTS, kv_connector_module_path="locret_kit.vllm.documents", kv_role="kv_both"
        )
        options.enable_prompt_tokens_details = True  # how much of a prompt was a document's
    model = AsyncEngineArgs.from_cli_args(options).create_model_config()
    facts = {"runner": model.runner_type, "is_hybrid": model.is_hybrid, "documents": section.documents}
    refuse(facts | {"kv_connector": DOCUMENTS})
    if model.is_hybrid and sessions is not None:
        raise ValueError(
            f"sessions={sessions}: layers of this model hold a state besides the pages: give --kv-cache-memory-bytes instead"
        )
    pages = Worker.of(server, model, torch.device("cpu"), Ranks(0, options.tensor_parallel_size)).pages
    each = pages.shape.nbytes * pages.spec.n_layers
    if sessions is not None:
        total, options.kv_cache_memory_bytes = current_platform.get_device_total_memory(), Pages(each, sessions).bytes
        if options.kv_cache_memory_bytes > total:
            most = Pages.within(each, total).requests
            raise ValueError(f"sessions={sessions} must be at most {most}: {show(each)} each, of {show(total)} here")
    return 0 if model.is_hybrid else each


async def serve(options: Namespace, server: ServerSettings, page: int, started: Callable[[], None]) -> None:
    """Serve until stopped. Calls ``started`` when engines are ready, reports when requests are accepted, and how many fit with
    pages of ``page`` bytes. Bounds the answers of a request by the requests that run at once."""
    from vllm.entrypoints.launchers.api_server import entry

    from ..vllm.server_settings import SPARE, Pages

    host = options.host if options.host not in (None, "", "0.0.0.0", "::") else "127.0.0.1"
    where, build = f"[{host}]" if ":" in host else host, entry.build_and_serve

    def announced(engine: EngineClient, *rest: object, **more: object) -> Awaitable[object]:
        async def say() -> None:
            print(f"ready: http://{where}:{options.port}{fit}{read}", file=sys.stderr, flush=True)

        started()
        config = engine.vllm_config
        engines, most = config.parallel_config.data_parallel_size, config.scheduler_config.max_num_seqs
        pages = Pages(page, config.cache_config.num_gpu_blocks - SPARE * engines, engines)
        fit, most = (f", {pages}", min(most * engines, pages.requests)) if page else ("", most * engines)
        read = "" if server.section.documents is None else f", documents: {len(server.documents)}"
        os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(most))
        return build(engine, *rest, callback_notify=say, timeout_notify=ONCE, **more)

    entry.build_and_serve = announced
    await entry.run_server(options)


@command("locret-vllm", also=(RuntimeError, TypeError), usage=2)
def main(argv: list[str] | None = None) -> int:
    """Returns exit status 0; 1 after a reported error, 2 after unknown options, 130 after Ctrl-C."""
    ours, theirs = shared_out(sys.argv[1:] if argv is None else argv)
    args = read(VLLM, ours)
    if args is None:
        return 0
    load_plugin(args)
    return run(args, theirs)


if __name__ == "__main__":
    sys.exit(main())
