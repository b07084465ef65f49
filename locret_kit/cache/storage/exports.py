"""Rows of a layer as tensors in logical order: taken out, for a file or a copy, and put back into a layer of the same kind."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .layouts import Shapes
from .rows import BoundedLayer

STATE = "state."
"""Prefix of the names under which a score's state is exported."""


def export_rows(rows: BoundedLayer) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Everything that a layer needs to continue: counts, and tensors in logical order, wherever the rows
    lie. Their shape is ``[H, S, ...]``, or ``[N, ...]`` where heads differ.

    Nothing of the free room is among them. Tensors may share memory with the buffers. Before the first token there are
    none.
    """
    counts = rows.counts()
    if not rows.seen:
        return counts, {}
    # Every tensor of the score's state and every buffer, or the layer would go on otherwise.
    every = rows.layout.every()
    tensors = {name: getattr(rows.holder(name), name)[every] for name in rows.columns()}
    if rows.statistics:
        tensors["stats"] = torch.stack([stat[every] for stat in rows.stats])
    if hasattr(rows, "queries"):
        tensors["queries"] = rows.queries
    tensors |= {STATE + name: value for name, value in rows.state.items()}
    return counts, tensors | rows.layout.export() | rows.codec.export(tensors)


def exported_shapes(rows: BoundedLayer, query_heads: int) -> Shapes:
    """Dtype and shape of all that ``export_rows`` gives of a layer that has seen a token, but for the score's state. Needs its
    counts and ``measure``."""
    shape = rows.layout.shape(rows.rows)
    shapes = {name: (dtype, (*shape, *row)) for name, (dtype, row) in rows.columns().items()}
    if rows.statistics:
        shapes["stats"] = torch.float32, (rows.statistics, *shape)
    if rows.recent:
        shapes["queries"] = rows.dtype, (query_heads, rows.recent, rows.codec.key_size)
    return shapes | rows.layout.exported() | rows.codec.exported()


def set_counts(rows: BoundedLayer, counts: Mapping[str, float]) -> None:
    """Give a layer the counts that ``export_rows`` took out of one of the same kind."""
    for name, value in counts.items():
        setattr(rows.codec if name in rows.codec.COUNTS else rows, name, value)


def restore_rows(
    rows: BoundedLayer, counts: Mapping[str, float], tensors: Mapping[str, Tensor], k_1H0D: Tensor, v_1H0D: Tensor
) -> None:
    """Make a layer equal to an exported one of the same kind, with tensors of their exported shape. Nothing is
    shared. The room may differ.

    Args:
        k_1H0D: empty keys, and so are the values: they tell heads, channels, dtype and device.
    """
    # Counts first: by them the layout and the tail of the codec are laid out.
    set_counts(rows, counts)
    if not tensors:
        return
    # Under full attention a text may be longer than the room that was planned, and a table of key groups larger.
    rows.measure(k_1H0D, v_1H0D)
    rows.layout.capacity = max(rows.capacity, rows.rows, rows.codec.room(tensors))
    rows.lazy_initialization(k_1H0D, v_1H0D)
    rows.layout.fill(tensors)
    every = rows.layout.every()
    for name in rows.columns():
        getattr(rows.holder(name), name)[every] = tensors[name].to(rows.device)
    for number in range(rows.statistics):
        rows.stats[number][every] = tensors["stats"][number].to(rows.device)
    # Copies of its own, good outside of inference mode too: a score changes its state in place.
    with torch.inference_mode(False):
        own = {name.removeprefix(STATE): x for name, x in tensors.items() if name.startswith(STATE)}
        rows.state = {name: x.to(rows.device, copy=True) for name, x in own.items()}
        if "queries" in tensors and rows.page is None:
            rows.queries = tensors["queries"].to(rows.device, copy=True)
    if "queries" in tensors and rows.page is not None:  # they stay in the page
        rows.queries.copy_(tensors["queries"])
    rows.codec.fill(tensors)


def copy_rows(rows: BoundedLayer, other: BoundedLayer, share: tuple[int, int] = (0, 1)) -> None:
    """Make a layer a copy of another one of the same kind, or of a share of its heads (the first of two is ``(0, 2)``); nothing
    that one of both writes is shared. The room may be another one."""
    if not other.seen:
        return
    counts, tensors = export_rows(other)
    if added := rows.statistics - other.statistics:  # one more of each group of heads, the last, and nothing in it yet
        old = tensors.get("stats", other.stats[:0, ...])
        old = old.reshape(added, other.statistics // added, *tensors["positions"].shape)
        tensors["stats"] = torch.cat([old, old.new_zeros(added, 1, *old.shape[2:])], dim=1).flatten(0, 1)
    (number, shares), H = share, other.layout.H // share[1]
    if shares > 1:
        own = slice(number * H, (number + 1) * H)
        tensors = {name: _of_heads(name, x, own, other.layout.H) for name, x in tensors.items()}
    empty = torch.empty(1, H, 0, dtype=other.dtype, device=rows.device if rows.is_initialized else other.device)
    k_1H0D, v_1H0D = (empty.new_empty(*empty.shape, size) for size in (other.codec.key_size, other.codec.value_size))
    restore_rows(rows, counts, tensors, k_1H0D, v_1H0D)
    if rows.store is not None and other.store is not None:
        rows.store.restore(other.store.export(), k_1H0D, v_1H0D)


def _of_heads(name: str, x: Tensor, heads: slice, H: int) -> Tensor:
    """Some of the key/value heads in an exported tensor ``[H, ...]``, or ``[N, H, ...]`` for statistics and states."""
    if name == "stats" or name.startswith(STATE):
        return x[:, heads]
    return x.unflatten(0, (H, -1))[heads].flatten(0, 1) if name == "queries" else x[heads]
