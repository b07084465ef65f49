#!/usr/bin/env bash
# One command from a fresh clone to an answer: a pass key hidden in a long text, found within a fixed cache budget.
# Usage: scripts/demo.sh [TOKENS=131072] [BUDGET=512]
set -euo pipefail

tokens="${1:-131072}"
budget="${2:-512}"
LOCRET_EXTRAS="${LOCRET_EXTRAS:-documents,serve}" # an environment with more is left as it is
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
python scripts/fetch_backbone.py
python scripts/make_long_text.py --tokens "$tokens" |
    locret-infer --ckpt checkpoints/smollm2-135m-locret --budget "$budget" --max-new-tokens 6
