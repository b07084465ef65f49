#!/usr/bin/env bash
# Install the project and its development tools, once: into the active virtual environment, else into .venv.
# LOCRET_EXTRAS=documents,serve installs these extras alone, in place of all that development needs.
# LOCRET_TORCH_INDEX=URL takes torch from that index; without it, PyTorch's index of CPU builds serves a machine without an NVIDIA
# GPU, where it can be reached. PYTHON=... picks the Python of a new .venv.
# Other scripts source this file: afterwards `python` is the environment's.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

runs_the_clone() { # not a copy of it, which an install without -e leaves in the environment
    (cd / && python -c 'import os, sys, locret_kit; sys.exit(not os.path.samefile(locret_kit.__path__[0], sys.argv[1]))' "$root/locret_kit") 2>/dev/null
}

cpu_index() { # where CPU builds of PyTorch are, for a Linux machine without an NVIDIA GPU
    local index=https://download.pytorch.org/whl/cpu
    if [ "$(uname -s)" != Linux ] || [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; then return; fi
    if python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)' "$index" 2>/dev/null; then
        echo "$index"
    else
        echo "setup: no NVIDIA GPU, but $index cannot be reached: pip's own PyTorch may have 3 GB of CUDA libraries" >&2
    fi
}

locret_setup() {
    local venv="${VIRTUAL_ENV:-$root/.venv}" extras="${LOCRET_EXTRAS:-dev}" quiet=--quiet stamp want torch made index
    if [ -t 1 ]; then quiet=; fi # a terminal shows what pip does
    made="$venv/bin/python"
    [ -x "$made" ] || made="${PYTHON:-python3}"
    if ! "$made" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: constraints.txt needs Python 3.11 or newer, $made is $("$made" -V); PYTHON=python3.11 picks another" \
            "for a new $venv" >&2
        return 1
    fi
    if [ ! -x "$venv/bin/python" ]; then
        echo "setup: creating $venv"
        "$made" -m venv "$venv"
    fi
    export PATH="$venv/bin:$PATH"

    # What is installed depends on these two files, on where the project is and on the extras; dev holds all of them.
    stamp="$venv/.locret-setup"
    want="$(cd "$root" && python -c '
import hashlib, pathlib
print(hashlib.sha256(b"".join(pathlib.Path(p).read_bytes() for p in ("pyproject.toml", "constraints.txt"))).hexdigest(), pathlib.Path.cwd())')"
    if [ -f "$stamp" ] && { [ "$(cat "$stamp")" = "$want $extras" ] || [ "$(cat "$stamp")" = "$want dev" ]; } && runs_the_clone; then
        echo "setup: nothing to do ($venv)"
        return 0
    fi

    # torch first and alone, so that an index given for it serves nothing else.
    torch="$(grep '^torch==' "$root/constraints.txt")"
    index="${LOCRET_TORCH_INDEX:-$(cpu_index)}"
    echo "setup: installing $torch into $venv"
    python -m pip install ${quiet:+--quiet} -c "$root/constraints.txt" ${index:+--index-url "$index"} "$torch"
    echo "setup: installing locret-kit[$extras]"
    (cd "$root" && python -m pip install ${quiet:+--quiet} -c constraints.txt -e ".[$extras]")
    echo "$want $extras" >"$stamp"
    echo "setup: done; source $venv/bin/activate"
}

locret_setup >&2
