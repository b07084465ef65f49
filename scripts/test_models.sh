#!/usr/bin/env bash
# The larger models, as users have them: both files of Qwen2.5-Coder are fetched by name into a clean cache, each answers a question,
# and heads of the small one are trained for two steps. 1.6 GB are downloaded; some ten minutes on two idle cores.
# Usage: scripts/test_models.sh
# LOCRET_MODELS=FOLDER is the cache, by default a new folder that is removed at the end; PYTHON=FILE the project's python.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export XDG_CACHE_HOME="${LOCRET_MODELS:-$work/cache}"
cd "$root"

{ sed -n 1,60p docs/writing.md && echo "The pass key is 70482." && sed -n 1,60p docs/stability.md; } >"$work/text.md"
for size in 0.5B 1.5B; do
    model="Qwen/Qwen2.5-Coder-$size-Instruct-GGUF:Q4_K_M"
    "$python" -m locret_kit.cli.infer "$work/text.md" --model "$model" --policy compactor --budget 512 --max-new-tokens 24 \
        --question "What is the pass key?" | tee "$work/answer"
    grep -q 70482 "$work/answer" || { echo "test_models: $model does not find the pass key" >&2; exit 1; }
done
"$python" -m locret_kit.cli.train recipe=qwen2.5-coder-0.5b optim.steps=2 data.sources=[code] data.weights=null data.lengths=[512] \
    data.max_tokens=512 data.val_samples=2 trainer.accelerator=cpu "out=$work/run"
"$python" -m locret_kit.cli.infer "$work/text.md" --ckpt "$work/run/heads" --budget 512 --max-new-tokens 8 --question "What is the pass key?"
echo "test_models: both models answer, and heads were trained" >&2
