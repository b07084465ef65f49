"""A CUDA graph as far as a CPU can play one: operators are recorded, then run again on the very same tensors.

Numbers of the host are what they were at the recording, sizes and addresses too; only what is in tensors moves on.
"""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from locret_kit.cache import context
from locret_kit.cache.backend import BACKENDS
from locret_kit.runtime.drivers.graph import GraphDriver, TextsDriver


@pytest.fixture
def on_the_reference(monkeypatch):
    """A tape sees PyTorch's operators alone, as a graph sees kernels: a compiled call on a CPU is neither."""
    monkeypatch.setattr(context, "backend_for", lambda *args: BACKENDS["reference"])


class Tape(TorchDispatchMode):
    """Records inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            several = isinstance(out, tuple | list)
            for old, new in zip(out, again, strict=True) if several else [(out, again)]:
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


def recorded(
    state: list[torch.Tensor], step: Callable[[], torch.Tensor], kind: type[Tape] = Tape
) -> tuple[Tape, torch.Tensor]:
    """A tape of a step and its logits. A recording runs, which a capture does not: what it wrote is put back."""
    kept, tape = [x.clone() for x in state], kind()
    with tape:
        logits = step()
    for x, old in zip(state, kept, strict=True):
        x.copy_(old)
    logits.fill_(float("nan"))
    return tape, logits


class Taped:
    """Captures tapes on a CPU."""

    def __init__(self, model, cache, *tokens) -> None:
        super().__init__(model, cache, *tokens)
        self.captures, self.replays = True, 0
        own = [holder for rows in cache.bounded for holder in (rows, rows.codec)]
        self.holders = [self, *own] if isinstance(self, GraphDriver) else [rows.page.pool for rows in cache.bounded]

    def _captured(self, step):
        return recorded([x for one in self.holders for x in vars(one).values() if isinstance(x, torch.Tensor)], step)

    def _run(self, form, *rest):
        logits = super()._run(form, *rest)
        self.replays += form in self.graphs
        return logits


class TapedTexts(Taped, TextsDriver):
    """A token of several texts."""


class TapedDecoder(Taped, GraphDriver):
    """A token or a chunk of one text."""
