"""Frequencies that follow the length of a text (LongRoPE, dynamic NTK): over the border an answer is that of a fresh run."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit import BoundedCache, attach
from locret_kit.documents.conversation import Chat
from locret_kit.runtime.session import prefill
from locret_kit.settings import RunSettings

BORDER = 64
"""Trained length of the tiny Phi-3, from which on its long factors hold."""


def ids_of(length):
    return torch.randint(2, 97, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("positions", ["original", "compact"])
def test_a_length_that_is_not_known_is_refused_where_it_decides(positions):
    model = tiny_model("phi3-longrope")
    with attach(model):
        cache = BoundedCache(BORDER, "streaming", chunk=16, positions=positions)
        with pytest.raises(ValueError, match="prompt_length is missing: this backbone's frequencies follow the length"):
            prefill(model, ids_of(20), cache)
        prefill(
            model, ids_of(20), BoundedCache(40, "streaming", chunk=16, positions="compact")
        )  # short, whatever comes


@pytest.mark.parametrize("length", [48, 64, 65, 120])
@pytest.mark.parametrize("positions", ["original", "compact"])
def test_either_side_of_the_border_equals_the_model(length, positions):
    model, ids = tiny_model("phi3-longrope"), ids_of(length)
    want = model(input_ids=torch.tensor([ids])).logits[0, -1]
    cache = BoundedCache(length + 8, "streaming", chunk=16, prompt_length=length, positions=positions)
    with attach(model):
        got = prefill(model, ids, cache)
    assert (got - want).abs().max() < 1e-4
    assert cache.context.outgrown(BORDER + 1) == (length <= BORDER)
    assert cache.context.outgrown(BORDER) == (length > BORDER)


def test_a_conversation_over_the_border_is_read_anew():
    tokenizer = tiny_tokenizer()
    model = tiny_model("phi3-longrope", vocab_size=len(tokenizer))
    settings = RunSettings(budget=400, chunk=16, local_len=4, stabilizers=0, positions="original")
    said = []
    with attach(model):
        chat = Chat(model, tokenizer, settings=settings, policy="streaming", max_new_tokens=4)
        for question in ("a b c", "d e f g h " * 12, "i j"):
            "".join(chat.say(question))
            said.append((list(chat.ids), chat.cache.context.ropes[0].inv_freq.clone()))
        for ids, frequencies in said:
            asked = ids[: len(ids) - 4]
            fresh = BoundedCache(settings, "streaming", prompt_length=len(asked))
            logits = prefill(model, asked, fresh)
            assert torch.equal(fresh.context.ropes[0].inv_freq, frequencies)
            assert int(logits.argmax()) == ids[len(asked)]
    assert len(said[0][0]) <= BORDER < len(said[1][0]) and not torch.equal(said[0][1], said[1][1])
