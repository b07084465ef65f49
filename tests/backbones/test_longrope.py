"""Frequencies that follow the length of a text (LongRoPE, dynamic NTK): over the border an answer is that of a fresh run."""

from array import array

import pytest
import torch
from policy_runs import tokens
from read_texts import text_of
from served import ask_together
from tiny_heads import tiny_heads
from tiny_models import LONGROPE, tiny_model
from tiny_tokenizer import tiny_tokenizer

from locret_kit import BoundedCache, Document, attach
from locret_kit.documents.conversation import Chat
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import Answer, prefill
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.settings import RunSettings

BORDER = 64
"""Trained length of the tiny Phi-3, from which on its long factors hold."""


@pytest.mark.parametrize("positions", ["original", "compact"])
def test_a_length_that_is_not_known_is_refused_where_it_decides(positions):
    model = tiny_model("phi3-longrope")
    with attach(model):
        cache = BoundedCache(BORDER, "streaming", chunk=16, positions=positions)
        with pytest.raises(ValueError, match="prompt_length is missing: this backbone's frequencies follow the length"):
            prefill(model, tokens(20), cache)
        short = BoundedCache(40, "streaming", chunk=16, positions="compact")  # whatever comes
        prefill(model, tokens(20), short)


@pytest.mark.parametrize("length", [48, 64, 65, 120])
@pytest.mark.parametrize("positions", ["original", "compact"])
def test_either_side_of_the_border_equals_the_model(length, positions):
    model, ids = tiny_model("phi3-longrope"), tokens(length)
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


def test_a_budget_of_which_places_cross_the_border_is_refused():
    model = tiny_model("phi3-longrope")
    with attach(model):
        cache = BoundedCache(BORDER - 24, "streaming", chunk=16, prompt_length=120, positions="compact")
        prefill(model, tokens(120), cache)
    assert cache.with_budget(BORDER - 16).kept_rows == cache.kept_rows
    with pytest.raises(ValueError, match=f"budget={BORDER}: so many slots .* than the {BORDER - 24} with which"):
        cache.with_budget(BORDER)


LATE = 256
"""Trained length of a Phi-3 that reads documents: of a short text nothing is read before a question."""


@pytest.mark.parametrize(
    ("policy", "positions"), [("full", "original"), ("locret", "original"), ("ada-snapkv(6,3)", "compact")]
)
def test_sessions_and_questions_over_the_border_equal_fresh_runs(policy, positions):
    """Two conversations, then two questions about a document, each pair in one batch of a server, and one of each crosses the
    border; then the conversation about the document crosses it too."""
    rope = LONGROPE["rope_parameters"] | {"original_max_position_embeddings": LATE}
    model = tiny_model("phi3-longrope", vocab_size=400, rope_parameters=rope, original_max_position_embeddings=LATE)
    model, tokenizer, heads = model.double(), tiny_tokenizer(), tiny_heads(model, 32)
    needed = heads if parse_policy(policy).needs_heads else None
    # A conversation evicts nothing before the border: a later turn would not be a fresh run. Compact positions reach the border
    # with that many slots.
    own, documents = (
        RunSettings(budget=budget, positions=positions, chunk=32, local_len=5, stabilizers=2)
        for budget in (250, 96 if positions == "original" else 250)
    )
    document = Document.read(model, tokenizer, text_of(60), documents, policy, needed)
    engine = EngineThread(model, tokenizer, own, parse_policy(policy), heads, sessions=8, queue=6, piece=64)

    def fresh(ids, settings):
        cache = BoundedCache(settings, policy, needed, prompt_length=len(ids))
        answer = Answer(model, tokenizer, ids, cache, max_new_tokens=4)
        str(answer)
        return answer.tokens

    def answered(prompts, settings=own, **given):
        requests = ask_together(engine, *prompts, **given)
        for one in requests:
            assert one.sequence.tokens == fresh(one.prompt.ids, settings)
        return requests

    def continued(request, length):
        return request.prompt.ids + array("i", request.sequence.tokens + tokens(length))

    try:
        said = answered([array("i", tokens(length)) for length in (200, 230)])
        turns = answered([continued(one, more) for one, more in zip(said, (20, 40), strict=True)])
        about = {"document": document, "document_id": "d"}
        questions = answered([document.prompt(words) for words in ("a", "b " * 90)], documents, **about)
        [later] = answered([continued(questions[0], 90)], documents, **about)
    finally:
        engine.stop()
    read = [(len(one.prompt.ids) > LATE, one.cached_tokens > 0) for one in (*turns, *questions, later)]
    assert read == [(False, True), (True, False)] * 2 + [(True, False)]
