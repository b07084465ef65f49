"""Runs of a merging policy, replayed token by token from what entered and what each eviction chose."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from attention_oracle import turned
from policy_runs import recorded

Slot = tuple[np.ndarray, np.ndarray, float]
"""Key, value, and the weight that it has taken over."""


def replayed(
    policy: str, ids: list[int], positions: str, fold: Callable[..., dict[int, Slot]], close: float
) -> Iterator[tuple[torch.Tensor | None, dict[int, Slot]]]:
    """Check positions, keys and values of every head after a run; yields the weights that its rows have taken over, and slots.

    Args:
        fold: ``fold(layer, slots, scores, protected, stays)`` gives the slots that an eviction changes, by place.
        close: largest difference.
    """
    cache, texts, evictions = recorded(policy, ids, positions=positions)
    for layer, (keys, values) in texts.items():
        for h in range(keys.shape[0]):
            slots = {t: (keys[h, t], values[h, t], 0.0) for t in range(keys.shape[1])}
            for at, scores, protected, places, valid, stay in evictions:
                if at == layer:
                    there = np.flatnonzero(valid[0, h])
                    token, *rest = (x[0, h, there].tolist() for x in (places, scores, protected, stay))
                    new = fold(layer, [slots[t] for t in token], *rest)
                    slots |= {token[i]: slot for i, slot in new.items()}
                    slots = {t: slot for t, slot in slots.items() if t not in token or rest[-1][token.index(t)]}
            rows, slots = cache.bounded[layer], dict(sorted(slots.items()))
            assert rows.head("positions", h).tolist() == list(slots)
            want = torch.from_numpy(np.array([key for key, _, _ in slots.values()]))
            if positions == "original":
                want = turned(want, torch.tensor(list(slots)).double()[:, None] * cache.context.ropes[layer].inv_freq)
            np.testing.assert_allclose(rows.head("keys", h), want, rtol=close, atol=close)
            held = [v for _, v, _ in slots.values()]
            np.testing.assert_allclose(rows.head("values", h), held, rtol=close, atol=close)
            yield rows.head("absorbed", h) if rows.merges else None, slots
