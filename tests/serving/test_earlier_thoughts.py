"""Earlier answers' thoughts in the caches of a server's conversations: evicted like all else, dropped, or pinned."""

from contextlib import contextmanager

import httpx
import pytest
import torch
from families import TOOL
from http_bodies import until
from read_texts import kept, text_of
from real_templates import real_tokenizer
from served import LIMITS, dictate, serving, stopped
from thinking_model import OPENED, QUESTIONS, parts

from locret_kit import BoundedCache, Document
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime.engine import Engine
from locret_kit.runtime.sampling import Sampling, stop_ids
from locret_kit.runtime.sequence import Request
from locret_kit.runtime.session import prefill
from locret_kit.runtime.thoughts import Thought
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.store import Store
from locret_kit.settings import RunSettings

MARKED = OPENED + "{# tools #}"
RUN = RunSettings(budget=64, chunk=16, stabilizers=4, local_len=5)
BUDGET, ANSWER = 7, 20
KIND = "Be kind, and say what the boats of the harbour are about when they come in. "
SYSTEM = [{"role": "system", "content": KIND * 2}]


@pytest.fixture(autouse=True)
def opened(monkeypatch):
    monkeypatch.setattr(real_tokenizer("qwen3"), "chat_template", MARKED)


def heads_of(policy: str):
    return parts()[2] if parse_policy(policy).needs_heads else None


@contextmanager
def server(thoughts: str, policy: str = "h2o", run: RunSettings = RUN, store: Store | None = None, **sizes):
    model, tokenizer, _ = parts()
    salt = {} if store is None else {"salt": store.salt}
    made = EngineThread(
        model, tokenizer, run, parse_policy(policy), heads_of(policy), thoughts=thoughts, store=store, **sizes
    )
    with stopped(made) as engine, serving(engine, LIMITS, keys=(), **salt) as url:
        yield engine, httpx.Client(base_url=f"{url}/v1", timeout=900)


def logprobs_of(answer: dict) -> list[float]:
    """Log-probabilities of the tokens of an answer."""
    return [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]]


def say(client: httpx.Client, messages: list[dict], **more) -> dict:
    """The answer to a conversation, which goes on with it as clients do: with or without the thought."""
    asked = {
        "messages": messages, "max_tokens": ANSWER, "temperature": 0, "logprobs": True, "top_logprobs": 2,
        "thinking": {"type": "enabled", "budget_tokens": BUDGET}, **more,
    }  # fmt: skip
    answer = client.post("/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning_content"]
    messages.append({"role": "assistant", **{name: message[name] for name in ("content", "reasoning_content")}})
    return answer.json()


def template_ids(messages: list[dict], tools=None) -> list[int]:
    """What transformers makes of a conversation."""
    text = parts()[1].apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return parts()[1](text, add_special_tokens=False).input_ids


def fresh(ids: list[int], cache: BoundedCache) -> tuple[list[float], BoundedCache]:
    """Log-probabilities of the tokens of a run of its own to a whole prompt, and its cache."""
    model, tokenizer, _ = parts()
    thought = Thought.after(tokenizer, ids, max_tokens=BUDGET)
    thought.apart = False  # the answer's own bound counts its thought
    engine = Engine(model, stop_ids(model, tokenizer), alone=True)
    alone = engine.add(Request(ids, ANSWER, Sampling(), thought=thought, top_logprobs=0), lambda: cache)
    while engine.running:
        engine.step()
    return [row[-1][1] for row in alone.logprobs], cache


@pytest.mark.parametrize(("policy", "system"), [("locret", SYSTEM), ("h2o", [])], ids=str)
def test_dropped_turns_are_fresh_runs_of_the_templates_prompt(policy, system, tmp_path):
    """Bit for bit: log-probabilities of all tokens, and the rows of the cache that waits for the next turn."""
    messages, cached = list(system), []
    for again in range(2):  # the second server goes on from files
        store = Store(tmp_path / "sessions", 1 << 30)
        with server("dropped", policy, store=store, shared_prefixes=0) as (engine, client):
            for question in QUESTIONS[2 * again : 2 * again + 2]:
                messages.append({"role": "user", "content": question})
                ids = template_ids(messages)
                said = say(client, messages)
                usage = said["usage"]
                assert usage["prompt_tokens"] == len(ids)
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
                cache = BoundedCache(RUN, policy, heads_of(policy), prompt_length=len(ids))
                logprobs, alone = fresh(ids, cache)
                assert logprobs_of(said) == logprobs, "the same bits"
                assert usage["locret"]["evictions"] == alone.counters.evictions
                (parked,) = list(engine._parked.parked.values())[-1:]
                seen = parked.cache.get_seq_length()
                assert seen == parked.keys[0].tokens < len(ids) and not parked.keys[0].skipped
                shorter = BoundedCache(RUN, policy, heads_of(policy), prompt_length=len(ids))
                shorter.bind(parts()[0])
                prefill(parts()[0], ids[:seen], shorter)
                assert kept(shorter) == kept(parked.cache)
                for mine, theirs in zip(shorter.bounded, parked.cache.bounded, strict=True):
                    assert all(torch.equal(mine.slots(name), theirs.slots(name)) for name in ("keys", "values"))
            # A conversation waits in one cache.
            assert engine.figures["sessions_in_use"] == engine.figures["sessions_idle"] == 1
    assert all(cached[1:]) and cached == sorted(cached), "what turns share is read once, from a file too"


THOUGHTS = ("The boats are asked for.", "Nobody spoke, it seems.\n\nOr did one?", "A short one.", "Why?")
ANSWERS = ("It is the nets.", "Nobody was there when\nthe boats came in.", "At night", "Since ropes are so.")


@contextmanager
def dictated(monkeypatch, number: int):
    """The answer of one turn is written, so that its text has no other tokens."""
    with monkeypatch.context() as patch:
        text = f"{THOUGHTS[number % 4]}\n</think>\n\n{ANSWERS[number % 4]}<|im_end|>"
        yield dictate(patch, parts()[1], text)


@pytest.mark.parametrize(("thoughts", "sent_back"), [("evicted", False), ("pinned", True)])
def test_thoughts_that_stay_are_read_once(thoughts, sent_back, tmp_path, monkeypatch):
    """A prompt without earlier thoughts goes on from the cache that has read them. The oracle is the model itself, which reads
    all of it and evicts nothing; so does a cache with room for all."""
    messages, read = [], []
    for again in range(2):  # the second server goes on from files
        store = Store(tmp_path / "sessions", 1 << 30)
        with server(thoughts, run=RunSettings(budget=2000, chunk=16, local_len=5), store=store) as (engine, client):
            for number in (2 * again, 2 * again + 1):
                messages.append({"role": "user", "content": QUESTIONS[number]})
                ids = template_ids(messages)
                with dictated(monkeypatch, number) as answer:
                    said = say(client, messages, max_tokens=60, thinking=None)
                if not sent_back:
                    messages[-1].pop("reasoning_content", None)
                usage, tokens = said["usage"], said["choices"][0]["logprobs"]["content"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert usage["prompt_tokens"] == len(ids) and bool(cached) == bool(number)
                read += [*ids[cached:], *answer[:-1]]
                (parked,) = engine._parked.parked.values()
                assert parked.cache.get_seq_length() == len(read)
                with torch.no_grad():
                    logprobs = parts()[0](torch.tensor([read])).logits[0].log_softmax(-1)
                start = len(read) - len(answer) + 1
                for at, (one, token) in enumerate(zip(tokens, answer, strict=False), start - 1):
                    assert one["logprob"] == pytest.approx(float(logprobs[at, token]), abs=1e-5)
                if thoughts == "pinned":
                    end = start + answer.index(parts()[1].convert_tokens_to_ids("</think>")) + 1
                    assert (start, end) in parked.cache.pins
    assert len(read) > len(ids) + 40, "four thoughts"


def test_pinned_thoughts_are_let_go_where_there_is_no_room(monkeypatch):
    with server("pinned", run=RunSettings(budget=80, chunk=16, stabilizers=4, local_len=5)) as (engine, client):
        messages = []
        for number in range(7):
            messages.append({"role": "user", "content": f"And what of boat number {number}?"})
            with dictated(monkeypatch, number):
                say(client, messages, max_tokens=60, thinking=None)
            (parked,) = engine._parked.parked.values()
            pins = [pin for pin in parked.cache.pins if pin[0]]
            for layer in kept(parked.cache):
                assert all({at for pin in pins for at in range(*pin)} <= set(head) for head in layer)
        assert 1 < len(pins) < 7 and parked.cache.get_seq_length() - pins[-1][0] < 60
        assert parked.cache.counters.evictions > 5
    with server("pinned", run=RunSettings(budget=12, chunk=16, stabilizers=2, local_len=5)) as (engine, client):
        say(client, [{"role": "user", "content": "What is it?"}])  # no room at all, and an answer


@pytest.mark.parametrize("thoughts", ["dropped", "pinned"])
def test_conversations_about_a_document(thoughts, monkeypatch):
    model, tokenizer, _ = parts()
    with server(thoughts, "locret", RunSettings(budget=96, chunk=16, stabilizers=4, local_len=5)) as (_, client):
        upload = client.post("/documents", files={"file": ("boats.txt", text_of(150))}).json()
        until(lambda: client.get(f"/documents/{upload['id']}").json()["status"] == "ready")
        document = Document.read(
            model, tokenizer, text_of(150), 96, "locret", parts()[2], chunk=16, stabilizers=4, local_len=5
        )
        messages, cached = [], []
        for number, question in enumerate(QUESTIONS):
            messages.append({"role": "user", "content": question + " Say it in many words, as is done here."})
            if thoughts == "dropped":
                said = say(client, messages, document_id=upload["id"])
            else:
                with dictated(monkeypatch, number):
                    said = say(client, messages, document_id=upload["id"], max_tokens=60, thinking=None)
            usage = said["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            if thoughts == "dropped":
                ids = document.conversation(messages[:-1])
                assert usage["prompt_tokens"] == len(ids)
                logprobs, _ = fresh(ids, document.fork_for(len(ids)))
                assert logprobs_of(said) == logprobs
        assert cached == sorted(cached) and cached[-1] > cached[0], cached


@pytest.mark.parametrize("thoughts", ["dropped", "pinned"])
def test_a_tool_loop_and_a_branch(thoughts):
    """Whatever a client sends back, the template's prompt is read; a branch takes nothing of the other's answer."""
    with server(thoughts) as (_, client):
        messages = [{"role": "user", "content": "How deep is it, and why?"}]
        first = say(client, messages, tools=[TOOL])
        call = {"id": "c1", "type": "function", "function": {"name": "depth", "arguments": {"place": "north"}}}
        messages[-1] = messages[-1] | {"tool_calls": [call]}
        messages.append({"role": "tool", "tool_call_id": "c1", "content": "7 m"})
        for more in ({"role": "user", "content": "Go on."}, {"role": "user", "content": "And now?"}):
            ids = template_ids(messages, [TOOL])
            assert say(client, messages, tools=[TOOL])["usage"]["prompt_tokens"] == len(ids)
            messages.append(more)
        branch = [messages[0], {"role": "assistant", "content": "Another answer."}, {"role": "user", "content": "Why?"}]
        ids = template_ids(branch)
        said = say(client, branch)
        if thoughts == "dropped":
            logprobs, _ = fresh(ids, BoundedCache(RUN, "h2o", prompt_length=len(ids)))
            assert logprobs_of(said) == logprobs
            begun = [*branch[:3], {"role": "assistant", "content": "Since"}]  # an answer that is gone on with
            text = parts()[1].apply_chat_template(begun, tokenize=False, continue_final_message=True)
            ids = parts()[1](text, add_special_tokens=False).input_ids
            body = {"messages": begun, "max_tokens": 6, "temperature": 0, "logprobs": True}
            usage = client.post("/chat/completions", json=body).json()["usage"]
            assert usage["prompt_tokens"] == len(ids) > usage["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_answer_that_fails_ends_alone(monkeypatch):
    """Its prompt, as far as it was read, waits for the next turn."""

    def failing(*given: object) -> None:
        raise RuntimeError("a fault of ours")

    with server("dropped", shared_prefixes=0) as (engine, client):
        messages = [*SYSTEM, {"role": "user", "content": QUESTIONS[0]}]
        with monkeypatch.context() as patch:
            patch.setattr(Thought, "take", failing)
            body = {"messages": messages, "thinking": {"type": "enabled", "budget_tokens": BUDGET}}
            assert client.post("/chat/completions", json=body).status_code == 500
        assert say(client, messages)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 and not engine.failed
