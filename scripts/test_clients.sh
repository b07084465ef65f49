#!/usr/bin/env bash
# Tests of other people's programs (tests/clients/), over the demo backbone: LangChain, llm, lm-evaluation-harness and nginx against
# locret-serve at a real port, kvpress, and Vercel's client with models that think and call tools.
# They take some ten minutes on two cores.
# They have an environment of their own, beside the packages of the project's (scripts/setup.sh): 400 MB and a minute to make, once.
# nginx, node and npm are taken from PATH: apt-get install nginx-light nodejs npm.
# Usage: scripts/test_clients.sh [ARGUMENTS of pytest]
# LOCRET_CLIENTS_VENV=FOLDER is the environment, by default .venv-clients; PYTHON=FILE the project's python, by default .venv's.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${LOCRET_CLIENTS_VENV:-$root/.venv-clients}"
python="${PYTHON:-$root/.venv/bin/python}"
clients=(langchain-openai==1.7.4 llm==0.36)

stamp="$venv/.locret-clients"
packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
want="$(sha256sum "${BASH_SOURCE[0]}" | cut -d ' ' -f 1) $packages"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$want" ]; then
    echo "test_clients: making $venv" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    # The project's own packages are found there, so that only the clients are installed here.
    echo "import site; site.addsitedir('$packages')" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
    "$venv/bin/python" -m pip install --quiet --no-input "${clients[@]}"
    "$venv/bin/python" -m pip install --quiet --no-input --no-deps kvpress==0.5.5 cachetools fire termcolor # it pins transformers
    npm install --silent --prefix "$venv/node" ai@5.0.277 @ai-sdk/openai-compatible@1.0.61 zod@3.25.76
    echo "$want" >"$stamp"
fi
cd "$root"
"$venv/bin/python" scripts/fetch_backbone.py
export PATH="$venv/bin:$PATH:/usr/sbin" PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
export LOCRET_NODE_PACKAGES="$venv/node"
exec "$venv/bin/python" -m pytest -q -p no:cacheprovider -n 0 --confcutdir=tests/clients tests/clients "$@"
