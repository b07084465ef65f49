"""The same text by a decoder and by the plain forward: logits, tokens, rows and counts."""

import torch
from policy_runs import held

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE
from locret_kit.runtime.drivers import logits_after
from locret_kit.runtime.drivers.graph import GraphDriver
from locret_kit.runtime.session import prefill

STEPS = 30


def plain(model):
    """The plain forward, as a driver."""
    return lambda caches, tokens: logits_after(model, caches, torch.tensor([tokens]), [1] * len(caches)).float()


def decoded(model, cache: BoundedCache, ids: list[int], form=None, steps: int = STEPS):
    """Logits behind the prompt and behind each token, none of which is in the prompt; and the decoder that ``form`` makes of
    model and cache, or None."""
    out = [prefill(model, ids, cache)]
    step = None if form is None else form(model, cache)
    assert step is None or step.refusal(cache) is None
    new = [token for token in range(2, 97) if token not in ids]
    for n in range(steps):
        token = new[37 * n % len(new)]
        if step is not None:
            assert step.ready(cache) or isinstance(step, GraphDriver)  # which says why it captures no more
            out.append(step([cache], [token])[0])
        else:
            piece = torch.tensor([[token]])
            out.append(model(input_ids=piece, **{CACHE: cache}, logits_to_keep=1).logits[0, -1].float())
    return torch.stack(out), step


def alike(mine: BoundedCache, theirs: BoundedCache, tolerance: float) -> None:
    """Both hold what the next token would find."""
    assert held(mine) == held(theirs) and mine.get_seq_length() == theirs.get_seq_length()
    counted = [(cache.counters.evictions, cache.counters.evicted_rows) for cache in (mine, theirs)]
    assert counted[0] == counted[1]
    for a, b in zip(mine.bounded, theirs.bounded, strict=True):
        assert (a.rows, a.seen, a.since_eviction, a.evictions) == (b.rows, b.seen, b.since_eviction, b.evictions)
        for name in ("keys", "values", "positions", "scores", "stats")[: 5 if a.window is None else 3]:
            torch.testing.assert_close(a.slots(name), b.slots(name), rtol=tolerance, atol=tolerance)


def same(model, caches: list[BoundedCache], ids: list[int], form, tolerance: float = 3e-6, steps: int = STEPS):
    """The decoder, which decodes like the plain forward."""
    with attach(model), torch.inference_mode():
        mine, step = decoded(model, caches[0], ids, form, steps)
        theirs, _ = decoded(model, caches[1], ids, steps=steps)
    assert torch.equal(mine.argmax(-1), theirs.argmax(-1)) and len(set(mine.argmax(-1).tolist())) > 3
    torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)
    alike(*caches, tolerance)
    return step
