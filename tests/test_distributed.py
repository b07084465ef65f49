"""Two processes over gloo make the curve of one at the same global batch, replicated or sharded, across restarts too."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from forked import ranks, start, status_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import save_tiny_backbone

from locret_kit import RetainingHeads
from locret_kit.cli.train import main
from locret_kit.samples.sample import Sample
from locret_kit.training import callbacks
from locret_kit.training.data import Share
from locret_kit.training.scalars import read_curves
from locret_kit.training.strategy import make_strategy

SETTINGS = [
    "recipe=tiny",
    "data.max_tokens=512",
    "trainer.accelerator=cpu",
    "trainer.val_every=2",
    "trainer.save_every=2",
    "optim.steps=6",
    "heads.dtype_saved=float32",
]
TAGS = ("loss", "recall", "train/regression", "val/loss", "val/recall")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory) -> Path:
    return save_tiny_backbone(tmp_path_factory.mktemp("backbone"))


def train(backbone: Path, out: Path, world: int, *more: str) -> None:
    """A training of 4 samples an optimiser step on ``world`` processes."""
    arguments = [*SETTINGS, f"backbone.model={backbone}", f"out={out}", f"optim.accumulate={4 // world}", *more]
    log = out.parent / f"{out.name}.log"
    if world == 1:
        statuses = [status_of(start(lambda: main(arguments), log))]
    else:
        statuses = ranks(lambda: main([*arguments, f"trainer.devices={world}"]), world, log)
    assert statuses == [0] * world, log.read_text()[-4000:]


def same(a: Path, b: Path) -> None:
    """Equal curves to 1e-5, equal heads to 1e-5."""
    first, second = read_curves(a), read_curves(b)
    for tag in TAGS:
        assert first[tag].keys() == second[tag].keys(), tag
        for step in first[tag]:
            assert abs(first[tag][step] - second[tag][step]) < 1e-5 * max(1, abs(first[tag][step])), (tag, step)
    mine, theirs = (RetainingHeads.from_pretrained(str(path / "heads")).state_dict() for path in (a, b))
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-5, rtol=1e-4) for name in mine)


@pytest.fixture(scope="module")
def alone(backbone, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    train(backbone, out, 1)
    assert len(read_curves(out)["loss"]) == 6
    return out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_make_the_curve_of_one(backbone, alone, tmp_path, strategy):
    train(backbone, tmp_path / "two", 2, f"trainer.strategy={strategy}")
    same(alone, tmp_path / "two")
    assert {path.name for path in (tmp_path / "two" / "best").iterdir()} == {
        path.name for path in (alone / "best").iterdir()
    }


def test_a_run_goes_on_with_another_strategy_and_number_of_processes(backbone, alone, tmp_path):
    """Steps 1 and 2 on one process, 3 and 4 sharded over two, 5 and 6 replicated: one state file, one order of samples."""
    save, out = callbacks.SaveEvery.on_train_batch_start, tmp_path / "run"
    for step, world, strategy in ((2, 1, "auto"), (4, 2, "fsdp")):

        def save_and_die(self, trainer, pl_module, *rest, last=step):
            save(self, trainer, pl_module, *rest)
            if trainer.global_step == last:
                trainer.strategy.barrier()
                os._exit(9)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(callbacks.SaveEvery, "on_train_batch_start", save_and_die)
            with pytest.raises(AssertionError, match="9"):
                train(backbone, out, world, f"trainer.strategy={strategy}", "resume=auto")
        assert [path.name for path in (out / "state").iterdir()] == [f"step={step}.ckpt"]
    train(backbone, out, 2, "trainer.strategy=ddp", "resume=auto")
    same(alone, out)


@given(st.integers(0, 20), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**16))
def test_a_step_takes_the_same_samples_on_any_number_of_processes(start, batch, batches, seed):
    rng = random.Random(seed)
    samples = [Sample(tuple([i] * rng.randint(1, 9)), ()) for i in range(200)]
    for world in (1, 2, 3):
        shares = [iter(Share(samples, start, rank, world, batch * batches, batch)) for rank in range(world)]
        size = world * batch * batches
        for step in range(2):
            taken = [next(share) for share in shares]
            seen = sorted(sample.ids[0] for share in taken for forward in share for sample in forward)
            assert seen == list(range(start + step * size, start + (step + 1) * size))
            for share in taken:
                lengths = [len(sample.ids) for forward in share for sample in forward]
                assert [len(forward) for forward in share] == [batch] * batches
                assert batch == 1 or lengths == sorted(lengths)


def test_several_devices_need_a_strategy():
    with pytest.raises(ValueError, match=r"trainer\.strategy=auto runs one process, not trainer\.devices=2"):
        make_strategy("auto", 2, 1)
