"""Trials: heads that learn from the same forwards are those that each would be alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_tokenizer import save_tiny_backbone

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.config.recipes import known_recipes, load_config
from locret_kit.config.trials import trials_of
from locret_kit.samples.sample import Sample
from locret_kit.training.module import HeadTraining
from locret_kit.training.scalars import read_curves
from locret_kit.training.trial import asking

TRIALS = """
first: {target: {kind: log_mass, window: 4}, optim: {lr: 0.01}}
drawn: {target: {queries: answers}, loss: {kind: boundary, budgets: 3}}
again: {target: {queries: replay, lead: 0, values: true}, loss: {kind: boundary}, heads: {form: sink, d_hidden: 3}}
"""
SETTINGS = [
    "recipe=tiny", "data.max_tokens=256", "data.queries=both", "trainer.accelerator=cpu", "data.val_samples=1",
    "optim.steps=2", "trainer.val_every=2", "optim.accumulate=2", "heads.dtype_saved=float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


def written(tmp_path: Path, text: str = TRIALS) -> str:
    path = tmp_path / "trials.yaml"
    path.write_text(text)
    return f"trials.file={path}"


def weights(folder: Path) -> list[torch.Tensor]:
    return list(RetainingHeads.from_pretrained(folder).parameters())


def equal(mine: Path, theirs: Path) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(mine), weights(theirs), strict=True))


def test_in_company_is_alone_bit_for_bit(backbone, tmp_path):
    """Weights, curves and settings, of losses that draw, of other forms and of other rates, whoever is there too."""
    shared = [*SETTINGS, f"backbone.model={backbone}"]
    together = tmp_path / "together"
    assert main([*shared, written(tmp_path), f"out={together}", "data.batch=2"]) == 0
    alone = {
        "first": ["target.kind=log_mass", "target.window=4", "optim.lr=0.01"],
        "drawn": ["target.queries=answers", "loss.kind=boundary", "loss.budgets=3"],
        "again": ["target.queries=replay", "target.lead=0", "target.values=true", "loss.kind=boundary", "heads.form=sink",
                  "heads.d_hidden=3"],
    }  # fmt: skip
    curves = read_curves(together)
    for name, keys in alone.items():
        out = tmp_path / name
        assert main([*shared, *keys, f"out={out}", "data.batch=2"]) == 0
        assert equal(together / "heads" / name, out / "heads"), name
        for tag, curve in read_curves(out).items():
            if tag.startswith(("loss", "recall", "val/")):
                assert curves[f"{name}/{tag}"] == curve, (name, tag)
        mine, theirs = (
            json.loads((folder / "training.json").read_text()) for folder in (together / "heads" / name, out / "heads")
        )
        assert mine.pop("out") == f"{together}/{name}" and theirs.pop("out") == str(out)
        assert mine == theirs
    few = tmp_path / "few"  # fewer, and with rates: the same again
    assert (
        main(
            [
                *shared,
                written(tmp_path),
                "trials.only=[drawn]",
                "trials.rates=[0.001,0.01]",
                f"out={few}",
                "data.batch=2",
            ]
        )
        == 0
    )
    rate = load_config(["recipe=tiny", "backbone.model=any"]).optim.lr
    assert {path.name for path in (few / "heads").iterdir() if path.is_dir()} == {"drawn@0.001", "drawn@0.01"}
    same = f"drawn@{rate:g}"
    if (few / "heads" / same).exists():
        assert equal(few / "heads" / same, together / "heads" / "drawn")
    assert not equal(few / "heads" / "drawn@0.001", few / "heads" / "drawn@0.01")


def test_targets_that_are_made_alike_are_made_once(backbone, tmp_path, monkeypatch):
    from locret_kit.training import observer

    made = []
    target = observer.cis_target
    monkeypatch.setattr(
        observer, "cis_target", lambda *args, **keys: (made.append(keys["kind"]), target(*args, **keys))[1]
    )
    three = "a: {}\nb: {loss: {kind: mse}}\nc: {target: {kind: log_prob}}\n"
    more = ["optim.steps=1", "optim.accumulate=1", "data.val_samples=0"]
    keys = [key for key in SETTINGS if not key.startswith(("optim.", "data.val"))]
    assert (
        main(
            [
                *keys,
                *more,
                f"backbone.model={backbone}",
                "target.kind=logit",
                written(tmp_path, three),
                f"out={tmp_path / 'run'}",
            ]
        )
        == 0
    )
    layers = len(made) // 2
    assert made.count("logit") == made.count("log_prob") == layers > 0


def test_a_run_of_trials_that_ended_goes_on(backbone, tmp_path, monkeypatch):
    shared = [
        *SETTINGS,
        f"backbone.model={backbone}",
        written(tmp_path),
        "trials.only=[first,drawn]",
        "trainer.save_every=1",
    ]
    assert main([*shared, f"out={tmp_path / 'whole'}"]) == 0
    step = HeadTraining.training_step

    def end(self: HeadTraining, *given: object) -> None:
        if self.global_step == 1:
            raise OSError("the disk is full")
        step(self, *given)

    cut = [*shared, f"out={tmp_path / 'cut'}"]
    with monkeypatch.context() as patch:
        patch.setattr(HeadTraining, "training_step", end)
        assert main(cut) == 1
    assert main([*cut, "resume=auto"]) == 0
    for name in ("first", "drawn"):
        assert equal(tmp_path / "cut" / "heads" / name, tmp_path / "whole" / "heads" / name)


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("a: {data: {max_tokens: 9}}", [], "data.max_tokens in trial 'a' of trials.yaml is shared by all trials"),
        ("a: {target: {kid: logit}}", [], "unknown key 'target.kid' in trial 'a' of trials.yaml"),
        ("a: {target: {lead: -1}}", [], "target.lead=-1 in trial 'a' of trials.yaml must be"),
        ("a: {target: {window: 5}}", [], "trial a: target.window=5 has no effect on target.kind"),
        ("'a b': {}", [], "must be a name of letters"),
        ("a: {}", ["trials.only=[aa]"], "trials.only=aa is unknown; trials.yaml has: a"),
        ("a: {}", ["trainer.strategy=fsdp"], "needs trains=heads and trainer.strategy=auto or ddp"),
    ],
)
def test_what_trials_cannot_be_is_said(text, more, said, tmp_path):
    with pytest.raises(ValueError) as error:
        trials_of(load_config(["recipe=tiny", "backbone.model=any", written(tmp_path, text), *more]))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("file", "more", "signals"),
    [("signals", ["data.queries=both"], 10), ("answers", [], 3)],
    ids=["signals", "answers"],
)
def test_trials_that_ship_build_and_differ(file, more, signals):
    config = load_config(["recipe=smollm2-135m", *more, f"trials.file={file}", "trials.rates=[1e-3,3e-3]"])
    trials = trials_of(config)
    assert len(trials) == 2 * signals and {cfg.optim.lr for cfg in trials.values()} == {1e-3, 3e-3}
    seen = [(vars(cfg.target), vars(cfg.loss), cfg.heads.form) for cfg in trials.values()]
    assert sum(one not in seen[:i] for i, one in enumerate(seen)) == signals
    assert {(str(cfg.data), cfg.optim.steps, cfg.seed) for cfg in trials.values()} == {
        (str(config.data), config.optim.steps, 0)
    }
    assert file not in known_recipes()


def test_who_asks():
    sample = Sample(tuple(range(30)), ((4, 6), (10, 12), (20, 25), (26, 30)), scored=10, replayed=18)
    assert asking(sample, "all") == sample.answers
    assert asking(sample, "answers") == ((4, 6), (10, 12))
    assert asking(sample, "replay") == ((20, 25), (26, 30))
    with pytest.raises(ValueError, match=r"target.queries=replay needs data.queries=both, not answers"):
        load_config(["recipe=tiny", "backbone.model=any", "target.queries=replay"])
