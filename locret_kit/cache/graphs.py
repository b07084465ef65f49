"""CUDA graphs: all are captured on one stream of their device. A call is timed as it runs, by replays."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device: PyTorch's own is one for all devices, on that of the first capture. cuBLAS keeps a
    workspace for every stream, so there is one only."""
    return torch.cuda.Stream(device)


Captured = tuple[torch.cuda.CUDAGraph, Tensor]
"""A graph of a step, and where its logits will be."""


def capture(device: torch.device, others: Iterable[Captured], step: Callable[[], Tensor]) -> Captured:
    """A graph of a step, which does not run yet, and its logits ``[N, V]``. It shares its memory with the others; one
    graph runs at a time."""
    graph, pool = torch.cuda.CUDAGraph(), next((first.pool() for first, _ in others), None)
    side = capture_stream(device)
    capturing = partial(torch.cuda.graph, graph, pool=pool, stream=side, capture_error_mode="thread_local")
    # A capture that fails leaves PyTorch on its stream: the outer block brings back the one before.
    before_it = torch.cuda.stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), before_it, capturing():
        logits = step()
    return graph, logits


def quickest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call on a card, the best of some: all but the first are warm."""
    with torch.cuda.device(device):  # whose streams events are recorded in
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(7)]
        for end in ends:
            run()
            end.record()
        torch.cuda.synchronize(device)
    return min(a.elapsed_time(b) for a, b in pairwise(ends)) / 1e3
