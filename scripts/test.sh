#!/usr/bin/env bash
# Every check: style, types, tests. Arguments go to pytest.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
python scripts/fetch_backbone.py
if ! command -v tmux >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then # for the chat's terminal
    { apt-get -qq update && apt-get -qq install --yes tmux; } >&2 || echo "tmux is missing: the chat's tests will fail" >&2
fi
ruff check .
ruff format --check .
mypy
exec python -m pytest -q --numprocesses=auto --maxprocesses=4 --dist=loadfile "$@"
