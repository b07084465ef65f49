"""The message of a run that runs out of memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model

from locret_kit import BoundedCache
from locret_kit.runtime.session import Answer, OutOfMemory, explain_oom

SAID = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.56 GiB of which 1.25 GiB is free.\nMore."


class Failing(torch.nn.Module):
    """A layer's MLP that has no memory left after ``calls`` calls."""

    def __init__(self, inner, calls: int) -> None:
        super().__init__()
        self.inner, self.calls = inner, calls

    def forward(self, x):
        self.calls -= 1
        if self.calls < 0:
            raise torch.OutOfMemoryError(SAID)
        return self.inner(x)


@pytest.mark.parametrize("calls", [0, 7, 12])
def test_out_of_memory_in_the_middle(calls):
    model = tiny_model("llama")
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **k: "x" * len(ids), convert_ids_to_tokens=str)
    model.model.layers[1].mlp = Failing(model.model.layers[1].mlp, calls)
    cache = BoundedCache(600, "h2o", chunk=300, prompt_length=2000)
    with pytest.raises(OutOfMemory) as caught:
        str(Answer(model, tokenizer, [1 + i % 90 for i in range(2000)], cache, max_new_tokens=9))
    said = "2.00 GiB were asked for, with budget=600 and chunk=300; locret-plan prints the largest that fit"
    assert str(caught.value) == f"out of memory: {said}"
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_pass():
    cache = BoundedCache(64, "h2o")
    with pytest.raises(ValueError, match="another"), explain_oom(cache):
        raise ValueError("another")
    with pytest.raises(RuntimeError, match="^shapes differ$"), explain_oom(cache):
        raise RuntimeError("shapes differ")
    with (
        pytest.raises(OutOfMemory, match="^out of memory: [0-9]+ bytes were asked for, with budget=64 and "),
        explain_oom(cache),
    ):
        torch.empty(1 << 55, dtype=torch.uint8)
    with pytest.raises(OutOfMemory, match="^out of memory: with budget=64"), explain_oom(cache):
        raise torch.OutOfMemoryError("no figures")
