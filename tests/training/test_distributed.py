"""Two processes over gloo make the curve of one at the same global batch, replicated or sharded, across restarts too."""

import os
import random
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked import ranks
from hypothesis import given
from hypothesis import strategies as st
from processes import same, train, train_to

from locret_kit.samples import Sample
from locret_kit.training import module
from locret_kit.training.data import Share
from locret_kit.training.strategy import finish_gradients, make_strategy

SETTINGS = ["data.max_tokens=512", "trainer.save_every=2", "optim.steps=6"]


def test_a_run_goes_on_with_another_strategy_and_number_of_processes(backbone, alone, tmp_path):
    """Steps 1 and 2 on one process, 3 and 4 sharded over two, 5 and 6 replicated: one state file, one order of samples."""
    out = tmp_path / "run"
    train_to(SETTINGS, backbone, out, (2, 1, "auto"), (4, 2, "fsdp"))
    train(SETTINGS, backbone, out, 2, "trainer.strategy=ddp", "resume=auto")
    same(alone, out)
    assert {path.name for path in (out / "best").iterdir()} == {path.name for path in (alone / "best").iterdir()}


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


def test_a_process_whose_samples_taught_nothing_waits_for_the_others(tmp_path):
    """The mean counts its zeros; a weight that nobody has a gradient of gets none."""

    def work() -> int:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        some, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        some.grad = torch.tensor([1.0, -4.0]) if rank else None
        finish_gradients(make_strategy("ddp", 2, 1), [some, other], 1.0)
        return int(other.grad is not None or some.grad.tolist() != [0.5, -1.0])

    log = tmp_path / "log"
    assert ranks(work, 2, log) == [0, 0], log.read_text()


def test_several_devices_need_a_strategy():
    with pytest.raises(ValueError, match=r"trainer\.strategy=auto runs one process, not trainer\.devices=2"):
        make_strategy("auto", 2, 1)


def test_heads_are_gathered_by_all_processes_whatever_they_measured(tmp_path, monkeypatch):
    """A process that measures another recall would leave the others waiting."""
    first, gathered = "recall=0.5000-step=2", []
    strategy = SimpleNamespace(broadcast=lambda mine: first if isinstance(mine, str) else [first])
    trainer = SimpleNamespace(global_step=2, is_global_zero=False, strategy=strategy)
    monkeypatch.setattr(module, "gather", gathered.append)
    own = SimpleNamespace(validated={"val/recall": 0.4999})
    module.KeepBest(tmp_path, 1, torch.float32).on_validation_end(trainer, own)
    assert gathered == [trainer]


def test_heads_that_were_half_written_keep_no_others_out(tmp_path, monkeypatch):
    (tmp_path / "recall=0.9000-step=1").mkdir()
    gathered, strategy = [], SimpleNamespace(broadcast=lambda mine: mine)
    trainer = SimpleNamespace(global_step=2, is_global_zero=True, strategy=strategy)
    monkeypatch.setattr(module, "gather", gathered.append)
    own = SimpleNamespace(validated={"val/recall": 0.5})
    module.KeepBest(tmp_path, 1, torch.float32).on_validation_end(trainer, own)
    assert gathered == [trainer]
