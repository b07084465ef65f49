"""``locret-infer --gpu-memory``: the cap, the planned chunk, refusals before anything is loaded, and running out all the same."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planned import setting_of
from tiny_heads import INFERENCE, save_tiny_heads
from tiny_models import tiny_model
from tiny_tokenizer import TEXT
from torch._utils import _get_device_index

from locret_kit import BoundedCache
from locret_kit.backbones import load
from locret_kit.cli import plan as plan_cli
from locret_kit.cli.infer import main
from locret_kit.planning import fitting_settings, memory
from locret_kit.planning.backbone_sizes import BackboneSizes
from locret_kit.planning.inference_plan import plan_inference
from locret_kit.planning.memory import OutOfMemory, allocator_figures, cap_gpu_memory, explain_oom, fit_plan
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import generate

GIB = 2**30
# What PyTorch's allocator says, without and with a cap of the process.
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.56 GiB of which 1.25 GiB is free. "
    "Including non-PyTorch memory, this process has 22.31 GiB memory in use. {allowed}Of the allocated memory 21.00 GiB is "
    "allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
    "try setting expandable segments."
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    save_tiny_heads(folder, 16, inference={**INFERENCE, "budget": 6000, "stabilizers": 2500, "local_len": 100})
    return folder


def infer(monkeypatch, capsys, *arguments: str, text: str = TEXT * 4) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def card(monkeypatch) -> list[tuple[float, int | None]]:
    """A CUDA device of 24 GiB that only answers questions; what the process's share was set to, and of which device."""
    shares: list[tuple[float, int | None]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=24 * GIB))

    def share(fraction: float, device: torch.device | int | None = None) -> None:
        shares.append((fraction, None if device is None else _get_device_index(device)))  # refuses one without a number

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", share)
    return shares


# ---- the cap -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "gpu_memory=24GiB is a cap on a CUDA device, and PyTorch sees no CUDA device here: leave it out"),
        (["--device", "cpu"], "gpu_memory=24GiB is a cap on a CUDA device, and this runs on device=cpu: leave it out"),
        (["--device", "cuda"], "device='cuda': PyTorch sees no CUDA device here"),
    ],
)
def test_a_cap_without_cuda(place, monkeypatch, capsys, flags, said):
    run = infer(monkeypatch, capsys, "--ckpt", str(place / "heads"), "--gpu-memory", "24GiB", *flags, "--quiet")
    assert run == (1, "", f"locret-infer: {said}\n")


def test_the_cap_is_set_on_the_device_and_the_reserve_is_kept_free(card):
    assert cap_gpu_memory("12GiB", "cuda:1") == 11 * GIB
    assert cap_gpu_memory("80GiB", None) == 23 * GIB, "no more than there is"
    assert card == [(0.5, 1), (1.0, None)]
    for size, message in (("1GiB", "must be above the 1.00 GiB that are kept free"), ("24Gi", "is not a size")):
        with pytest.raises(ValueError, match=message):
            cap_gpu_memory(size, None)


# ---- planning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [15.4, 15.6, 16.5, 17.5])
def test_the_chunk_is_the_largest_that_fits_up_to_the_one_asked_for(cap):
    config = plan_cli.resolve("llama3.1-8b")[0]
    setting, room = setting_of(131072, 2048, 4096, policy=parse_policy("h2o")), int(cap * GIB)
    chosen, plan = fit_plan(config, setting, room, chunk_is_fixed=False)
    assert plan.peak <= room and chosen.chunk <= 4096 and chosen.budget == 2048
    if chosen.chunk < 4096:
        larger = setting_of(131072, 2048, chosen.chunk + fitting_settings.STEP, policy=setting.policy)
        assert plan_inference(BackboneSizes.of(config), larger).peak > room
        with pytest.raises(fitting_settings.DoesNotFit, match="These fit: "):
            fit_plan(config, setting, room, chunk_is_fixed=True)


def test_three_kinds_of_setting_are_offered():
    """Smaller chunk, smaller budget, fewer bits: one of each where each helps."""
    one = BackboneSizes.of(plan_cli.resolve("phi3-mini")[0])
    setting = setting_of(131072, 6000, 3072)
    near = fitting_settings.nearest_fitting(one, setting, int(10.5 * GIB))
    changed = [(s.chunk != 3072, s.budget != 6000, s.run.kv_bits is not None) for s in near]
    assert changed == [(True, False, False), (False, True, False), (False, False, True)]
    assert [
        s.dtype for s in fitting_settings.nearest_fitting(one, setting_of(131072, 6000, 3072, "float32"), 12 * GIB)
    ] == ["bfloat16"]
    whole = fitting_settings.nearest_fitting(one, setting_of(8192, 6000, 3072, one_shot=True), int(11.3 * GIB))
    assert whole and all(plan_inference(one, s).peak <= 11.3 * GIB for s in whole)


def test_a_plan_that_cannot_fit_is_refused_before_the_weights(place, card, monkeypatch, capsys):
    monkeypatch.setattr(memory, "RESERVE", 0)
    monkeypatch.setattr(load, "load_backbone", lambda *a, **k: pytest.fail("weights were loaded"))
    run = ["--ckpt", str(place / "heads"), "--budget", "64", "--quiet"]
    status, out, err = infer(monkeypatch, capsys, *run, "--gpu-memory", "60KB")
    assert (status, out) == (1, "") and "No setting fits: weights and heads alone take" in err, err
    status, _, err = infer(monkeypatch, capsys, *run, "--gpu-memory", "600KB", "--chunk", "4096")
    assert status == 1 and "These fit: budget 64, chunk " in err and err.count("\n") == 1, err


def test_a_run_within_a_cap(place, card, monkeypatch, capsys):
    """The weights stay on the CPU here; everything else is as on a card."""
    real = load.load_backbone

    def on_cpu(name, **options):
        return real(name, **{**options, "device": "cpu", "dtype": "bfloat16"})

    monkeypatch.setattr(load, "load_backbone", on_cpu)
    run = ["--model", str(place / "backbone"), "--policy", "h2o", "--budget", "64", "--max-new-tokens", "2"]
    status, _, err = infer(monkeypatch, capsys, *run, "--gpu-memory", "6GiB")
    assert status == 0 and "plan: budget 64, chunk 4096, bfloat16; peak" in err and "of 5.00 GiB" in err, err
    assert card == [(0.25, None)]
    status, _, err = infer(monkeypatch, capsys, "--ckpt", str(place / "heads"), "--gpu-memory", "6GiB")
    assert status == 0 and "chunk 32, bfloat16; peak" in err, err


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
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **k: "x" * len(ids))
    model.model.layers[1].mlp = Failing(model.model.layers[1].mlp, calls, small("400.00 KiB"))
    cache = BoundedCache(600, "h2o", chunk=300, prompt_length=2000)
    with pytest.raises(OutOfMemory) as caught:
        generate(model, tokenizer, [1 + i % 90 for i in range(2000)], cache, max_new_tokens=9)
    said = str(caught.value)
    assert said.startswith(
        "out of memory: 0.2 MiB were asked for and 0.1 MiB were free beside the 0.4 MiB of this run, "
    )
    assert "with budget 600, chunk 300, float32 at context 2000. These fit: " in said and "\n" not in said
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
    assert "These fit: " in str(caught.value)
    offered = [float(part.split(" MiB")[0]) for part in str(caught.value).split("These fit: ")[1].split("(")[1:]]
    assert offered and all(size * 2**20 <= peak - 200 * 2**10 + 2**16 for size in offered)


def test_other_errors_pass():
    model, cache = tiny_model("llama"), BoundedCache(64, "h2o")
    with pytest.raises(ValueError, match="another"), explain_oom(model, cache, 9):
        raise ValueError("another")
    said = "^out of memory: .*iB were asked for at once, with budget=64: a smaller one takes less$"
    with pytest.raises(OutOfMemory, match=said), explain_oom(model, cache, 9):
        torch.empty(1 << 55, dtype=torch.uint8)
    with pytest.raises(OutOfMemory, match="^no figures$"), explain_oom(model, cache, 9):
        raise torch.OutOfMemoryError("no figures\nmore")
