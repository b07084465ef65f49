"""`transformers serve` with bounded caches: transformers' own server, each of its answers in a budget of slots.

python examples/transformers_serve.py checkpoints/SmolLM2-135M-Instruct snapkv 512 --port 8001

What comes after the budget are options of `transformers serve`. For sessions, documents, and many users at once:
`locret-serve`.
"""

import sys
from copy import copy
from functools import wraps
from typing import Any

from transformers import PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import main as transformers_command

from locret_kit import CACHE, BoundedCache, RetainingHeads, attach


def bounded(model: PreTrainedModel, policy: str, budget: int, heads: RetainingHeads | None = None) -> PreTrainedModel:
    """The model, whose ``generate`` reads each prompt into a new cache of ``budget`` slots; attached from now on."""
    attach(model)
    generate = model.generate

    @wraps(generate)
    def in_budget(*args: Any, **given: Any) -> Any:
        config = copy(given.pop("generation_config", None) or model.generation_config)
        config.prefill_chunk_size = 512
        cache = BoundedCache(budget, policy, heads, prompt_length=given["input_ids"].shape[1])
        return generate(*args, **given, generation_config=config, **{CACHE: cache})

    model.generate = in_budget
    return model


def serve_in_budget(policy: str, budget: int, heads: RetainingHeads | None = None) -> None:
    """Let the server's manager of models hand out bounded ones."""
    load = ModelManager._load_model

    def loaded(self: ModelManager, *args: Any, **given: Any) -> PreTrainedModel:
        return bounded(load(self, *args, **given), policy, budget, heads)

    ModelManager._load_model = loaded


if __name__ == "__main__":
    name, policy, budget, *rest = sys.argv[1:]
    serve_in_budget(policy, int(budget))
    sys.argv = ["transformers", "serve", name, *rest]
    transformers_command()
