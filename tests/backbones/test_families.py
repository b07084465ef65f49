"""The proof for each family: with a budget as long as the prompt, chunked equals ``model.generate``."""

from functools import cache

import pytest
import torch
from pairwise import pairs
from tiny_models import FAMILIES, tiny_model

from locret_kit import BoundedCache, attach
from locret_kit.backbones.libraries import CACHE

NEW = 6
GREEDY = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True)


@cache
def reference(family, length):
    """Ids of a prompt, and what the model's own ``generate`` makes of it: tokens and logits."""
    model = tiny_model(family)
    ids = torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(length))
    out = model.generate(ids, **GREEDY)
    return ids, out.sequences[:, length:], torch.stack(out.logits)


@pytest.mark.parametrize(
    ("length", "chunk", "piece", "family", "positions"),
    pairs([(40, 7, 16), (150, 64, 150), (150, 33, 50), (90, 1000, 90)], FAMILIES, ["compact", "original"]),
)
def test_equals_generate(family, positions, length, chunk, piece):
    model, (ids, tokens, logits) = tiny_model(family), reference(family, length)
    kept = BoundedCache(length + NEW, "streaming", chunk=chunk, prompt_length=length, positions=positions, local_len=5)
    with attach(model):
        got = model.generate(ids, **{CACHE: kept}, prefill_chunk_size=piece, **GREEDY)
    assert torch.equal(got.sequences[:, length:], tokens)
    assert (torch.stack(got.logits) - logits).abs().max() < 1e-4
    assert kept.get_seq_length() == length + NEW - 1
    assert kept.counters.evictions == 0
