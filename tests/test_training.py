"""``locret-train`` end to end on a tiny backbone: it learns, resumes to the same curve, and loses nothing on Ctrl-C."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import IMAGES, TENSORS, EventAccumulator
from tiny_tokenizer import save_tiny_backbone

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.training.board import cis_image, marked_text, most_kept, ranks
from locret_kit.training.curves import read_curves

SETTINGS = ["recipe=tiny", "data.max_tokens=512", "trainer.accelerator=cpu", "data.val_samples=2"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


def curve(out: Path, tag: str = "loss") -> dict[int, float]:
    return read_curves(out)[tag]


def train(backbone: Path, out: Path, *more: str) -> int:
    return main([*SETTINGS, f"backbone.model={backbone}", f"out={out}", *more])


def test_it_learns_and_exports(backbone, tmp_path):
    assert train(backbone, tmp_path, "optim.steps=60", "optim.lr=0.01", "trainer.val_every=20") == 0
    assert len(curve(tmp_path)) == 60
    losses = list(curve(tmp_path, "val/loss").values())
    assert len(losses) == len(curve(tmp_path, "val/recall")) == 3
    assert losses[-1] < 0.9 * losses[0]
    folder, file = (
        RetainingHeads.from_pretrained(str(tmp_path / "heads")),
        RetainingHeads.from_pretrained(str(tmp_path / "heads.pt")),
    )
    assert folder.config == file.config
    assert folder.config.backbone == str(backbone)
    assert folder.config.inference["budget"] == 128
    for a, b in zip(folder.parameters(), file.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_same_seed_gives_the_same_curve_and_another_does_not(backbone, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert train(backbone, tmp_path / name, "optim.steps=3", f"seed={seed}") == 0
    assert curve(tmp_path / "a") == curve(tmp_path / "b") != curve(tmp_path / "c")


def test_training_begins_with_given_heads(backbone, tmp_path, capsys):
    first, then = tmp_path / "first", tmp_path / "then"
    exact = ("heads.dtype_saved=float32", "trainer.val_every=1")
    assert train(backbone, first, "optim.steps=20", "optim.lr=0.01", *exact) == 0
    begin = f"heads.init={first / 'heads'}"
    assert train(backbone, then, "optim.steps=1", "optim.lr=1e-12", "optim.warmup_steps=0", begin, *exact) == 0
    assert list(curve(then, "val/loss").values()) == pytest.approx(
        list(curve(first, "val/loss").values())[-1:], rel=1e-6
    )
    capsys.readouterr()
    for wrong, said in (("heads.d_hidden=7", "heads.d_hidden"), ("target.kind=logit", "target.kind")):
        assert train(backbone, tmp_path / "none", begin, wrong) == 1, wrong
        assert f"{said}=" in capsys.readouterr().err


def test_the_best_heads_are_kept_and_load(backbone, tmp_path):
    more = ["optim.steps=10", "optim.lr=0.02", "trainer.val_every=2", "trainer.keep_best=2"]
    assert train(backbone, tmp_path, *more) == 0
    recalls = sorted((round(value, 4), step) for step, value in read_curves(tmp_path)["val/recall"].items())
    wanted = {f"recall={recall:.4f}-step={step}" for recall, step in recalls[-2:]}
    assert {path.name for path in (tmp_path / "best").iterdir()} == wanted
    for folder in (tmp_path / "best").iterdir():
        assert RetainingHeads.from_pretrained(str(folder)).config.backbone == str(backbone)
    nothing = [*SETTINGS[:-1], "data.val_samples=0", f"backbone.model={backbone}", f"out={tmp_path / 'none'}"]
    assert main(nothing) == 0
    assert not (tmp_path / "none" / "best").exists()


def test_the_board_shows_layers_pictures_text_and_settings(backbone, tmp_path):
    assert train(backbone, tmp_path, "optim.steps=2", "trainer.val_every=2") == 0
    (file,) = tmp_path.rglob("events.*")
    events = EventAccumulator(str(file), size_guidance={IMAGES: 0, TENSORS: 0})
    events.Reload()
    tags = events.Tags()
    layers = [f"val/recall_layer/{layer:02d}" for layer in range(3)]
    assert {*layers, "tok/s", "memory/peak_MiB", "train/lr"} <= set(tags["scalars"])
    curves = read_curves(tmp_path)
    assert sum(curves[tag][2] for tag in layers) / 3 == pytest.approx(curves["val/recall"][2], abs=1e-6)
    assert tags["images"] == ["val/predicted above target"]
    image = events.Images("val/predicted above target")[0]
    assert image.height == 2 * (256 // 6) * 6 + 4, "3 layers of 2 heads, predictions above truth"
    text = events.Tensors("val/kept tenth/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("    ") and text.count("⟦") == text.count("⟧") > 0
    assert any("hparams" in tag for tag in tags["tensors"]) or "_hparams_/experiment" in str(file.read_bytes())


def test_exported_heads_come_with_their_settings_and_curves(backbone, tmp_path):
    assert train(backbone, tmp_path, "optim.steps=3") == 0
    settings = json.loads((tmp_path / "heads" / "training.json").read_text())
    assert settings["optim"]["steps"] == 3 and settings["backbone"]["model"] == str(backbone)
    with (tmp_path / "heads" / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    curve = read_curves(tmp_path)["loss"]
    assert [float(row["loss"]) for row in rows] == pytest.approx([curve[step] for step in (1, 2, 3)], rel=1e-4)


# ---- pictures and texts -------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**16))
def test_ranks_are_those_of_a_sort(rows, slots, seed):
    scores = torch.rand(rows, slots, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got = ranks(scores)
    for row, mine in zip(scores.tolist(), got.tolist(), strict=True):
        wanted = [sum(other < value for other in row) / max(1, slots - 1) for value in row]
        assert mine == pytest.approx(wanted, abs=1e-6)


def test_the_picture_has_predictions_above_truth_and_bins_keep_the_highest():
    truth = torch.zeros(2, 4000)
    truth[0, 17] = truth[1, 3999] = 1
    image = cis_image(-truth, truth, width=100)
    tall = 128 * 2
    assert image.shape == (1, 2 * tall + 4, 100) and image.min() >= 0 and image.max() <= 1
    below = image[0, -tall:]
    assert below[0, 0] == 1 and below[-1, -1] == 1
    assert (image[0, tall : tall + 4] == 1).all()


@given(st.integers(1, 5), st.integers(1, 60), st.integers(0, 2**16))
def test_most_kept_are_those_with_most_votes(rows, slots, seed):
    scores = torch.rand(rows, slots, generator=torch.Generator().manual_seed(seed))
    n = max(1, slots // 10)
    votes = [sum(sorted(row, reverse=True)[n - 1] <= row[slot] for row in scores.tolist()) for slot in range(slots)]
    kept = most_kept(scores)
    assert int(kept.sum()) == n
    lowest = min(vote for vote, keep in zip(votes, kept.tolist(), strict=True) if keep)
    assert all(vote <= lowest for vote, keep in zip(votes, kept.tolist(), strict=True) if not keep)


@given(st.lists(st.tuples(st.sampled_from(["a", " b", "\n", "*x*"]), st.booleans()), max_size=30))
def test_marks_can_be_taken_out_again(pieces):
    tokens, kept = [t for t, _ in pieces], [k for _, k in pieces]
    text = "\n".join(line.removeprefix("    ") for line in marked_text(tokens, kept).split("\n"))
    assert text.replace("⟦", "").replace("⟧", "") == "".join(tokens)
    inside = "".join(part.split("⟧")[0] for part in text.split("⟦")[1:])
    assert inside == "".join(token for token, keep in pieces if keep)
    assert "⟧⟦" not in text


def test_errors_are_one_line(backbone, tmp_path, capsys):
    for arguments, said in (
        (["recipe=smolm2-135m"], "smollm2-135m"),
        ([*SETTINGS, "backbone.model=checkpoints/nothing"], "no such folder"),
        ([*SETTINGS, f"backbone.model={backbone}", "optim.learning=1"], "optim.lr"),
        ([*SETTINGS, f"backbone.model={backbone}", "data.sources=[nowhere.jsonl]"], "nowhere.jsonl"),
    ):
        assert main([*arguments, f"out={tmp_path}"] if "recipe=smolm2-135m" not in arguments else arguments) == 1
        error = [e for e in capsys.readouterr().err.splitlines() if e.startswith("locret-train:")]
        assert len(error) == 1 and said in error[0], error
