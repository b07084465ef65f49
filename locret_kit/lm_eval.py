"""lm-evaluation-harness with one model more, ``locret``: its own command line, and the class to name in its registry.

python -m locret_kit.lm_eval --model locret --model_args ckpt=checkpoints/smollm2-135m-locret,budget=512 --tasks ...
"""

from __future__ import annotations

import sys

from .cli.eval import engine_for_harness, main
from .evals.engine.harness import register

Locret = register(engine_for_harness)
"""The model of ``--model locret``; its arguments are ``policy``, ``budget`` and the keys of ``locret-eval``."""

if __name__ == "__main__":
    sys.exit(main(["lm_eval", *sys.argv[1:]]))
