#!/usr/bin/env bash
# Everything that only a card can show, in under nine minutes. Gates first: attention of a chunk by what was chosen, evictions of
# all layers at once, a token's products in one launch with what is around them, decoding through CUDA graphs, races for the shared
# memory of the kernels that move rows (the sanitizer sees no other memory). Then figures between the card's ceilings, each row on disk at once; where time is short one model a run
# (--model phi3-mini). Rows are ready to commit: kernels/benchmarks/results/DEVICE.csv, and docs by scripts/results.py.
#
#     scripts/on_card.sh [--model NAME ...] [--part NAME ...]     # arguments are those of scripts/gpu.py
#     DRY=1 scripts/on_card.sh                                    # say what would run, and leave
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
began=$SECONDS limit=520 failed=0

check() { # check SECONDS COMMAND...: a command that must succeed in time; figures are taken all the same
    local seconds=$1
    shift
    echo "== $*"
    [[ -n ${DRY:-} ]] && return
    timeout --kill-after=5 "$seconds" "$@"
    local status=$?
    [[ $status -eq 0 ]] && return
    [[ $status -eq 124 ]] && echo "on_card: not finished after $seconds s: $*" >&2
    [[ $status -ne 124 ]] && echo "on_card: exit status $status: $*" >&2
    failed=1
}

check 150 python tests/support/graphs_on_cuda.py
if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -n 1) && [[ -n $sanitizer ]]; then
    check 30 python tests/support/rows_on_cuda.py # compiled first, so that the next one's time goes into the kernels
    check 60 "$sanitizer" --tool racecheck --error-exitcode 3 python tests/support/rows_on_cuda.py
else
    echo "on_card: compute-sanitizer is missing (it comes with the CUDA toolkit), so races were not looked for" >&2
    check 30 python tests/support/rows_on_cuda.py
    failed=1
fi
minutes=$(awk "BEGIN { print int(10 * ($limit - $SECONDS + $began) / 60) / 10 }")
check "$((limit - SECONDS + began + 15))" python scripts/gpu.py --minutes "$minutes" "$@"
exit $failed
