#!/usr/bin/env bash
# Make constraints.txt anew: one set of versions for Python 3.11 to 3.14, Linux and macOS, by uv's resolver from the ordinary
# package index. Versions in the file stay where they can.
# Usage: scripts/constraints.sh [--upgrade | --upgrade-package NAME ...]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cp constraints.txt "$work/made.txt"
uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --no-header --no-annotate --quiet \
    --output-file "$work/made.txt" "$@" >/dev/null
{
    cat <<'HEAD'
# The versions that this release was tested with, for Python 3.11 to 3.14 on Linux and macOS: pip install -c constraints.txt ...
# Made by scripts/constraints.sh, not by hand; tests/site/test_constraints.py compares pins that name each other.
# No hashes: with one here, pip asks for them everywhere, and refuses an editable install; torch has other files on every index.
HEAD
    # Markers of the environments themselves (pyproject.toml) say nothing here.
    sed -E "s/python_full_version < '3\.15' and //; s/ and \(sys_platform == '(darwin|linux)' or sys_platform == '(darwin|linux)'\)//;
        s/ ; \(sys_platform == '(darwin|linux)' or sys_platform == '(darwin|linux)'\)//" "$work/made.txt"
} >"$work/constraints.txt"
cp "$work/constraints.txt" constraints.txt
