"""The proof for each family: with a budget as long as the prompt, chunked equals ``model.generate``."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from locret_kit import BoundedCache, attach

NEW = 6


def reference(model, ids):
    out = model.generate(
        ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize(("length", "chunk", "piece"), [(40, 7, 16), (150, 64, 150), (150, 33, 50), (90, 1000, 90)])
def test_equals_generate(family, positions, length, chunk, piece):
    model = tiny_model(family)
    ids = torch.randint(2, 97, (1, length), generator=torch.Generator().manual_seed(length))
    tokens, logits = reference(model, ids)
    cache = BoundedCache(length + NEW, "streaming", chunk=chunk, prompt_length=length, positions=positions, local_len=5)
    with attach(model):
        got = model.generate(
            ids, past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, prefill_chunk_size=piece,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    assert torch.equal(got.sequences[:, length:], tokens)
    assert (torch.stack(got.logits) - logits).abs().max() < 1e-4
    assert cache.get_seq_length() == length + NEW - 1
    assert cache.counters.evictions == 0
