"""The cost model: what is recorded of a steady chunk and a decoded token, by hand, and what is predicted from it."""

from __future__ import annotations

from functools import cache
from typing import get_args

import pytest
from interpreted import common  # noqa: F401  (before anything else imports the kernels)

from locret_kit.cli import plan as cli
from locret_kit.config.plan_options import Gpu
from locret_kit.planning.backbone_sizes import BackboneSizes
from locret_kit.planning.cards import CARDS, card_of
from locret_kit.planning.inference_plan import Setting
from locret_kit.runtime.launches import ATTENTION, HEADS, PARTS, PRODUCTS, Operation
from locret_kit.runtime.speed import Recorded, predict, record
from locret_kit.settings import RunSettings

NAMES = ("phi3-mini", "llama3.1-8b")


@cache
def recorded(name: str) -> tuple[Recorded, Setting, BackboneSizes, object]:
    config, recipe = cli.resolve(name)
    names = ("budget", "chunk", "stabilizers", "local_len")
    run = RunSettings.of({key: recipe[f"infer.{key}"] for key in names})
    setting = Setting(131072, run, "bfloat16", recipe["heads.d_hidden"])
    return record(config, setting), setting, BackboneSizes.of(config), config


def flops(operations: tuple[Operation, ...], *parts: str) -> float:
    return sum(x.flops for x in operations if x.part in parts)


@pytest.mark.parametrize("name", NAMES)
def test_work_of_a_steady_chunk_by_hand(name):
    made, setting, backbone, _ = recorded(name)
    spec, T, S = backbone.spec, setting.chunk, setting.budget + setting.chunk
    matrices = sum(inputs * outputs for inputs, outputs in backbone.matrices)
    assert flops(made.chunk, PRODUCTS) == 2 * T * matrices
    pairs = sum(S - T + t + 1 for t in range(T))
    assert flops(made.chunk, ATTENTION) == 4 * spec.n_heads * spec.head_dim * pairs
    assert flops(made.chunk, HEADS) == 2 * T * setting.width * (spec.qkv_dim + spec.n_kv_heads)
    assert flops(made.chunk) == 0 and {x.part for x in made.chunk} <= set(PARTS)
    decode = [x for x in made.token if x.name == "ragged_decode"]
    assert len(decode) == 1
    rows = decode[0].nbytes / (2 * 2 * spec.n_kv_heads * spec.head_dim)
    assert setting.budget <= rows <= setting.budget + setting.chunk
    weights = sum(x.nbytes for x in made.token if x.part == PRODUCTS)
    assert 2 * matrices <= weights <= 1.001 * 2 * matrices


@pytest.mark.parametrize("name", NAMES)
def test_work_of_an_eviction_by_hand(name):
    """One launch selects, in 32 steps and two counts; every row that stays is read and written once, with the number that says
    where from; nothing is sorted."""
    made, setting, backbone, _ = recorded(name)
    spec, S = backbone.spec, setting.budget + setting.chunk
    found = {kind: [x for x in made.chunk if x.name == kind] for kind in ("select_rows", "kept_rows", "compact_rows")}
    assert [len(x) for x in found.values()] == [1, 1, 4] and not any(x.kind == "sort" for x in made.chunk)
    assert (found["select_rows"][0].steps, found["select_rows"][0].passes) == (34, -(-S // 8192))
    assert found["kept_rows"][0].passes == -(-S // 4096)
    row = 2 * spec.head_dim * 2 + 4 + 4  # keys, values, position and score
    assert sum(x.nbytes for x in found["compact_rows"]) == spec.n_kv_heads * setting.budget * (2 * row + 4 * 8)


@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_for_nothing(name):
    """No number is read back and nothing is copied between host and device, in a steady chunk and in a step of fixed shapes."""
    assert recorded(name)[0].waits == ()


LAUNCHES = {"phi3-mini": (45, 25), "llama3.1-8b": (45, 25)}
"""Most launches of a layer, in a prefill chunk and for a decoded token."""


@pytest.mark.parametrize("name", NAMES)
def test_launches_of_a_layer(name):
    made = recorded(name)[0]
    found = len(made.chunk), len(made.token)
    assert all(n <= most for n, most in zip(found, LAUNCHES[name], strict=True)), (
        found, [x.name for x in made.chunk], [x.name for x in made.token],
    )  # fmt: skip


def test_seconds_of_an_operation():
    """The longest of computing, moving bytes, passes and the smallest kernel."""
    card = CARDS["h100"]
    assert Operation("mm", PRODUCTS, "product", 680e12, 1.0).seconds(card) == pytest.approx(1 / 0.85)
    assert Operation("mm", PRODUCTS, "product", 1.0, 2900e9).seconds(card) == pytest.approx(1 / 0.80)
    assert Operation("x", ATTENTION, "attention", 680e12, 1.0).seconds(card) == pytest.approx(1 / 0.52)
    assert Operation("add", "", "elementwise", 0.0, 2900e9).seconds(card) == pytest.approx(1 / 0.9)
    assert Operation("x", "", "kernel", 0.0, 2900e9).seconds(card) == pytest.approx(1 / 0.7)
    assert Operation("x", "", "kernel", 0.0, 1.0, passes=4).seconds(card) == pytest.approx(1e-5)
    assert Operation("x", "", "kernel", 0.0, 1.0, passes=2, steps=10).seconds(card) == pytest.approx(1e-5)
    assert Operation("add", "", "elementwise", 0.0, 1.0).seconds(card) == 2.0e-6


SHARES = {
    ("phi3-mini", "rtx4090"): (79, 72), ("phi3-mini", "a100"): (75, 64), ("phi3-mini", "h100"): (61, 60),
    ("llama3.1-8b", "rtx4090"): (80, 79), ("llama3.1-8b", "a100"): (74, 71), ("llama3.1-8b", "h100"): (57, 68),
}  # fmt: skip
"""Percent of the floor that is predicted today, of a chunk and of a decoded token."""
NEWER = {"phi3-mini": 68, "llama3.1-8b": 66}
"""Percent that an H100 reaches of a chunk's floor with FlashAttention-3."""


@pytest.mark.parametrize(("name", "gpu"), SHARES)
def test_shares_of_the_floor(name, gpu):
    made, setting, backbone, config = recorded(name)
    found = predict(config, setting, CARDS[gpu], made)
    prefill, decode = SHARES[name, gpu]
    assert 100 * found.chunk_floor / found.chunk == pytest.approx(prefill, abs=0.5)
    assert 100 * found.token_floor / found.token == pytest.approx(decode, abs=0.5)
    assert (found.newer_chunk is None) == (gpu != "h100")
    if found.newer_chunk is not None:
        assert 100 * found.chunk_floor / found.newer_chunk == pytest.approx(NEWER[name], abs=0.5)
        assert any("with FlashAttention-3 installed" in line for line in found.lines())
    rows = 2 * backbone.spec.n_layers * backbone.spec.n_kv_heads * backbone.spec.head_dim * setting.budget
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert found.token_floor == pytest.approx(2 * (backbone.parameters - table + rows) / CARDS[gpu].copy)


def test_a_card_is_known_by_its_drivers_name():
    names = {"NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA H100 80GB HBM3": "h100"}
    assert {name: card_of(name) for name in names} == {name: CARDS[key] for name, key in names.items()}
    assert card_of("NVIDIA H200") is None and card_of("NVIDIA L40S") is None


def test_a_host_read_is_found(monkeypatch):
    from locret_kit.policies.methods.locret import Cis

    real = Cis.score_slots
    monkeypatch.setattr(Cis, "score_slots", lambda self, slots: real(self, slots) * float(slots.entry_scores.sum() > 0))
    config, _ = cli.resolve("phi3-mini")
    made = record(config, Setting(131072, RunSettings(budget=256, chunk=128), "bfloat16", 32))
    assert set(made.waits) == {"_local_scalar_dense"}


def test_the_command(capsys):
    assert get_args(Gpu) == tuple(CARDS)
    argv = ["--model", "phi3-mini", "--speed", "--budget", "256", "--chunk", "128", "--d-hidden", "32"]
    assert cli.main([*argv, "--gpu", "a100"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("A100, predicted and not measured: budget 256, chunk 128, bfloat16\n") and "H100" not in said
    assert "of the floor" in said and "attention" in said and "launches" in said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "phi3-mini"], "gpu_memory is missing: --gpu-memory SIZE"),
        (["--model", "phi3-mini", "--gpu-memory", "24GiB", "--gpu", "a100"], "give --speed too"),
        (["--model", "phi3-mini", "--speed", "--policy", "h2o"], "policy=h2o: speed is predicted for"),
        (["--model", "phi3-mini", "--speed", "--kv-bits", "4"], "kv_bits=4: speed is predicted for"),
    ],
)
def test_what_is_refused(argv, message, capsys):
    assert cli.main(argv) == 1
    assert message in capsys.readouterr().err
