"""Pieces that several tests of reading share."""

import torch

from locret_kit.cache.bounded import BoundedCache

IDS = torch.randint(3, 60, (1, 67), generator=torch.Generator().manual_seed(0))


def bounded(policy: str, budget: int = 24, **settings) -> BoundedCache:
    given = {"chunk": 8, "stabilizers": 6, "local_len": 5, "prompt_length": IDS.shape[1], **settings}
    return BoundedCache(budget, policy, **given)


def mask_by_definition(tokens: int, body: int, chunk: int, budget: int, kept_sinks: int, newest: int, sinks: int):
    """Boolean ``[tokens, tokens]``: what each token sees, with streaming's choice of slots (the first and the newest)."""
    sees = torch.zeros(tokens, tokens, dtype=torch.bool)
    kept, evicted, start = [], False, 0
    while start < tokens:
        end = min(start + chunk, body) if start < body else tokens
        older = kept if not evicted or start >= body else sorted({*kept[:sinks], *kept[len(kept) - newest :]})
        for t in range(start, end):
            sees[t, older] = True
            sees[t, start : t + 1] = True
        kept = kept + list(range(start, end))
        room = budget - (tokens - body) if end == body else budget
        if end <= body and len(kept) > room:
            kept, evicted = kept[:kept_sinks] + kept[len(kept) - (room - kept_sinks) :], True
        start = end
    return sees
