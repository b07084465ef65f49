#!/usr/bin/env bash
# Every check: style, types, tests. Arguments go to pytest.
# Usage: scripts/test.sh [--fast | --all | --changed [COMMIT]] [ARGUMENTS]
# --changed runs the test files that reach what differs from a commit (HEAD: what is not committed yet): imports say which.
# --fast runs a sample of the tests (tests/conftest.py says which): three minutes on two cores, without the demo backbone, a
# browser or a terminal. --all runs every size of a grid, where one stands for the others, and more examples of hypothesis.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
if [ "${1:-}" != --fast ]; then
    python scripts/fetch_backbone.py
    missing=()
    command -v chromium >/dev/null || missing+=(chromium) # the pages' browser
    if [ ${#missing[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        { apt-get -qq update && apt-get -qq install --yes "${missing[@]}"; } >&2 || echo "${missing[*]}: not installed" >&2
    fi
fi
unset PYTHONDONTWRITEBYTECODE # each process would compile every module, and each run rewrite all assertions
ruff check .
ruff format --check .
# Types are checked beside the tests. Tests wait for other processes now and then: one more worker than cores.
types="$(mktemp)"
mypy >"$types" 2>&1 &
checking=$!
failed=0
python -m pytest -q --numprocesses=$(($(nproc) < 4 ? $(nproc) + 1 : 4)) --dist=loadfile --no-loadscope-reorder "$@" || failed=$?
wait "$checking" || { cat "$types" >&2; failed=1; }
rm -f "$types"
exit "$failed"
