#!/usr/bin/env bash
# One command from a fresh clone to an answer: a pass key hidden in a long text, found within a fixed cache budget.
# Usage: scripts/demo.sh [TOKENS=8192] [BUDGET: a quarter of them]
set -euo pipefail

tokens="${1:-8192}"
LOCRET_EXTRAS="${LOCRET_EXTRAS:-documents}" # an environment with more is left as it is
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
python scripts/fetch_backbone.py
python scripts/make_long_text.py --tokens "$tokens" --document-only >demo.txt
locret-infer demo.txt --question "What is the pass key?" ${2:+--budget "$2"} --max-new-tokens 16
echo "Another question, or a file of yours: source ${VIRTUAL_ENV:-.venv}/bin/activate; locret-infer demo.txt --question ..." >&2
