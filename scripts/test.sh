#!/usr/bin/env bash
# Every check: style, types, tests. Arguments go to pytest.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
python scripts/fetch_backbone.py
ruff check .
ruff format --check .
mypy
exec python -m pytest -q --numprocesses=auto --maxprocesses=4 --dist=loadfile "$@"
