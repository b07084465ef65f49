"""``locret-train`` end to end on a tiny backbone: it learns, resumes to the same curve, and loses nothing on Ctrl-C."""

import json
import os
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from equal_runs import refused
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from safetensors.torch import load_file, save_file
from tiny_tokenizer import save_tiny_backbone, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.config.train_options import DataConfig
from locret_kit.samples import encode_chat
from locret_kit.samples.haystack import load_text
from locret_kit.samples.records import to_messages
from locret_kit.samples.synthetic import synthetic_sample
from locret_kit.training import fit
from locret_kit.training.data import Samples, Share
from locret_kit.training.fit import read_curves, write_curves
from locret_kit.training.module import HeadTraining

SETTINGS = ["recipe=tiny", "data.max_tokens=512", "trainer.accelerator=cpu", "data.val_samples=2"]


def curve(out: Path, tag: str = "loss") -> dict[int, float]:
    return read_curves(out)[tag]


def train(backbone: Path, out: Path, *more: str) -> int:
    return main([*SETTINGS, f"backbone.model={backbone}", f"out={out}", *more])


def test_it_learns_and_exports(backbone, tmp_path, capsys):
    """It validates after the last step, too; progress goes to stderr."""
    assert train(backbone, tmp_path, "optim.steps=26", "optim.lr=0.02", "trainer.val_every=10") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"heads: {tmp_path / 'heads'}\ntry:") and "locret-train: 100%" in err and "26/26" in err
    assert len(curve(tmp_path)) == 26
    losses, recalls = curve(tmp_path, "val/loss"), curve(tmp_path, "val/recall")
    assert [*losses] == [*recalls] == [10, 20, 26]
    assert losses[26] < 0.9 * losses[10]
    assert json.loads((tmp_path / "heads" / "training.json").read_text())["recall"] == round(recalls[26], 4)
    folder, file = (RetainingHeads.from_pretrained(str(tmp_path / name)) for name in ("heads", "heads.pt"))
    assert folder.config == file.config
    assert folder.config.backbone == str(backbone)
    assert folder.config.inference["budget"] == 128
    for a, b in zip(folder.parameters(), file.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_begins_with_given_heads(backbone, tmp_path, capsys):
    first, then = tmp_path / "first", tmp_path / "then"
    exact = "heads.dtype_saved=float32"
    assert train(backbone, first, "optim.steps=5", "optim.lr=0.01", "trainer.val_every=5", exact) == 0
    begin = f"heads.init={first / 'heads'}"
    still = ("optim.lr=1e-12", "optim.warmup_steps=0", "trainer.val_every=1", begin, exact)
    assert train(backbone, then, *still, "optim.steps=1") == 0
    (mine,), (theirs,) = (curve(out, "val/loss").values() for out in (then, first))
    assert mine == pytest.approx(theirs, rel=1e-6)
    capsys.readouterr()
    for wrong, said in (("heads.d_hidden=7", "heads.d_hidden"), ("target.kind=logit", "target.kind")):
        assert train(backbone, tmp_path / "none", begin, wrong) == 1, wrong
        assert f"{said}=" in capsys.readouterr().err
    shutil.rmtree(first)
    assert train(backbone, then, *still, "optim.steps=2", "resume=auto") == 0, "a checkpoint has later weights"


def test_the_best_heads_are_kept_and_load(backbone, tmp_path):
    more = ["optim.steps=10", "optim.lr=0.02", "trainer.val_every=2", "trainer.keep_best=2"]
    assert train(backbone, tmp_path, *more) == 0
    recalls = sorted((round(value, 4), step) for step, value in read_curves(tmp_path)["val/recall"].items())
    wanted = {f"recall={recall:.4f}-step={step}" for recall, step in recalls[-2:]}
    assert {path.name for path in (tmp_path / "best").iterdir()} == wanted
    for folder in (tmp_path / "best").iterdir():
        assert RetainingHeads.from_pretrained(str(folder)).config.backbone == str(backbone)
        settings = json.loads((folder / "training.json").read_text())
        assert folder.name == f"recall={settings['recall']:.4f}-step={settings['step']}"
        assert settings["optim"]["steps"] == 10
    best = tmp_path / "best" / f"recall={recalls[-1][0]:.4f}-step={recalls[-1][1]}"
    mine, theirs = (RetainingHeads.from_pretrained(str(path)).fingerprint for path in (tmp_path / "best", best))
    assert mine == theirs
    nothing = [*SETTINGS[:-1], "data.val_samples=0", f"backbone.model={backbone}", f"out={tmp_path / 'none'}"]
    assert main(nothing) == 0
    assert not (tmp_path / "none" / "best").exists()


def test_curves_are_of_one_run_where_another_lies_in_its_folder(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for out, loss in ((tmp_path, 1.0), (tmp_path / "second", 2.0)):
        with SummaryWriter(str(out / "tensorboard")) as writer:
            writer.add_scalar("loss", loss, 1)
    assert read_curves(tmp_path) == {"loss": {1: 1.0}}


def test_curves_end_with_the_run_that_went_on_from_an_earlier_state(tmp_path):
    write_curves({"loss": {1: 2.0, 2: 1.5, 3: 1.0}}, 2, tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_text().split() == ["step,loss", "1,2", "2,1.5"]


def test_the_board_shows_layers_pictures_text_and_settings(backbone, tmp_path, monkeypatch, show):
    monkeypatch.setattr(HeadTraining, "_show", show)
    assert train(backbone, tmp_path, "optim.steps=2", "trainer.val_every=2") == 0
    from tensorboard.backend.event_processing.event_accumulator import IMAGES, TENSORS, EventAccumulator

    (file,) = tmp_path.rglob("events.*")
    events = EventAccumulator(str(file), size_guidance={IMAGES: 0, TENSORS: 0})
    events.Reload()
    tags = events.Tags()
    layers = [f"val/recall_layer/{layer:02d}" for layer in range(3)]
    assert {*layers, "tok/s", "memory/peak_MiB", "train/lr"} <= set(tags["scalars"])
    assert tags["images"] == ["val/predicted above target"]
    image = events.Images("val/predicted above target")[0]
    assert (image.width, image.height) == (1000, 640)
    text = events.Tensors("val/kept tenth/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("    ") and text.count("⟦") == text.count("⟧") > 0
    assert any("hparams" in tag for tag in tags["tensors"]) or "_hparams_/experiment" in str(file.read_bytes())


# ---- records that cannot be used ------------------------------------------------------------------------------------------

GOOD = [{"instruction": f"What is {i}? " * 9, "output": f"It is {i}."} for i in range(4)]
BAD = [
    ({"foo": 1}, "no known schema has the keys ['foo']"),
    ({"instruction": "What?", "output": " "}, "is an empty answer"),
    ({"messages": [{"role": "user", "content": "What?"}]}, "no assistant turn"),
    ({"instruction": "What?", "output": "It is quiet. " * 400}, "max_tokens=200 must be at least"),
    ({"input": "What?", "instructions": [], "outputs": []}, "instructions and outputs must be equally many"),
    ({"conversations": [{"from": ["gpt"], "value": "It is."}]}, "turn 0 needs a 'from' of"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "turn 0 needs a 'role' of"),
    ({"conversations": []}, "no assistant turn"),
]


def jsonl(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def samples_of(source: Path, tokenizer=None) -> Samples:
    data = DataConfig(sources=[str(source)], max_tokens=200, val_samples=0)
    return Samples(data, tokenizer or tiny_tokenizer(), seed=0)


def test_a_record_that_cannot_be_used_is_named_once_and_another_is_drawn(tmp_path, capsys):
    records = [record for pair in zip(BAD, GOOD + GOOD, strict=True) for record in (pair[0][0], pair[1])]
    source, n = jsonl(tmp_path / "mixed.jsonl", records), 80
    samples = samples_of(source)
    drawn = [samples[i] for i in range(n)] + [samples[i] for i in range(n)]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(BAD)
    for number, (_, reason) in enumerate(BAD):
        (line,) = [line for line in said if f"{str(source)!r}, record {2 * number} " in line]
        assert reason in line, line
    again = samples_of(source)
    assert [again[i] for i in reversed(range(n))] == drawn[n - 1 :: -1] == drawn[: n - 1 : -1], "of the index alone"
    usable = [encode_chat(tiny_tokenizer(), to_messages(record), max_tokens=200) for record in GOOD]
    assert all(sample in usable for sample in drawn) and all(sample in drawn for sample in usable)
    whole = samples_of(jsonl(tmp_path / "whole.jsonl", [GOOD[0] if i % 2 == 0 else r for i, r in enumerate(records)]))
    kept = [whole[i] == drawn[i] for i in range(n) if whole[i] != usable[0]]
    assert all(kept) and len(kept) > n / 4, "what is usable at once is what it is without bad records"


def test_an_answer_with_nothing_in_front_of_it_cannot_be_used(tmp_path, capsys):
    """Without a template, an answer may come first: no slot is there to be scored."""
    bare = tiny_tokenizer()
    bare.chat_template = None
    source = jsonl(tmp_path / "bare.jsonl", [{"messages": [{"role": "assistant", "content": "It is."}]}, GOOD[0]])
    samples = samples_of(source, bare)
    assert all(samples[i].prompt_len for i in range(20))
    assert "record 0 is left out: there is no text before its answer" in capsys.readouterr().err


def test_a_data_set_of_unknown_records_is_not_read_to_its_end(monkeypatch, capsys):
    """It is one error and no list."""
    read = []

    def endless(*args, **more):
        for i in count():
            read.append(i)
            yield {"text": "no question"}

    monkeypatch.setattr("locret_kit.training.data.read_records", endless)
    with pytest.raises(ValueError, match=r"'a/b' has no usable record among \d+ drawn; .*\['text'\]; known schemas: "):
        samples_of(Path("a/b"))
    assert len(read) <= 1000 and "left out" not in capsys.readouterr().err


def test_lines_that_are_no_json_are_counted(tmp_path, capsys):
    (tmp_path / "none.jsonl").write_text("no\n[1]\n")
    with pytest.raises(ValueError, match=r"none\.jsonl' holds no records"):
        samples_of(tmp_path / "none.jsonl")
    assert ": 2 lines are left out, the first since " in capsys.readouterr().err


def test_a_huge_record_costs_no_more_than_a_long_one(tmp_path):
    """20 MB of answer are refused before they are tokenised, and a question is cut first: minutes before, seconds now."""
    text = "The harbour was quiet when the boats came in. "
    long = {"instruction": text * 4000, "output": "It is quiet."}
    huge = {"instruction": text * 400_000, "output": "It is quiet."}
    refused = {"instruction": "What?", "output": text * 400_000}
    samples = samples_of(jsonl(tmp_path / "huge.jsonl", [huge, refused, *GOOD]))
    drawn = [samples[i] for i in range(30)]
    assert encode_chat(tiny_tokenizer(), to_messages(long), max_tokens=200) in drawn


def test_synthetic_samples_that_are_too_long_are_drawn_again(capsys):
    """Between the least and the largest length that a sample needs a run ended in its middle."""
    tokenizer, made = tiny_tokenizer(), {}
    texts = [load_text("pydoc")]
    for index in range(40):
        with suppress(ValueError):
            made[index] = synthetic_sample(tokenizer, texts, 256, 0, index)
    samples = Samples(DataConfig(max_tokens=256, val_samples=0), tokenizer, seed=0)
    drawn = [samples[i] for i in range(40)]
    assert 0 < len(made) < 40 and all(drawn[i] == sample for i, sample in made.items())
    assert all(0.9 * 256 <= len(sample.ids) <= 256 for sample in drawn)
    assert capsys.readouterr().err.count("is left out: n_tokens=256 is too small") == 40 - len(made)
    with pytest.raises(ValueError, match="data.max_tokens=20 is too small for synthetic samples"):
        Samples(DataConfig(max_tokens=20, val_samples=0), tokenizer, seed=0)
    with pytest.raises(ValueError, match=r"data\.lengths=\[20\] is too small for synthetic samples"):
        Samples(DataConfig(max_tokens=256, lengths=[20], val_samples=0), tokenizer, seed=0)


def test_sizes_that_nothing_can_hold_are_one_line(backbone, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(fit.TRAININGS, "heads", lambda backbone, cfg: torch.empty(10**15))  # PyTorch's own error
    words = [*SETTINGS, f"backbone.model={backbone}", f"out={tmp_path / 'run'}"]
    assert "locret-train: heads.d_hidden=77 does not fit into memory" in refused(capsys, *words, "heads.d_hidden=77")
    monkeypatch.undo()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for setting, said in (
        ("data.num_workers=1000", "data.num_workers=1000 must be at most 8, four per CPU core"),
        ("heads.init=nope", "heads.init=nope: ckpt='nope': no such file or folder"),
    ):
        assert said in refused(capsys, *words, setting)


# ---- pictures and texts -------------------------------------------------------------------------------------------


def test_errors_are_one_line(backbone, tmp_path, capsys, monkeypatch):
    bad, text = jsonl(tmp_path / "bad.jsonl", [BAD[2][0]]), tmp_path / "book.txt"
    text.write_text("The harbour was quiet. ")
    monkeypatch.setattr(fit, "load_backbone", None)  # all is said before weights are loaded
    known = [*SETTINGS, f"backbone.model={backbone}"]
    for arguments, said in (
        ([*SETTINGS, "backbone.model=checkpoints/nothing"], "no such folder"),
        ([*known, "data.sources=[nowhere.jsonl]"], "nowhere.jsonl"),
        ([*known, f"data.sources=[{bad}]", "data.num_workers=1"], "no assistant turn"),
        ([*known, f"data.sources=[{text}]"], "text without questions goes to data.texts"),
        ([*known, f"data.texts=[{bad}]"], "data.texts: "),
    ):
        assert said in refused(capsys, *arguments, f"out={tmp_path}")
    taken = [*SETTINGS, "backbone.model=checkpoints/nothing", f"out={bad}"]
    assert f"out={bad} cannot be written: {bad}: File exists" in refused(capsys, *taken)


def test_samples_beyond_the_window_are_said(tmp_path, capsys):
    """Positions that are embeddings end with the window, where rotations go on."""
    opt = AutoConfig.for_model(
        "opt", vocab_size=400, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(opt).save_pretrained(tmp_path / "opt")
    tiny_tokenizer().save_pretrained(tmp_path / "opt")
    learned = [SETTINGS[0], *SETTINGS[2:], f"backbone.model={tmp_path / 'opt'}", f"out={tmp_path / 'run'}"]
    assert "data.max_tokens=1024 must be at most the window of" in refused(capsys, *learned, "data.max_tokens=1024")
    short = save_tiny_backbone(tmp_path / "short", max_position_embeddings=256)
    assert train(short, tmp_path / "long", "optim.steps=1", "trainer.val_every=2") == 0
    said = f"data.max_tokens=512 must be at most the window of {short}, 256, otherwise heads learn"
    assert said in capsys.readouterr().err


def test_a_loss_that_is_no_number_ends_the_run_before_it_spoils_the_heads(tmp_path, capsys):
    backbone = save_tiny_backbone(tmp_path / "backbone")
    weights = load_file(backbone / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("inf")
    save_file(weights, backbone / "model.safetensors", metadata={"format": "pt"})
    more = [*SETTINGS, f"backbone.model={backbone}", f"out={tmp_path / 'run'}", "optim.lr=0.25"]
    assert "loss=nan after 0 steps: the training has diverged" in refused(capsys, *more)
    assert not (tmp_path / "run" / "heads").exists() and not list(tmp_path.glob("run/state/*"))


def test_an_accelerator_that_is_not_there_is_one_line_before_the_backbone_is_loaded(tmp_path, monkeypatch, capsys):
    for accelerator in (CUDAAccelerator, MPSAccelerator):
        monkeypatch.setattr(accelerator, "is_available", staticmethod(lambda: False))
    settings = ["recipe=tiny", "backbone.model=checkpoints/nothing", f"out={tmp_path}"]
    for name in ("gpu", "cuda"):
        error = refused(capsys, *settings, f"trainer.accelerator={name}")
        assert f"trainer.accelerator={name}" in error and "choose another trainer.accelerator" in error


def test_an_error_of_a_process_that_prepares_samples_is_its_own_line(backbone, tmp_path, monkeypatch, capsys):
    def gone(self, number):
        raise ValueError("data.sources: 'lab/streamed' is gone")

    monkeypatch.setattr(Share, "__getitem__", gone)
    more = [*SETTINGS, f"backbone.model={backbone}", f"out={tmp_path}", "data.num_workers=1"]
    assert refused(capsys, *more) == "locret-train: data.sources: 'lab/streamed' is gone"
