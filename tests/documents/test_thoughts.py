"""Thoughts in conversations: evicted like all else, dropped at the end of a turn, or pinned; and their bound."""

import pytest
import torch
from read_texts import REREADING, SETTINGS, kept, text_of
from real_templates import real_tokenizer
from thinking_model import OPENED, QUESTIONS, parts

from locret_kit import BoundedCache, Chat, Document
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.session import Answer, ThoughtPiece
from locret_kit.runtime.thoughts import Thought
from locret_kit.settings import RunSettings

BOUND = 7


@pytest.fixture(autouse=True)
def opened(monkeypatch):
    monkeypatch.setattr(real_tokenizer("qwen3"), "chat_template", OPENED)


def talk(policy: str, document: Document | None = None, *, run: RunSettings | None = None, **changes) -> Chat:
    model, tokenizer, heads = parts()
    shared = dict(max_new_tokens=9, max_thought_tokens=BOUND, **changes)
    if document is not None:
        return document.chat(**shared)
    heads = heads if parse_policy(policy).needs_heads else None
    return Chat(model, tokenizer, settings=run or RunSettings(**SETTINGS), policy=policy, heads=heads, **shared)


def fresh(ids: list[int], cache: BoundedCache) -> Answer:
    """The answer of a run of its own to a whole prompt."""
    model, tokenizer, _ = parts()
    thought = Thought.after(tokenizer, ids, max_tokens=BOUND)
    return Answer(model, tokenizer, ids, cache, max_new_tokens=9, thought=thought)


def template_ids(chat: Chat, question: str, before: str = "") -> list[int]:
    """What transformers makes of the conversation so far and a question."""
    said = [{"role": "system", "content": chat.system}] if chat.system else []
    for turn in chat.turns:
        said += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    said += [{"role": "user", "content": question}]
    first = next(message for message in said if message["role"] == "user")
    first["content"] = before + first["content"]
    text = chat.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    return chat.tokenizer(text, add_special_tokens=False).input_ids


def rows(cache: BoundedCache) -> list[torch.Tensor]:
    """Keys and values that a cache holds."""
    return [layer.slots(name) for layer in cache.bounded for name in ("keys", "values")]


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        *((policy, {}) for policy in ("locret", "ada-locret", "h2o", "snapkv(6,3)", "streaming", "full", REREADING)),
        ("h2o", {"kv_bits": 4}), ("locret", {"protect": "first+system"}), ("h2o", {"budget": 0.4, "one_shot": True}),
    ],
)  # fmt: skip
def test_a_turn_after_dropped_thoughts_is_a_fresh_run_of_the_templates_prompt(policy, changes):
    run = RunSettings(**SETTINGS | {"chunk": 16} | changes)
    chat = talk(policy, run=run, thoughts="dropped", system="Be kind.")
    for question in QUESTIONS:
        ids = template_ids(chat, question)
        pieces = list(chat.say(question))
        assert list(chat.answer.ids) == ids and "</think>" not in chat.tokenizer.decode(ids[:-4])
        heads = parts()[2] if parse_policy(policy).needs_heads else None
        cache = BoundedCache(run, policy, heads, prompt_length=len(ids))
        cache.bind(parts()[0])
        cache.pin_all(chat._now.pinned)
        alone = fresh(ids, cache)
        assert str(alone) == str(chat.answer) == chat.turns[-1].answer and alone.tokens == chat.answer.tokens
        assert kept(alone.cache) == kept(chat.answer.cache)
        assert all(torch.equal(a, b) for a, b in zip(rows(alone.cache), rows(chat.answer.cache), strict=True))
        thought = "".join(piece for piece in pieces if isinstance(piece, ThoughtPiece))
        assert thought and thought == chat.turns[-1].thought and chat.answer.thought.cut
    assert len(ids) > 100 and (policy == "full" or chat.answer.cache.counters.evictions > 2 * (not run.one_shot))
    if policy in ("locret", "h2o", "streaming") and not run.one_shot:
        seen = chat.cache.get_seq_length()
        assert seen > 60 and len(chat.answer.ids) - seen < 60, "what turns share is read once"


@pytest.mark.parametrize("policy", ["locret", "h2o"])
def test_dropped_thoughts_about_a_document(policy):
    """Its first answer is a question's, and later ones go on from the document, which stays."""
    model, tokenizer, heads = parts()
    of = heads if "locret" in policy else None
    document = Document.read(model, tokenizer, text_of(260), None, policy, of, **SETTINGS)
    chat = talk(policy, document, thoughts="dropped", history=80)
    for question in QUESTIONS:
        ids = template_ids(chat, question, text_of(260) + "\n\n")
        list(chat.say(question))
        assert list(chat.answer.ids) == ids
        cache = document.fork_for(len(ids)) if len(chat.turns) == 1 else chat._rebuild(len(ids))
        alone = fresh(ids, cache)
        assert str(alone) == str(chat.answer) and alone.tokens == chat.answer.tokens
        assert kept(alone.cache) == kept(chat.answer.cache)
    last = chat.turns[-1].answer
    assert "".join(piece for piece in chat.retry() if not isinstance(piece, ThoughtPiece)) == last
    chat.undo()
    list(chat.say(QUESTIONS[-1]))
    assert chat.turns[-1].answer == last and len(chat.turns) == len(QUESTIONS)


def test_a_template_that_tells_the_date_goes_on_another_day(monkeypatch):
    """The text that was read keeps the date of its day."""
    model, tokenizer, _ = parts()
    monkeypatch.setattr(tokenizer, "chat_template", "Monday" + OPENED)
    document = Document.read(model, tokenizer, text_of(260), None, "h2o", **SETTINGS)
    monkeypatch.setattr(tokenizer, "chat_template", "Tuesday" + OPENED)
    chat = talk("h2o", document, thoughts="dropped")
    for question in QUESTIONS[:2]:
        list(chat.say(question))
        assert list(chat.answer.ids)[: document.tokens - 1] == list(document.ids)[:-1]
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | length }}" + OPENED)
    with pytest.raises(ValueError, match="before the document depends on the conversation"):
        list(chat.say("Why?"))


def test_pinned_thoughts_stay_and_the_oldest_go_when_there_is_no_room():
    chat = talk("h2o", run=RunSettings(budget=60, chunk=16, stabilizers=4, local_len=5), thoughts="pinned")
    for number in range(12):
        list(chat.say(f"And what of boat number {number}, which came in when the harbour was quiet?"))
        (start, end), turn = chat._now.thoughts[-1], chat.turns[-1]
        assert start == turn.answered and chat.answer.thought.tokens == end - start >= BOUND
        for layer in kept(chat.cache):
            assert all(set(range(start, end)) <= set(head) for head in layer)
    assert 1 < len(chat._now.thoughts) < 12 and chat.cache.counters.evictions > 5
    with pytest.raises(ValueError, match="pins=7 tokens must be at most"):
        list(talk("h2o", run=RunSettings(budget=9, chunk=16, local_len=5), thoughts="pinned").say("What is it?"))


def test_thoughts_have_a_bound_of_their_own_and_the_answer_another():
    chat = talk("h2o")
    list(chat.say("What is it?"))
    thought, tokens = chat.answer.thought, chat.answer.tokens
    end = chat.tokenizer.convert_tokens_to_ids("</think>")
    assert thought.cut and tokens[BOUND] == end and thought.spans == [(0, BOUND + 1)]
    assert len(tokens) == BOUND + 1 + 9 and chat.answer.finish_reason == "length"


def test_what_can_be_said_of_thoughts_is_checked(monkeypatch):
    with pytest.raises(ValueError, match="thoughts='kept' is unknown. Known: evicted, dropped, pinned"):
        talk("h2o", thoughts="kept")
    monkeypatch.setattr(real_tokenizer("qwen3"), "chat_template", None)
    with pytest.raises(ValueError, match="thoughts='dropped' needs a chat template"):
        talk("h2o", thoughts="dropped")
