"""CUDA devices as far as a CPU can play them: tensors that say they are on one and compute here, and a mode that knows what
the device would have made the host wait for.

No kernel runs: a launch is checked, and what it should have written stays as it was, so values mean nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from interpreted import common
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from locret_kit.backbones import products, weights
from locret_kit.cache import attend
from locret_kit.runtime.drivers.graph import host_waits

CUDA, SECOND, HOST = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
PROJECT = Path(__file__).resolve().parents[2]


class OnCard(Tensor):
    """A tensor of the CPU that says it is on a card."""

    inner: Tensor
    place: torch.device
    """As ``device``, which modes of functions take time to hand on."""
    card: Card

    @staticmethod
    def __new__(cls, inner: Tensor, where: torch.device = CUDA) -> OnCard:
        given = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=where)
        made = Tensor._make_wrapper_subclass(cls, inner.size(), **given)
        made.inner, made.place = inner, where
        return made

    def tolist(self) -> Any:
        self.card.note("tolist")
        return self.inner.tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} of a tensor on the card, outside of the mode")


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Arguments or results with each leaf changed; PyTorch's own function for it takes most of a test's time."""
    if isinstance(tree, tuple | list):
        return type(tree)([mapped(change, x) for x in tree])
    return {name: mapped(change, x) for name, x in tree.items()} if isinstance(tree, dict) else change(tree)


def leaves_of(tree: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, tree)
    return found


def on_card(tree: Any, where: torch.device = CUDA) -> Any:
    with torch.inference_mode(False):  # a view of what was made outside of inference mode is no tensor of that mode
        return mapped(lambda x: OnCard(x, where) if isinstance(x, Tensor) and not isinstance(x, OnCard) else x, tree)


def here(tree: Any) -> Any:
    return mapped(lambda x: x.inner if isinstance(x, OnCard) else HOST if isinstance(x, torch.device) else x, tree)


def places(leaves: Iterable[Any]) -> set[torch.device]:
    return {x.place if isinstance(x, OnCard) else x.device for x in leaves if isinstance(x, Tensor)}


GUARDED = (Tensor.__getitem__, Tensor.__setitem__, Tensor.__invert__, Tensor.contiguous, Tensor.copy_)


class Indexing(TorchFunctionMode):
    """What Python's operators do at once asks PyTorch for the device's own code, which one built for CPUs has not."""

    def __init__(self, card: Card) -> None:
        super().__init__()
        self.card = card

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in GUARDED or not isinstance(args[0], OnCard):
            return func(*args, **(kwargs or {}))
        at = leaves_of(args[1:2])
        if func is Tensor.copy_:
            if not isinstance(args[1], OnCard) and args[1].dim():
                self.card.note("a copy between host and device")
        elif any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in at):
            self.card.note("index by booleans")
        if any(isinstance(x, Tensor) for x in at) and len(args) == 3 and not isinstance(args[2], OnCard):
            self.card.note("a number of the host written at an index of the device")
        cards = {x.place for x in (args[0], *at) if isinstance(x, OnCard)}
        if len(cards) > 1 and func is not Tensor.copy_:
            raise RuntimeError(f"{func.__name__} mixes devices: {cards}")
        with torch.utils._python_dispatch._disable_current_modes():
            out = func(*here(args))
        return None if out is None else on_card(out, args[0].place)


class Card(TorchDispatchMode):
    """Notes where the host would wait for the device or copy to it; raises where devices are mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def note(self, what: str) -> None:
        calls = (f for f in reversed(traceback.extract_stack()) if PROJECT / "tests" not in Path(f.filename).parents)
        at = next((f for f in calls if PROJECT in Path(f.filename).parents and "site-packages" not in f.filename), None)
        self.waits.append(f"{what} in {at.name}" if at else what)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        leaves = leaves_of((args, kwargs))
        given = places(leaves)
        cards = {place for place in given if place.type == "cuda"}
        goes = next((x for x in leaves if isinstance(x, torch.device)), None)
        if not cards and goes is None:
            return func(*args, **kwargs)
        if goes is not None and goes.type == "cuda":
            goes = torch.device("cuda", goes.index or 0)
        if name == "_scaled_dot_product_flash_attention":  # the card's alone
            q = here(args[0])
            out = torch.zeros_like(q), torch.zeros(q.shape[:3])
        else:
            out = func(*here(args), **here(kwargs))
        if not cards and (goes is None or goes.type != "cuda"):
            return out
        copies = name in ("_to_copy", "to", "copy_")
        if cards and host_waits(func, args, kwargs):
            self.note(name)
        types = {place.type for place in given | ({goes} - {None})}
        if copies and len(types) > 1 and not _is_number(args):
            self.note("a copy between host and device")
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        arrays = places(x for x in tensors if isinstance(x, OnCard) or x.dim())
        if not copies and len(arrays | cards) > 1:
            raise RuntimeError(f"{name} mixes devices: {given}")
        if goes == HOST:
            return out
        where = goes or (places(args[:1]).pop() if name == "copy_" else next(iter(cards)))
        known = {id(x.inner): x for x in tensors if isinstance(x, OnCard) and x.place == where}
        return mapped(lambda x: known[id(x)] if id(x) in known else on_card(x, where), out)


def _is_number(args: Any) -> bool:
    """Whether what is copied is one number of the host, which is then an argument of a kernel."""
    return isinstance(args[0], OnCard) and len(args) > 1 and isinstance(args[1], Tensor) and not args[1].dim()


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
    assert all(0 < n < 2**31 for n in grid) and all(n < 2**16 for n in grid[1:]), f"{kernel.__name__}: grid {grid}"
    for x in args:
        assert isinstance(x, (OnCard, int, float)), f"{kernel.__name__} is given {type(x)}"
        assert not isinstance(x, int) or abs(x) < 2**31, f"{kernel.__name__}: {x} is no int32"
    if kernel.__name__ == "_enter_rows":  # positions are indices of tables
        args[kernel.arg_names.index("positions")].inner.zero_()
    assert len(places(args)) <= 1, f"{kernel.__name__} is given tensors of {places(args)}"
    marks = kernel.__name__ == "_select_rows" and not constants["INDEX"]
    if marks:  # the newest, as many as are wanted: heads are laid out by their number
        most_BH, stay_BHS = (x.inner for x in args[2:4])
        stay_BHS.copy_(torch.arange(stay_BHS.shape[-1]) >= stay_BHS.shape[-1] - most_BH[..., None])


@contextmanager
def card() -> Iterator[Card]:
    """The device, inside the block."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(common, "launch", _launch))
        nothing, capability = lambda device=None: None, lambda device=None: (8, 0)
        changed = dict(_lazy_init=nothing, synchronize=nothing, get_device_capability=capability)
        stack.enter_context(mock.patch.multiple(torch.cuda, **changed))
        stack.enter_context(mock.patch.object(attend, "causal_lower_right", _mask))
        for module in (products, weights):
            stack.enter_context(mock.patch.object(module, "PLAIN", (*module.PLAIN, OnCard)))
        # What this card has, another has not.
        probes = attend._running, attend.chunk_attention, attend.steady_attention, attend.varlen_operator
        for probe in (*probes, attend.lower_right):
            probe.cache_clear()
            stack.callback(probe.cache_clear)
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor then makes a tensor of the host and copies it
        stack.callback(torch._C._set_only_lift_cpu_tensors, before)
        mode = OnCard.card = stack.enter_context(Card())
        stack.enter_context(Indexing(mode))
        yield mode


def _mask(T: int, S: int) -> Tensor:
    return torch.ones(T, S, dtype=torch.bool, device=CUDA)


def moved(module: nn.Module, where: torch.device = CUDA) -> nn.Module:
    """Put a module on a card, in place."""
    for part in module.modules():
        for name, x in part._parameters.items():
            part._parameters[name] = x if x is None else nn.Parameter(OnCard(x.detach(), where), requires_grad=False)
        part._buffers.update({name: on_card(x, where) for name, x in part._buffers.items()})
        for name, x in vars(part).items():
            if isinstance(x, Tensor):
                setattr(part, name, on_card(x, where))
    return module
