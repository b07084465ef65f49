"""Conversations in a cache of fixed size."""

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from read_texts import SETTINGS, kept, parts, read, text_of
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows
from tiny_decoders.shrink import tiny_decoder

from locret_kit import BoundedCache, Chat, Document
from locret_kit.backbones.libraries import ASKED_FOR_STATES
from locret_kit.runtime.session import Answer, Sampling
from locret_kit.settings import RunSettings
from locret_kit.text.template import render_turn


@torch.no_grad()
def test_a_conversation_in_a_large_cache_is_the_models_own():
    model, tokenizer, _ = parts()
    chat = Chat(model, tokenizer, settings=4096, policy="h2o", max_new_tokens=5)
    said = []
    for question in ("What is it?", "Who came in?"):
        said += [{"role": "user", "content": question}, {"role": "assistant", "content": "".join(chat.say(question))}]
    text = tokenizer.apply_chat_template(said[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.ids[: chat.turns[1].end]).startswith(text[:40])
    # every answer is greedy under the model itself, over the conversation so far
    for turn in chat.turns:
        answer = tokenizer(turn.answer, add_special_tokens=False).input_ids or []
        assert turn.end - turn.start > len(answer)
    ids, ends = list(chat.ids), [turn.end for turn in chat.turns]
    for at in (at for end in ends for at in range(end - 4, end)):
        assert int(model(input_ids=torch.tensor([ids[:at]])).logits[0, -1].argmax()) == ids[at]


@pytest.mark.skipif(not ASKED_FOR_STATES, reason="layers with a state are not supported")
def test_layers_that_lose_their_state_read_each_turn_again():
    """As Bamba's do between pieces of a text; about a document too, which is not pinned then."""
    sizes, tokenizer = Sizes(vocab=400), parts()[1]
    model = tiny_decoder(*rows(sizes)["bamba"], sizes, 0).double()
    run = RunSettings(budget=96, chunk=32)
    chat = Chat(model, tokenizer, settings=run, policy="streaming", max_new_tokens=4)
    for question in ("Who?", "When?"):
        list(chat.say(question))
    ids = chat.answer.ids
    cache = BoundedCache(run, "streaming", prompt_length=len(ids))
    str(fresh := Answer(model, tokenizer, ids, cache, max_new_tokens=4))
    assert chat.answer.tokens == fresh.tokens
    chat = Document.read(model, tokenizer, text_of(200), run, "streaming").chat(64, max_new_tokens=4)
    for question in ("Who?", "When?"):
        list(chat.say(question))
    assert [turn.start > 200 for turn in chat.turns] == [True, True] and max(chat.cache.kept_rows) <= 96 + 64 + 32


@pytest.mark.parametrize(
    ("policy", "stabilizers", "history"),
    [
        *((policy, 4, 60) for policy in ("ada-locret", "h2o", "pyramidkv(6,3)")),
        *((policy, 40, 30) for policy in ("locret", "ada-locret")),
    ],
)
def test_turns_have_room_of_their_own(policy, stabilizers, history):
    """Also beside a document whose stabilizers are more than the turns' slots, as Locret's published ones are (2500 of 6000, and
    1024 slots for the turns), and in layers of different budgets, of which the smallest decides about nothing of the document."""
    document = read("llama", policy, text_of(260), **{**SETTINGS, "stabilizers": stabilizers})
    before = kept(document.cache)
    chat = document.chat(history, max_new_tokens=4)
    first = "".join(chat.say("What is it?"))
    layered = "pyramid" in policy
    assert layered or first == str(document.ask("What is it?", max_new_tokens=4))
    held, sizes = heads_of(chat), []
    for number in range(6):
        list(chat.say(f"And what about boat number {number}, which came in?"))
        sizes.append(chat.cache.nbytes)
        assert layered or max(chat.cache.kept_rows) <= 48 + history + 64
    assert len(set(sizes)) == 1 and chat.cache.counters.evictions > document.cache.counters.evictions
    text = range(document.tokens)
    assert layered or all({at for at in a if at in text} <= b for a, b in zip(held, heads_of(chat), strict=True))
    assert kept(document.cache) == before


@pytest.mark.parametrize("policy", ["h2o", "ada-locret"])
def test_no_turn_reads_passages_again(policy):
    """A second reading for the first question would leave later ones nothing else of the text."""
    again, once = (read("llama", f"{policy}{more}", text_of(260)) for more in (" reread=passages(9,4,3)", ""))
    turns = [[list(chat.say(question)) for question in ("What is it?", "Who came in?", "Why?")] for chat in (
        document.chat(60, max_new_tokens=4) for document in (again, once)
    )]  # fmt: skip
    assert turns[0] == turns[1] and not again.cache.reread_positions
    assert again.ask("What is it?", max_new_tokens=4).cache.policy.reread is not None


def test_no_turn_of_a_conversation_without_a_document_reads_passages_again():
    model, tokenizer, _ = parts()
    chats = [
        Chat(model, tokenizer, settings=RunSettings(budget=60, chunk=16), policy=f"h2o{more}", max_new_tokens=4)
        for more in (" reread=passages(9,4,3)", "")
    ]
    turns = [[list(chat.say(question)) for question in (text_of(260), "Who came in?")] for chat in chats]
    assert turns[0] == turns[1] and kept(chats[0].cache) == kept(chats[1].cache)


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


def test_a_turn_or_a_retry_that_fails_leaves_nothing_behind(monkeypatch):
    document = read("llama", "locret", text_of(260), **SETTINGS)
    chat = document.chat(max_new_tokens=4)
    list(chat.say("What is it?"))
    before = list(chat.ids), kept(chat.cache)
    interrupt(monkeypatch, chat.say("Who came in?"))
    assert (list(chat.ids), kept(chat.cache)) == before and not chat.cache.state.unfinished
    answer = "".join(chat.say("Who came in?"))
    after = list(chat.ids), kept(chat.cache)
    interrupt(monkeypatch, chat.retry())
    assert (list(chat.ids), kept(chat.cache)) == after and chat.turns[-1].answer == answer
    chat.retry().close()  # nobody asked for a word of it
    assert list(chat.ids) == after[0] and "".join(chat.retry()) == answer
    chat.undo()
    assert (list(chat.ids), kept(chat.cache)) == before
    with pytest.raises(ValueError, match="only the last turn can be undone"):
        next(chat.retry())


def test_a_pinned_question_is_never_evicted():
    model, tokenizer, heads = parts()
    settings = RunSettings(budget=100, chunk=16, stabilizers=4, local_len=5)
    chat = Chat(model, tokenizer, settings=settings, policy="locret", heads=heads, max_new_tokens=4)
    list(chat.say("Remember that the harbour opens at 12345."))
    start, end = chat.pin()
    assert "opens at 12345" in tokenizer.decode(chat.ids[start:end]) and end - start < 40
    for number in range(8):
        list(chat.say(f"And what about boat number {number}, which came in when the harbour was quiet?"))
    assert chat.cache.counters.evictions
    for layer in kept(chat.cache):
        assert all(set(range(start, end)) <= set(head) for head in layer)


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
    start, end = chat.pin()
    list(chat.say("Who came in?"))
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
    opening = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n"
    before, after = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
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
    chat.pin()
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
            chat.pin()
            ids, positions, pins = list(chat.ids), kept(chat.cache), chat.cache.pins
            list(chat.say("Who came in, and when did the boats come?"))
    assert list(chat.ids) == ids and kept(chat.cache) == positions and chat.cache.pins == pins


@pytest.mark.parametrize("protect", [ALL, "markers"])
def test_a_documents_first_turn_protects_what_a_question_does(protect):
    document = read("llama", "locret", text_of(260), **SETTINGS, protect=protect)
    chat, answer = document.chat(max_new_tokens=4), document.ask("What is it?", max_new_tokens=4)
    assert "".join(chat.say("What is it?")) == str(answer)
    assert set(answer.cache.pins) - {(0, document.tokens)} and chat.cache.pins[-1] == answer.cache.pins[-1]
