"""Training signals: a loss of one's own, units of scores, and what is said of signals that there were."""

import json
from pathlib import Path

import pytest
import torch
from equal_runs import refused
from tiny_models import tiny_model

from locret_kit import HeadsConfig, RetainingHeads
from locret_kit.backbones.spec import spec_of
from locret_kit.cis import cis_loss
from locret_kit.cli.train import main
from locret_kit.config.recipes import load_config
from locret_kit.policies.base import Entry
from locret_kit.policies.grammar import parse_loss
from locret_kit.policies.methods.locret import Cis
from locret_kit.policies.registry import load_plugin
from locret_kit.training.module import HeadTraining, unit_of

TINY = ["recipe=tiny", "backbone.model=any"]
PLUGIN = """
from typing import Annotated

from annotated_types import Gt

from locret_kit.policies.registry import part


@part("loss", "{name}")
class Power:
    power: Annotated[float, Gt(0)] = 2.0

    def __call__(self, predicted_BHS, target_BHS):
        each_BHS = (predicted_BHS - target_BHS).abs() ** self.power
        return each_BHS{reduced}
"""


def plugin(tmp_path: Path, name: str, reduced: str = "") -> str:
    path = tmp_path / f"{name}.py"
    path.write_text(PLUGIN.format(name=name, reduced=reduced))
    return str(path)


@pytest.mark.parametrize("reduced", ["", ".amax()"])
def test_a_loss_of_ones_own_is_weighed_by_slot_or_counts_as_it_is(tmp_path, reduced):
    name = f"power-{len(reduced)}"
    load_plugin(plugin(tmp_path, name, reduced))
    predicted, target = torch.randn(1, 2, 20), torch.randn(1, 2, 20)
    weights = dict(top_fraction=0.1, top_weight=7.0, smoothing=0.5)
    got, smooth = cis_loss(predicted, target, loss=parse_loss(f"{name}(3)"), **weights)
    both = zip(predicted[0].tolist(), target[0].tolist(), strict=True)
    each = [[abs(p - t) ** 3 for p, t in zip(*rows, strict=True)] for rows in both]
    if reduced:
        want = max(map(max, each))
    else:
        tops = [sorted(range(20), key=lambda s, row=row: -row[s])[:2] for row in target[0].tolist()]
        weights = [[7.0 if s in top else 1.0 for s in range(20)] for top in tops]
        want = sum(w * x for ws, xs in zip(weights, each, strict=True) for w, x in zip(ws, xs, strict=True))
        want /= sum(map(sum, weights))
    assert got.item() == pytest.approx(want, rel=1e-4) and smooth > 0


def test_a_run_learns_by_a_loss_from_a_file(backbone, tmp_path, capsys):
    file = plugin(tmp_path, "cubed")
    words = [
        "recipe=tiny", f"backbone.model={backbone}", "trainer.accelerator=cpu", "optim.steps=2", "data.val_samples=1",
        f"plugin={file}", "loss.kind=cubed(power=3)", f"out={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(words) == 0
    heads = RetainingHeads.from_pretrained(tmp_path / "run" / "heads")
    assert heads.config.target == "logit", "of no scale that heads share"
    trained = json.loads((tmp_path / "run" / "heads" / "training.json").read_text())
    assert trained["loss"]["kind"] == "cubed(power=3)" and trained["plugin"] == file
    for word, said in (
        ("loss.kind=cubd", "loss='cubd' is unknown. Did you mean 'cubed'? Known: "),
        ("loss.kind=cubed(power=-1)", "loss=cubed: power=-1 must be above 0"),
        ("loss.kind=cubed(beta=1)", "loss=cubed: parameter 'beta' is unknown. There are: power."),
        ("plugin=nowhere.py", "plugin='nowhere.py': FileNotFoundError"),
    ):
        assert said in refused(capsys, *(w for w in words if w.partition("=")[0] != word.partition("=")[0]), word)


def test_the_unit_of_scores_is_said():
    words = ("target.kind=logit", "target.kind=log_prob", "loss.kind=smooth_l1(beta=0.5)")
    assert [unit_of(load_config([*TINY, word])) for word in words] == ["logit", "log_prob", "log_prob"]


@pytest.mark.parametrize("unit", ["logit", "log_prob"])
def test_a_loss_of_ones_own_begins_with_heads_of_either_unit(tmp_path, unit):
    load_plugin(plugin(tmp_path, f"own-{unit}"))
    given = [*TINY, "target.kind=log_prob", f"loss.kind=own-{unit}", f"heads.init={tmp_path / 'first'}"]
    first = RetainingHeads(HeadsConfig.for_backbone(spec_of(tiny_model("llama").config), "tiny", 16, target=unit))
    first.save_pretrained(tmp_path / "first")
    begun = HeadTraining(tiny_model("llama"), load_config(given))
    begun.begin()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), begun.heads.parameters(), strict=True))


def test_heads_of_a_form_that_there_was_are_refused(tmp_path):
    heads = RetainingHeads(HeadsConfig.for_backbone(spec_of(tiny_model("llama").config), "tiny", 6))
    heads.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "form": "sink"}))
    with pytest.raises(ValueError, match="unknown field .form."):
        RetainingHeads.from_pretrained(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "form": "mlp"}))
    assert RetainingHeads.from_pretrained(tmp_path).config == heads.config


def test_decay_lowers_a_score_by_its_age():
    """Kept is what is largest of ``score - decay * age``, whenever it is looked at."""
    scores = torch.tensor([[[3.0, 1.0, 2.5, 0.0, 2.6]]])
    head = type("Head", (torch.nn.Module,), {"forward": lambda self, q, k, v, linear: scores[..., : q.shape[2]]})()
    x = torch.zeros(1, 1, 5, 2)
    made = Cis(decay=0.2).score_new_tokens(Entry(0, 100, x, x, x, head, 0))
    for now in (105, 900):
        aged = [scores[0, 0, i].item() - 0.2 * (now - 100 - i) for i in range(5)]
        assert made[0, 0].argsort(descending=True).tolist() == sorted(range(5), key=lambda i, aged=aged: -aged[i])
    assert torch.equal(Cis().score_new_tokens(Entry(0, 100, x, x, x, head, 0)), scores)
