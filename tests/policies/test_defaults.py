"""What a command takes where nobody says: heads, backbone, policy, and a budget for the text."""

import pytest
import torch
from scripts_loaded import load_script
from tiny_models import tiny_model

from locret_kit.backbones import demo, index
from locret_kit.backbones.spec import spec_of
from locret_kit.cli import loading
from locret_kit.cli.eval import main as evaluate
from locret_kit.cli.train import main as train
from locret_kit.heads import HeadsConfig, RetainingHeads, heads_folder, read_checkpoint, state_of
from locret_kit.planning import text_budget
from locret_kit.policies.grammar import parse_policy
from locret_kit.policies.registry import UNTRAINED
from locret_kit.settings import BUDGET, RunSettings


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("tokens", "free", "turns", "budget", "why"),
    [
        (100, None, 0, BUDGET, "the least that a text gets"),
        (4 * BUDGET, None, 0, BUDGET, "the least that a text gets"),
        (8000, None, 0, 2000, "a quarter of them"),
        (80_000, None, 0, 8192 - 512, "window of 8192"),
        (80_000, None, 1024, 8192 - 512 - 1024, "window of 8192"),
        (8000, 1, 0, BUDGET, "the least that a text gets"),
    ],
)
def test_the_budget_follows_the_text(model, monkeypatch, tokens, free, turns, budget, why):
    monkeypatch.setattr(text_budget, "free_memory", lambda device: free)
    slots, line = text_budget.budget_of_text(
        model, parse_policy("snapkv"), RunSettings().resolved({}, tokens), tokens, turns
    )
    assert slots == budget and why in line and f"{budget} slots for {tokens} tokens" in line


def test_memory_bounds_it(model, monkeypatch):
    """Half of what is free, in steps of 64 slots; twice the memory has room for more."""
    found = []
    for free in (2 * 10**6, 4 * 10**6):
        monkeypatch.setattr(text_budget, "free_memory", lambda device, free=free: free)
        run = RunSettings(chunk=64, positions="original")
        least = run.resolved({"budget": 64}, 10**6)
        slots, line = text_budget.budget_of_text(model, parse_policy("snapkv"), least, 10**6)
        assert slots % 64 == 0 and "half of the free" in line
        found.append(slots)
    assert 64 < found[0] < found[1]


def test_the_cache_of_files_is_free_memory(monkeypatch, tmp_path):
    """A container's count has the files that it has read, such as weights, which give way."""
    monkeypatch.setattr(text_budget, "control_groups", lambda: [tmp_path])
    for name, text in (("max", "3000"), ("current", "2900"), ("stat", "anon 900\ninactive_file 1500\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert text_budget.free_memory(torch.device("cpu")) == 3000 - 2900 + 1500


def test_nothing_named_is_the_demo(monkeypatch):
    """Its backbone is fetched where it is missing; a model without heads has the policy that finds most."""
    fetched: list[bool] = []
    monkeypatch.setattr(demo, "is_missing", lambda name: name == demo.BACKBONE)
    monkeypatch.setattr(demo, "fetch", lambda: fetched.append(True))
    chosen = loading.resolve_choice(None, None, None, None)
    assert (chosen.ckpt, chosen.backbone, chosen.policy.name) == (demo.HEADS, demo.BACKBONE, "lookahead-locret")
    assert loading.resolve_choice(None, None, None, None, asked=True).policy.name == loading.ASKED
    assert loading.resolve_choice(None, None, None, "h2o", asked=True).policy.name == "h2o" and fetched == [True] * 3
    alone = loading.resolve_choice(None, "any/model", None, None, asked=True)
    assert (alone.heads, alone.policy.name) == (None, UNTRAINED[0]) and len(fetched) == 3


@pytest.mark.parametrize("program", ["locret-eval", "locret-train", "make_long_text.py"])
def test_programs_fetch_the_demo(program, tmp_path, monkeypatch, capsys):
    """The first commands of pages name its backbone, which a fresh clone lacks."""

    def fetch() -> None:
        raise ValueError("fetched")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(index, "INSTALLED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "fetch", fetch)
    status = {
        "locret-eval": lambda: evaluate(["tasks=[passkey]", f"model={demo.BACKBONE}", "out=run"]),
        "locret-train": lambda: train(["recipe=smollm2-135m", "out=run"]),
        "make_long_text.py": lambda: load_script("scripts/make_long_text.py").main(["--tokens", "2048"]),
    }[program]()
    assert status == 1 and capsys.readouterr().err.endswith(": fetched\n")


def test_names_hold_where_the_package_is_installed(tmp_path, monkeypatch):
    """As a wheel leaves it: heads beside the package, the backbone in the user's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(index, "INSTALLED", tmp_path / "site-packages")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert heads_folder(demo.HEADS) == tmp_path / "site-packages" / "locret_demo"
    assert demo.is_missing(demo.BACKBONE)
    demo.backbone_folder().mkdir(parents=True)
    assert demo.backbone_folder() == tmp_path / "cache" / "locret_kit" / "SmolLM2-135M-Instruct"
    assert not demo.is_missing(demo.BACKBONE) and not demo.is_missing("any/model")


def test_a_whole_model_with_heads_in_it_loads(tmp_path, model):
    """As the authors' training writes it; a weight of neither is still refused."""
    torch.manual_seed(1)
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(model.config), "tiny", 8))
    own = state_of(heads, torch.float32)
    torch.save({**model.state_dict(), **own}, tmp_path / "whole.pt")
    assert read_checkpoint(tmp_path / "whole.pt").state.keys() == own.keys()
    torch.save({**own, "model.layers.0.self_attn.fc3.weight": torch.zeros(1)}, tmp_path / "more.pt")
    assert "model.layers.0.self_attn.fc3.weight" in read_checkpoint(tmp_path / "more.pt").state
