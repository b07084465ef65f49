"""The class to name in the registry of lm-evaluation-harness: ``"locret": "locret_kit.lm_eval:Locret"``. Its command line with
that model in it is ``locret-eval lm_eval``."""

from .cli.eval_setup import engine_for_harness
from .evals.engine.harness import register

Locret = register(engine_for_harness)
"""The model of ``--model locret``; its arguments are ``policy``, ``budget`` and the keys of ``locret-eval``."""
