"""Conversations in a cache of fixed size."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from read_texts import SETTINGS, kept, parts, read, text_of

from locret_kit import Chat, attach
from locret_kit.runtime.session import Sampling
from locret_kit.settings import RunSettings
from locret_kit.text.template import render_turn


def replayed(chat: Chat) -> torch.Tensor:
    """Logits after the conversation of a cache that evicts nothing: the model's own, over all its tokens."""
    model, _, _ = parts()
    return model(input_ids=torch.tensor([list(chat.ids)])).logits[0, -1]


@torch.no_grad()
def test_a_conversation_in_a_large_cache_is_the_models_own():
    model, tokenizer, _ = parts()
    chat = Chat(model, tokenizer, settings=4096, policy="h2o", max_new_tokens=5)
    said = [("What is it?", "".join(chat.say("What is it?"))), ("Who came in?", "".join(chat.say("Who came in?")))]
    messages = [
        {"role": role, "content": words}
        for turn in said
        for role, words in zip(("user", "assistant"), turn, strict=True)
    ]
    text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.ids[: chat.turns[1].end]).startswith(text[:40])
    # every answer is greedy under the model itself, over the conversation so far
    for turn in chat.turns:
        answer = tokenizer(turn.answer, add_special_tokens=False).input_ids or []
        assert turn.end - turn.start > len(answer)
    ids = list(chat.ids)
    for at in range(chat.turns[0].end - 4, chat.turns[0].end):
        assert int(model(input_ids=torch.tensor([ids[:at]])).logits[0, -1].argmax()) == ids[at]
    for at in range(len(ids) - 4, len(ids)):
        assert int(model(input_ids=torch.tensor([ids[:at]])).logits[0, -1].argmax()) == ids[at]


@pytest.mark.parametrize("policy", ["locret", "ada-locret", "h2o", "sirllm"])
def test_turns_have_room_of_their_own(policy):
    document = read("llama", policy, text_of(260), **SETTINGS)
    before = kept(document.cache)
    chat = document.chat(history=100, max_new_tokens=4)
    first = "".join(chat.say("What is it?"))
    assert first == str(document.ask("What is it?", max_new_tokens=4))
    held = [set(head) for layer in kept(chat.cache) for head in [layer] for head in head]
    sizes = []
    for number in range(9):
        list(chat.say(f"And what about boat number {number}, which came in when the harbour was quiet?"))
        sizes.append(chat.cache.nbytes)
        assert max(rows for rows in chat.cache.kept_rows) <= 48 + 100 + 64
    assert len(set(sizes)) == 1 and chat.cache.counters.evictions > document.cache.counters.evictions
    now = [set(head) for layer in kept(chat.cache) for head in [layer] for head in head]
    text = range(document.tokens)
    assert all({at for at in a if at in text} <= b for a, b in zip(held, now, strict=True))
    assert kept(document.cache) == before


@pytest.mark.parametrize("policy", ["locret", "ada-locret", "h2o"])
def test_turns_have_room_beside_a_document_whose_stabilizers_are_more_than_the_turns_slots(policy):
    """As Locret's published ones are: 2500 of 6000, and 1024 slots for the turns."""
    document = read("llama", policy, text_of(260), **{**SETTINGS, "stabilizers": 40})
    chat = document.chat(history=30, max_new_tokens=4)
    first = "".join(chat.say("What is it?"))
    assert first == str(document.ask("What is it?", max_new_tokens=4))
    held = [set(head) for layer in kept(chat.cache) for head in layer]
    for number in range(12):
        list(chat.say(f"And what about boat number {number}, which came in?"))
    assert len(chat.turns) == 13 and chat.cache.counters.evictions > document.cache.counters.evictions
    text = range(document.tokens)
    now = [set(head) for layer in kept(chat.cache) for head in layer]
    assert all({at for at in a if at in text} <= b for a, b in zip(held, now, strict=True))


def test_layers_of_different_budgets_have_room_for_turns():
    """The layer with the largest budget holds most of the document, the one with the smallest decides about nothing of it."""
    document = read("llama", "pyramidkv(6,3)", text_of(260), **SETTINGS)
    assert len(set(document.cache.context.budgets)) > 1
    chat = document.chat(history=100, max_new_tokens=4)
    for number in range(12):
        list(chat.say(f"And what about boat number {number}, which came in?"))
    assert len(chat.turns) == 12 and chat.cache.counters.evictions > document.cache.counters.evictions


def test_undo_and_retry():
    document = read("llama", "locret", text_of(260), **SETTINGS)
    chat = document.chat(max_new_tokens=4)
    list(chat.say("What is it?"))
    ids, positions = list(chat.ids), kept(chat.cache)
    answer = "".join(chat.say("Who came in?"))
    assert chat.undo().question == "Who came in?"
    assert list(chat.ids) == ids and kept(chat.cache) == positions
    with pytest.raises(ValueError, match="only the last turn can be undone"):
        chat.undo()
    assert "".join(chat.say("Who came in?")) == answer == "".join(chat.retry())
    assert [turn.question for turn in chat.turns] == ["What is it?", "Who came in?"]


def test_an_answer_that_is_left_stays_as_far_as_it_was_written():
    model, tokenizer, _ = parts()
    chat = Chat(model, tokenizer, settings=200, policy="h2o", max_new_tokens=50)
    pieces = chat.say("What is it?")
    written = next(pieces)
    pieces.close()
    assert [turn.answer for turn in chat.turns] == [written]
    assert model.config._attn_implementation != "locret"  # nobody writes any more
    seen = chat.cache.get_seq_length()
    assert str(chat.answer) == written and chat.cache.get_seq_length() == seen  # what is left is not written on
    with pytest.raises(RuntimeError, match="this answer was left before its end"):
        _ = chat.answer.report
    list(chat.say("And who came in?"))
    assert len(chat.turns) == 2


def interrupt(monkeypatch, pieces: Iterator[str]) -> None:
    """Begin an answer and press Ctrl-C before its first token."""

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("locret_kit.cache.step.read_block", broken)
        with pytest.raises(KeyboardInterrupt):
            list(pieces)


def test_a_turn_that_fails_leaves_nothing_behind(monkeypatch):
    document = read("llama", "locret", text_of(260), **SETTINGS)
    chat = document.chat(max_new_tokens=4)
    list(chat.say("What is it?"))
    ids, positions = list(chat.ids), kept(chat.cache)
    interrupt(monkeypatch, chat.say("Who came in?"))
    assert list(chat.ids) == ids and kept(chat.cache) == positions and not chat.cache.unfinished
    assert "".join(chat.say("Who came in?")) == "".join(chat.retry())


def test_a_retry_that_fails_leaves_the_old_answer(monkeypatch):
    document = read("llama", "locret", text_of(260), **SETTINGS)
    chat = document.chat(max_new_tokens=4)
    list(chat.say("What is it?"))
    before = list(chat.ids), kept(chat.cache)
    answer = "".join(chat.say("Who came in?"))
    ids, positions = list(chat.ids), kept(chat.cache)
    interrupt(monkeypatch, chat.retry())
    assert list(chat.ids) == ids and kept(chat.cache) == positions and chat.turns[-1].answer == answer
    chat.retry().close()  # nobody asked for a word of it
    assert list(chat.ids) == ids and "".join(chat.retry()) == answer
    chat.undo()
    assert (list(chat.ids), kept(chat.cache)) == before
    with pytest.raises(ValueError, match="only the last turn can be undone"):
        chat.retry()


def test_a_pinned_question_is_never_evicted():
    model, tokenizer, heads = parts()
    chat = Chat(model, tokenizer, settings=150, policy="locret", heads=heads, max_new_tokens=4)
    list(chat.say("Remember that the harbour opens at 12345."))
    start, end = chat.pin("opens at 12345")
    assert "opens at 12345" in tokenizer.decode(chat.ids[start:end]) and end - start < 20
    for number in range(12):
        list(chat.say(f"And what about boat number {number}, which came in when the harbour was quiet?"))
    for layer in kept(chat.cache):
        assert all(set(range(start, end)) <= set(head) for head in layer)
    with pytest.raises(ValueError, match="'never said' does not occur in the conversation"):
        chat.pin("never said")


def test_the_last_question_is_pinned_whole_whatever_its_answer_decodes_to():
    """Half characters, which a tokenizer would write in other tokens."""
    model, tokenizer, _ = parts()
    chat = Chat(model, tokenizer, settings=400, policy="h2o", max_new_tokens=30, sampling=Sampling(5.0))
    for question in ("What is it?", "Who came in?"):
        list(chat.say(question))
    turn = chat.turns[1]
    assert len(tokenizer(turn.answer, add_special_tokens=False).input_ids) != turn.end - turn.answered
    asked = tokenizer(render_turn(tokenizer, "Who came in?"), add_special_tokens=False).input_ids
    assert chat.pin() == (turn.start, turn.start + len(asked)) and list(chat.ids[slice(*chat.pin())]) == asked


def test_text_of_an_earlier_turn_stays_pinned_when_the_last_one_is_forgotten():
    model, tokenizer, heads = parts()
    chat = Chat(model, tokenizer, settings=150, policy="locret", heads=heads, max_new_tokens=4)
    list(chat.say("Remember that the harbour opens at 12345."))
    list(chat.say("Who came in?"))
    start, end = chat.pin("opens at 12345")
    chat.undo()
    list(chat.say("And when did they come?"))
    assert (start, end) in chat.cache.pins
    list(chat.retry())
    assert (start, end) in chat.cache.pins


ALL = "first+system+markers"


def inside(pieces: list[str], start: int, end: int) -> set[int]:
    """Places of the tokens that lie within these characters."""
    ends = list(accumulate(map(len, pieces)))
    return {i for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if start <= a < b <= end}


def heads_of(chat: Chat) -> list[set[int]]:
    """Positions that every head of every layer holds."""
    return [set(head) for layer in kept(chat.cache) for head in layer]


@pytest.mark.parametrize(
    ("policy", "bits"), [("locret", None), ("ada-locret", None), ("h2o", 4), ("score=recency", None)]
)
def test_protected_text_of_a_conversation(policy, bits):
    """The system prompt and the opening stay for good, the markers around a message until the next; by what the text says."""
    model, tokenizer, heads = parts()
    asked = RunSettings(budget=110, chunk=32, stabilizers=8, local_len=8, protect=ALL, kv_bits=bits)
    needed = heads if "locret" in policy else None
    chat = Chat(model, tokenizer, settings=asked, policy=policy, heads=needed, system="Be kind.", max_new_tokens=4)
    opening, before, after = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    markers: list[set[int]] = []
    for number in range(6):
        question = f"What of boat number {number}, which came in with nets when the harbour was quiet?"
        list(chat.say(question))
        pieces = [tokenizer.decode([i]) for i in chat.ids]
        text = "".join(pieces)
        at = text.rindex(question)
        end = at + len(question)
        assert text.startswith(opening) and text[:at].endswith(before) and text[end:].startswith(after)
        around = (at - len(before), at) if number else (0, at)
        markers.append(inside(pieces, *around) | inside(pieces, end, end + len(after)))
        wanted = {0, 1, 2, 3} | inside(pieces, 0, len(opening)) | markers[-1]
        assert len(wanted) > 25 and all(wanted <= head for head in heads_of(chat))
    assert chat.cache.counters.evictions > 5
    last = heads_of(chat)
    assert not all(markers[1] <= head for head in last), "older markers are the policy's to evict"
    ids, pins = list(chat.ids), chat.cache.pins
    chat.pin(f"boat number {number}")
    list(chat.say("And then?"))
    chat.undo()
    assert list(chat.ids) == ids and set(inside(pieces, text.rindex("boat"), end)) and chat.cache.pins != pins


def test_protected_text_without_room_leaves_the_conversation_as_it_was():
    model, tokenizer, _ = parts()
    chat = Chat(model, tokenizer, settings=RunSettings(budget=40, protect=ALL), policy="h2o", max_new_tokens=4)
    list(chat.say("What is it?"))
    chat.pin()
    ids, positions, pins = list(chat.ids), kept(chat.cache), chat.cache.pins
    with pytest.raises(ValueError, match=r"pins=\d+ tokens must be at most \d+: layer 0 has a budget of 40 slots"):
        for _ in range(9):
            chat.pin(chat.turns[-1].question)
            ids, positions, pins = list(chat.ids), kept(chat.cache), chat.cache.pins
            list(chat.say("Who came in, and when did the boats come?"))
    assert list(chat.ids) == ids and kept(chat.cache) == positions and chat.cache.pins == pins


@pytest.mark.parametrize("protect", [ALL, "markers"])
def test_a_documents_first_turn_protects_what_a_question_does(protect):
    document = read("llama", "locret", text_of(260), **SETTINGS, protect=protect)
    chat, answer = document.chat(max_new_tokens=4), document.ask("What is it?", max_new_tokens=4)
    assert "".join(chat.say("What is it?")) == str(answer)
    assert set(answer.cache.pins) - {(0, document.tokens)} and chat.cache.pins[-1] == answer.cache.pins[-1]


def test_the_turn_of_a_template():
    _, tokenizer, _ = parts()
    assert render_turn(tokenizer, "Who?") == "<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    with attach(parts()[0]):
        pass  # nobody has left the model attached
