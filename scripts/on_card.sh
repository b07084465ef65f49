#!/usr/bin/env bash
# Everything that only a card can show, in one run of at most ten minutes. Each row is on disk at once.
#
#     scripts/on_card.sh [MODEL [ARGUMENT ...]]    # phi3-mini (default) or llama3.1-8b; arguments of scripts/gpu.py, such as --part
#     DRY=1 scripts/on_card.sh                     # say what would run, and leave
#     PLAYED=1 scripts/on_card.sh tiny             # every step on a CPU that plays a card (tests/support/played_card.py): some
#                                                  # ten minutes of one core
#
# step                                               expected s   limit s
# 0  imports of all programs                                 20        60   ends the run: what is missing is named in one line
# 1  exact gates: rows that move; graphs, evictions          90       170   graphs_on_cuda.py, rows_on_cuda.py
# 2  races for the shared memory of what moves rows          60        60   compute-sanitizer, which sees no other memory
# 3  figures of one model                                   300       350   gpu.py: ceilings, gate, prefill, decoding, peers
# 4  a program of yours, TRIAL=FILE.py                       60        60   only where one is named, within what is left
#
# OUT       folder of the rows (default: kernels/benchmarks/results): DEVICE.csv, DEVICE-operations.csv.
# LOCRET_COMMIT   commit that the rows name; it must be given where git's folder is missing.
# TRITON_CACHE_DIR  compiled kernels (default: .triton). To bring them along, compile before, with the Triton of the card's machine:
#     TRITON_CACHE_DIR=.triton python scripts/compile_for.py --arch 90 --model phi3-mini
# It saves one to two minutes. Packages that the machine lacks travel as wheels in a folder on PYTHONPATH.
set -uo pipefail
cd "$(dirname "$0")/.."
python=$(command -v python || command -v python3)
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$PWD/.triton}"
export LOCRET_COMMIT="${LOCRET_COMMIT:-$(git describe --always --dirty --exclude='*' --abbrev=12 2>/dev/null)}"
began=$SECONDS limit=580 failed=0
run=("$python") slow=1
[[ -n ${PLAYED:-} ]] && run=("$python" tests/support/played_card.py) slow=60 limit=7200

check() { # check SECONDS COMMAND...: a command that must succeed in time; what comes after runs all the same
    local seconds=$(($1 * slow)) left=$((limit - SECONDS + began))
    shift
    echo "== $*"
    [[ -n ${DRY:-} ]] && return
    timeout --kill-after=5 "$((seconds < left ? seconds : left))" "$@"
    local status=$?
    [[ $status -eq 0 ]] && return
    [[ $status -eq 124 ]] && echo "on_card: not finished after $seconds s: $*" >&2
    [[ $status -ne 124 ]] && echo "on_card: exit status $status: $*" >&2
    failed=1
    return "$status"
}

model=${1:-phi3-mini}
shift
case "$model" in -*) echo "on_card: MODEL=$model must be one of: phi3-mini, llama3.1-8b; arguments come after it" >&2 && exit 2 ;; esac
[[ -z $LOCRET_COMMIT ]] && echo "on_card: LOCRET_COMMIT is missing, and there is no git folder: rows would name no commit" >&2 && exit 2

check 60 "$python" scripts/check_imports.py || exit 2
check 20 "${run[@]}" tests/support/rows_on_cuda.py # before the race step, so that it compiles nothing
check 150 "${run[@]}" tests/support/graphs_on_cuda.py
if [[ -n ${PLAYED:-} ]]; then
    echo "== no races: the interpreter runs one program at a time"
elif sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1) && [[ -n $sanitizer ]]; then
    check 60 "$sanitizer" --tool racecheck --error-exitcode 3 "$python" tests/support/rows_on_cuda.py
else
    echo "on_card: compute-sanitizer is missing (it comes with the CUDA toolkit), so races were not looked for" >&2
    failed=1
fi
reserve=0
[[ -n ${TRIAL:-} ]] && reserve=60
minutes=$(awk "BEGIN { print int(10 * ($limit - $SECONDS + $began - $reserve - 15) / 60) / 10 }")
check "$((limit - SECONDS + began - reserve))" "${run[@]}" scripts/gpu.py --model "$model" --minutes "$minutes" \
    --out "${OUT:-kernels/benchmarks/results}" "$@"
[[ -n ${TRIAL:-} ]] && check 60 "$python" "$TRIAL" --minutes 0.8
exit $failed
