"""Which settings fit, how a refusal says it, and the command."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import NAMES, backbone
from planned import changed, setting_of
from transformers import AutoConfig

from locret_kit.cli import plan as cli
from locret_kit.config.recipes import known_recipes
from locret_kit.naming import parse_bytes
from locret_kit.planning import fitting_settings
from locret_kit.planning import inference_plan as p
from locret_kit.policies.base import PolicyWarning
from locret_kit.policies.grammar import parse_policy
from locret_kit.settings import BUDGET, CHUNK

GIB = 2**30
H2O = parse_policy("h2o")


# ---- what fits ---------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 40_000)


@settings(max_examples=12)
@given(budget=SIZES, chunk=SIZES, more=SIZES, name=st.sampled_from(NAMES[::3]))
def test_more_never_takes_less(budget, chunk, more, name):
    one = backbone(name)
    setting = setting_of(131072, budget, chunk, policy=parse_policy("streaming"))
    least = p.plan_inference(one, setting).peak
    assert p.plan_inference(one, changed(setting, budget=budget + more)).peak >= least
    assert p.plan_inference(one, changed(setting, chunk=chunk + more)).peak >= least
    assert p.plan_inference(one, changed(setting, policy=H2O)).peak > least
    assert p.plan_inference(one, changed(setting, dtype="float32")).peak > least


@settings(max_examples=8)
@given(budget=st.integers(64, 60_000), chunk=st.integers(64, 20_000), cap=st.integers(10 * GIB, 24 * GIB))
def test_the_largest_fit_and_the_next_do_not(budget, chunk, cap):
    one, setting = backbone("phi3-mini"), setting_of(131072, budget, chunk)

    def fits(**change: int) -> bool:
        return p.plan_inference(one, changed(setting, **change)).peak <= cap

    most = fitting_settings.largest_budget(one, setting, cap)
    assert most % fitting_settings.STEP == 0 and (not most or fits(budget=most))
    assert most + fitting_settings.STEP > setting.context or not fits(budget=most + fitting_settings.STEP)
    most = fitting_settings.largest_chunk(one, setting, cap)
    assert most % fitting_settings.STEP == 0 and (not most or fits(chunk=most))
    assert most + fitting_settings.STEP > setting.context or not fits(chunk=most + fitting_settings.STEP)


def test_budgets_that_are_only_tried_are_not_warned_of():
    one, setting = backbone("phi3-mini"), setting_of(131072, 4224, 512, policy=parse_policy("infllm"))
    with warnings.catch_warnings(action="error", category=PolicyWarning):
        assert 0 < fitting_settings.largest_budget(one, setting, 10 * GIB) < 4096


def test_a_refused_plan_says_what_fits():
    one, setting = backbone("llama3.1-8b"), setting_of(131072, 16384, 1024)
    said = r"budget 16384, chunk 1024, bfloat16 at context 131072 needs 17\.92 GiB, above the cap of 17\.00 GiB; "
    said += r"weights and heads alone take 15\.58 GiB; "
    with pytest.raises(fitting_settings.DoesNotFit, match=f"^{said}") as caught:
        fitting_settings.require_fit(one, setting, 17 * GIB)
    budget = int(str(caught.value).split("; budget ")[1].split()[0])
    assert budget == fitting_settings.largest_budget(one, setting, 17 * GIB) > 0
    with pytest.raises(fitting_settings.DoesNotFit, match=r"; no smaller budget or chunk fits$"):
        fitting_settings.require_fit(one, setting, 5 * GIB)
    with pytest.raises(fitting_settings.DoesNotFit, match=r"; policy='full' evicts nothing, so no budget helps$"):
        fitting_settings.require_fit(one, changed(setting, policy=parse_policy("full")), 17 * GIB)


def test_positions_have_32_bits():
    with pytest.raises(ValueError, match=r"must be at most 2147483647 \(32-bit positions\)"):
        setting_of(131072, 2**31 - 1, 3072)


def test_the_promise_of_24_gib():
    """The paper's two settings at 128K, beside one GiB for everything that is not PyTorch's."""
    for name, budget, chunk in (("phi3-mini", 6000, 3072), ("llama3.1-8b", 16384, 1024)):
        assert fitting_settings.require_fit(backbone(name), setting_of(131072, budget, chunk), 23 * GIB).peak < 18 * GIB


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("24 GB", 24 * 10**9), ("1.5MiB", 3 * 2**19), ("4194304", 2**22), ("7B", 7)]
)
def test_sizes(text, size):
    assert parse_bytes(text, "gpu_memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "24Gi", "24 gigabytes", "-1GiB", "0", "infGiB", "nanGB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match=f"^reserve={text} "):
        parse_bytes(text, "reserve")


# ---- the command -------------------------------------------------------------------------------------------------


def test_every_shipped_configuration_is_a_recipes_backbone():
    shipped = cli.shipped_configs()
    assert set(shipped) <= set(known_recipes())
    for name, raw in shipped.items():
        config, recipe = cli.resolve(name)
        assert config.num_hidden_layers == raw["num_hidden_layers"]
        if not recipe["backbone.model"].startswith("checkpoints/"):
            assert recipe["backbone.model"] == raw["_name_or_path"]
            assert cli.resolve(raw["_name_or_path"])[0].to_dict() == config.to_dict()


def test_the_command_prints_a_plan(capsys):
    assert cli.main(["--model", "phi3-mini", "--gpu-memory", "24GiB"]) == 0
    out = capsys.readouterr().out
    assert "budget 6000, chunk 3072" in out and "7.12 GiB" in out and "48.00 GiB, 14.2 times" in out
    assert cli.main(["--model", "phi3-mini", "--gpu-memory", "24GiB", "--context", "600", "--budget", "600"]) == 0
    out = capsys.readouterr().out
    assert "the budget holds the whole context: nothing is evicted" in out and "largest budget" not in out


def test_a_server_is_planned(capsys):
    words = ["--model", "phi3-mini", "--gpu-memory", "24GiB", "--budget", "2048", "--chunk", "512", "--documents", "1"]
    each = p.cache_bytes(backbone("phi3-mini").spec, setting_of(131072, 2048, 512))
    assert cli.main([*words, "--sessions", "2"]) == 0
    sizes = f"5 caches of {each / 2**30:.2f} GiB, {5 * each / 2**30:.2f} GiB"
    assert f"2 sessions, 1 documents and 2 shared prefixes: {sizes}" in capsys.readouterr().out
    assert cli.main([*words, "--sessions", "2", "--document-budget", "3072", "--thoughts", "dropped"]) == 0
    each = p.cache_bytes(backbone("phi3-mini").spec, setting_of(131072, 3072, 512))
    sizes = f"7 caches of {each / 2**30:.2f} GiB, {7 * each / 2**30:.2f} GiB"
    assert f"2 sessions of two caches, 1 documents and 2 shared prefixes: {sizes}" in capsys.readouterr().out
    assert cli.main([*words, "--sessions", "100"]) == 1
    assert "above the cap of 23.00 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model phi3-mini --gpu-memory 24GiB --policy full --sessions 2", "policy='full' evicts nothing"),
        ("--model phi3min --gpu-memory 24GiB", "is neither a recipe nor a folder. Did you mean 'phi3-mini'?"),
        ("--model phi3-mini --gpu-memory 24", "gpu_memory=24 is 24 bytes; with a unit: gpu_memory=24GiB?"),
        ("--model phi3-mini --gpu-memory 1GiB", "gpu_memory=1GiB must be above reserve=1GiB"),
        ("--model llama3.1-8b --gpu-memory 17GiB", "alone take 15.58 GiB; "),
        (
            "--model phi3-mini --gpu-memory 24GiB --policy rereading-locret --one-shot",
            "reads the prompt's last tokens twice: ",
        ),
        (
            "--model phi3-mini --gpu-memory 24GiB --documents 3",
            "--documents 3 has no effect but in a plan of locret-serve",
        ),
        (
            "--model phi3-mini --gpu-memory 24GiB --one-shot --sessions 2",
            "--one-shot has no effect in a plan of a server",
        ),
        (
            "--model phi3-mini --gpu-memory 24GiB --budget 0.1 --sessions 2",
            "budget=0.1: a server's slots must be known",
        ),
        ("--model phi3-mini --gpu-memory 24GiB --engine vllm --sessions 2 --documents 3", "and no --engine vllm"),
    ],
)
def test_refusals_are_one_line(arguments, message, capsys):
    assert cli.main(arguments.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("locret-plan: ") and message in error and error.count("\n") == 1


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def test_a_model_without_a_recipe_is_planned_with_the_settings_of_a_run(tmp_path, capsys):
    """The plan has the budget and chunk of a run without options."""
    (tmp_path / "config.json").write_text(AutoConfig.for_model("llama", vocab_size=97, **SMALL).to_json_string())
    assert cli.main(["--model", str(tmp_path), "--gpu-memory", "8GiB"]) == 0
    assert f"budget {BUDGET}, chunk {CHUNK}, " in capsys.readouterr().out


def test_a_recipe_of_ones_own_is_planned_for_its_backbone(tmp_path):
    """Its file has the name of one that ships."""
    (tmp_path / "config.json").write_text(AutoConfig.for_model("llama", vocab_size=97, **SMALL).to_json_string())
    (tmp_path / "phi3-mini.yaml").write_text(f"base: phi3-mini\nbackbone: {{model: {tmp_path}}}\n")
    config, recipe = cli.resolve(str(tmp_path / "phi3-mini.yaml"))
    assert (config.model_type, config.num_hidden_layers, recipe["infer.budget"]) == ("llama", 2, 6000)
