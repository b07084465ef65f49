"""The configuration: recipes, overrides and the text of its errors."""

import shlex
from pathlib import Path

import pytest

from locret_kit.cli.train import flags_of
from locret_kit.config.recipes import TRAIN, known_recipes, load_config, read_recipe, with_recipe
from locret_kit.config.schema import assemble, given_by, options_of
from locret_kit.config.train_options import TrainConfig
from locret_kit.validation import alternatives, metadata_of

ROOT = Path(__file__).resolve().parents[2]
ANY_MODEL = {"auto", "paper", "small", "tiny"}
"""Recipes without a model; others begin with them."""
TINY = ["recipe=tiny", "backbone.model=some/model"]


def test_recipes_are_found():
    assert known_recipes() == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert {"phi3-mini", "llama3.1-8b", "smollm2-135m", "tiny"} <= set(known_recipes())


@pytest.mark.parametrize("name", known_recipes())
def test_every_recipe_loads(name):
    of_any_model = "backbone.model" not in read_recipe(name).values
    assert of_any_model == (name in ANY_MODEL)
    config = load_config([f"recipe={name}", *(["model=some/model"] if of_any_model else [])])
    assert config.recipe == name
    assert config.out == f"runs/{name}"
    assert config.backbone.model


def test_the_papers_numbers():
    """Locret, appendix A and table 6."""
    phi, llama = load_config(["recipe=phi3-mini"]), load_config(["recipe=llama3.1-8b"])
    assert (phi.infer.budget, phi.infer.chunk, phi.infer.stabilizers, phi.infer.local_len) == (6000, 3072, 2500, 100)
    assert (llama.infer.budget, llama.infer.chunk) == (16384, 1024)
    for config in (phi, llama):
        assert (config.heads.d_hidden, config.optim.lr, config.optim.steps) == (1024, 5e-4, 3000)
        assert (config.optim.warmup_steps, config.data.max_tokens) == (2000, 10240)
        assert (config.target.kind, config.loss.top_weight) == ("logit", 1.0)
        assert config.loss.smoothing == pytest.approx(32 * 0.0025)


def test_overrides():
    words = "optim.lr=1e-4", "data.sources=[synthetic,a.jsonl]", "data.weights=[2, 1]", "out=x/${recipe}"
    config = load_config([*TINY, *words])
    assert config.optim.lr == 1e-4
    assert config.data.sources == ["synthetic", "a.jsonl"]
    assert config.data.weights == [2.0, 1.0]
    assert config.out == "x/tiny"
    assert config.heads.d_hidden == 16, "the recipe's other values stay"


def test_strings_are_taken_as_they_are():
    config = load_config([*TINY, "backbone.revision=12e4", "backbone.adapter=null", "out=a=b"])
    assert (config.backbone.revision, config.backbone.adapter, config.out) == ("12e4", None, "a=b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim: {step: 5}", "unknown key 'optim.step' in recipe 'mine'. Did you mean 'optim.steps'?"),
        ("recipe: other", "recipe in recipe 'mine' must not be set there: it is the recipe's own name"),
        ("base: papper", "recipe=papper is unknown; known: "),
        ("base: [paper]", "base=['paper'] in recipe 'mine' must be a recipe's name"),
        ("choose: [heads.init]", "choose=['heads.init'] in recipe 'mine' must be a list of some of: heads.d_hidden, "),
    ],
)
def test_errors_in_a_recipe(tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)
    _fails([f"recipe={tmp_path / 'mine.yaml'}"], message)


def test_a_recipe_begins_with_its_base(tmp_path):
    (tmp_path / "low.yaml").write_text("base: paper\nbackbone: {model: a/b}\noptim: {steps: 5}\n")
    (tmp_path / "high.yaml").write_text(f"base: {tmp_path}/low.yaml\noptim: {{steps: 7}}\ninfer: {{policy: null}}\n")
    config = load_config([f"recipe={tmp_path / 'high.yaml'}", "optim.lr=1e-4"])
    assert (config.recipe, config.backbone.model, config.optim.steps, config.optim.lr) == ("high", "a/b", 7, 1e-4)
    assert config.loss.smoothing == 0.08, "of the paper, two files below"
    (tmp_path / "low.yaml").write_text(f"base: {tmp_path}/high.yaml")
    _fails([f"recipe={tmp_path / 'high.yaml'}"], "leads back to itself: ")


def test_a_model_without_a_recipe():
    """Another name of one key; what the device decides is asked for unless it is given."""
    values = given_by(TRAIN, ["--model", "Some/Model-4B", "data.batch=2"])
    assert values == {"backbone.model": "Some/Model-4B", "data.batch": 2}
    asked = []

    def choose(known, names):
        asked.extend((known["backbone.model"], *names))
        return dict.fromkeys(names, 64)

    made = with_recipe(values, choose)
    assert asked == ["Some/Model-4B", "heads.d_hidden", "data.max_tokens"]
    config = assemble(TrainConfig, made)
    assert (config.recipe, config.out) == ("auto", "runs/model-4b")
    assert config.infer.budget + config.infer.chunk < 2048, "slots are dropped in the first text that is tried"
    assert (config.heads.d_hidden, config.data.max_tokens, config.data.batch) == (64, 64, 2)


def test_what_is_given_by_a_recipe_is_not_chosen():
    assert with_recipe({"recipe": "llama3.1-8b"}, lambda known, names: pytest.fail(names))["heads.d_hidden"] == 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "recipe=NAME is missing, or model=NAME for recipe=auto; known recipes: auto, gemma3-270m, "),
        ([*TINY, "model=b"], "backbone.model is given twice: backbone.model=some/model and backbone.model=b"),
        (["recipe=phi3mini"], "recipe=phi3mini is unknown; known: "),
        (["recipe=nowhere.yaml"], "recipe=nowhere.yaml cannot be read: No such file"),
        (["recipe=tiny"], "recipe=tiny names no model: add backbone.model=NAME"),
        ([*TINY, "tiny"], "argument 'tiny' must be --key value or key=value, such as "),
        ([*TINY, "data.weights=[a]"], "data.weights=['a'] must be a list of numbers, such as [1,2], each above 0"),
        ([*TINY, "out=${nowhere}"], "nowhere"),
        ([*TINY, "target.kind=logits"], "must be one of: logit, log_prob. Did you mean 'logit'?"),
        ([*TINY, "data.sources=[]"], "data.sources=[] must be not empty"),
        ([*TINY, "data.weights=[1,2]"], "data.weights=[1.0, 2.0] must be 1 positive numbers, one for each of data"),
        ([*TINY, "infer.stabilizers=128"], "infer.stabilizers=128 must be below infer.budget=128"),
        ([*TINY, "resume=nowhere.ckpt"], "resume=nowhere.ckpt must be 'auto', 'never' or the path of a checkpoint"),
        ([*TINY, "backbone.device_map=auto", "trainer.strategy=ddp"], "auto spreads one process's backbone, "),
        ([*TINY, "backbone.gpu_memory=18GiB"], "backbone.gpu_memory=18GiB needs a backbone.device_map, such as auto"),
        ([*TINY, "trainer.strategy=deepspeed"], "must be one of: auto, ddp, fsdp, deepspeed_stage_2, "),
        ([*TINY, "data.batch=2"], "optim.accumulate=1 must be a multiple of data.batch=2"),
    ],
)
def test_errors_on_the_command_line(arguments, message):
    _fails(arguments, message)


def test_every_number_has_a_bound():
    for name, option in options_of(TrainConfig).items():
        if {int, float} & set(alternatives(option.annotation)):
            assert any(metadata_of(option.annotation)), name


def _fails(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_config(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "last"),
    [("smollm2-135m", "runs/my run/it's"), ("lococo-smollm2-135m", "h2o merge=lococo(runs/my run/it's)")],
)
def test_the_command_that_a_training_prints_is_one_for_a_shell(recipe, last):
    flags = shlex.split(
        flags_of(load_config([f"recipe={recipe}", "backbone.adapter=my lora"]), Path("runs/my run/it's"))
    )
    assert flags[-1] == last
    assert flags[0] == "--ckpt" or flags[flags.index("--adapter") + 1] == "my lora", "heads name theirs"
