"""Training runs that run out of memory."""

import torch
from equal_runs import refused

from locret_kit.cli import train
from locret_kit.training.module import HeadTraining

SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.56 GiB of which 1.25 GiB is free. "
    "Including non-PyTorch memory, this process has 22.31 GiB memory in use. Of the allocated memory {held} is "
    "allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated.\nMore lines."
)


def test_out_of_memory_in_a_run_is_one_line(backbone, tmp_path, monkeypatch, capsys):
    def full(*args, **more):
        raise torch.OutOfMemoryError(SAID.format(held="1.00 GiB"))

    monkeypatch.setattr(HeadTraining, "observe", full)
    settings = ["recipe=tiny", f"backbone.model={backbone}", "trainer.accelerator=cpu", f"out={tmp_path / 'run'}"]
    assert refused(capsys, *settings).startswith("locret-train: CUDA out of memory. Tried")


def test_a_cpu_without_memory_is_one_line(monkeypatch, capsys):
    def fit(*args):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr("locret_kit.training.fit.fit", fit)
    assert train.main(["recipe=tiny", "backbone.model=x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("locret-train: out of memory") and "memory: 9 bytes" in err and err.count("\n") == 1
