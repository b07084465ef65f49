"""What is offered where a run does not fit, or runs out of memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from planned import setting_of
from tiny_models import tiny_model

from locret_kit import BoundedCache
from locret_kit.planning.fitting_settings import OutOfMemory, allocator_figures, explain_oom
from locret_kit.planning.inference_plan import BackboneSizes, plan_inference
from locret_kit.runtime.session import Answer

GIB = 2**30
# What PyTorch's allocator says, without and with a cap of the process.
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.56 GiB of which 1.25 GiB is free. "
    "Including non-PyTorch memory, this process has 22.31 GiB memory in use. {allowed}Of the allocated memory 21.00 GiB is "
    "allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting expandable segments."
)


# ---- running out all the same ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "free"),
    [("", 1.75), ("21.25 GiB allowed; ", 0.25), ("20.00 GiB allowed; ", 0.0), ("90.00 GiB allowed; ", 1.75)],
)
def test_what_the_allocator_says(allowed, free):
    assert allocator_figures(SAID.format(allowed=allowed)) == (2 * GIB, int(free * GIB), 21 * GIB)
    assert allocator_figures(SAID.replace("1.25 GiB is free", "0 bytes is free").format(allowed=""))[1] == GIB // 2
    assert allocator_figures("something else") is None


class Failing(torch.nn.Module):
    """A layer's MLP that has no memory left after ``calls`` calls."""

    def __init__(self, inner, calls: int, said: str) -> None:
        super().__init__()
        self.inner, self.calls, self.said = inner, calls, said

    def forward(self, x):
        self.calls -= 1
        if self.calls < 0:
            raise torch.OutOfMemoryError(self.said)
        return self.inner(x)


@pytest.mark.parametrize("calls", [0, 7, 12])
def test_out_of_memory_in_the_middle(calls):
    model = tiny_model("llama")
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **k: "x" * len(ids), convert_ids_to_tokens=str)
    model.model.layers[1].mlp = Failing(model.model.layers[1].mlp, calls, small("400.00 KiB"))
    cache = BoundedCache(600, "h2o", chunk=300, prompt_length=2000)
    with pytest.raises(OutOfMemory) as caught:
        str(Answer(model, tokenizer, [1 + i % 90 for i in range(2000)], cache, max_new_tokens=9))
    said = str(caught.value)
    assert said.startswith(
        "out of memory: 0.2 MiB were asked for and 0.1 MiB were free beside the 0.4 MiB of this run, "
    )
    assert "with budget 600, chunk 300, float32 at context 2000; " in said and "\n" not in said
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def small(held: str) -> str:
    said = SAID.format(allowed="").replace("21.00 GiB", held).replace("512.00 MiB", "0 bytes")
    return said.replace("2.00 GiB", "200.00 KiB").replace("1.25 GiB", "100.00 KiB")


def test_a_plan_that_was_too_low_is_lowered_by_what_was_asked():
    """Memory ran out although the plan fits what there was: what is offered needs less than planned by what was asked."""
    model = tiny_model("llama")
    cache = BoundedCache(600, "h2o", chunk=300, prompt_length=2000)
    peak = plan_inference(
        BackboneSizes.of(model.config), setting_of(2000, 600, 300, "float32", policy=cache.policy)
    ).peak
    with pytest.raises(OutOfMemory) as caught, explain_oom(model, cache, 2000):
        raise torch.OutOfMemoryError(small(f"{peak / 2**20 + 1:.2f} MiB"))
    budget = int(str(caught.value).split("; budget ")[1].split()[0])
    offered = setting_of(2000, budget, 300, "float32", policy=cache.policy)
    assert plan_inference(BackboneSizes.of(model.config), offered).peak <= peak - 200 * 2**10 + 2**16


def test_other_errors_pass():
    model, cache = tiny_model("llama"), BoundedCache(64, "h2o")
    with pytest.raises(ValueError, match="another"), explain_oom(model, cache, 9):
        raise ValueError("another")
    said = "^out of memory: .*iB were asked for at once, with budget=64: a smaller one takes less$"
    with pytest.raises(OutOfMemory, match=said), explain_oom(model, cache, 9):
        torch.empty(1 << 55, dtype=torch.uint8)
    with pytest.raises(OutOfMemory, match="^no figures$"), explain_oom(model, cache, 9):
        raise torch.OutOfMemoryError("no figures\nmore")
