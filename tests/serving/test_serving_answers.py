"""What answers come with and what they share: stop texts, log-probabilities, equal beginnings, saved caches, bounds."""

import json
import socket
import threading
import time
from array import array
from contextlib import suppress
from dataclasses import replace

import httpx
import openai
import pytest
import torch
from http_bodies import alone, chat, deleted, expected, until, uploaded, user
from read_texts import parts, text_of
from real_templates import real_tokenizer
from served import (
    LIMITS,
    SETTINGS,
    ask,
    ask_together,
    new_engine,
    new_request,
    random_ids,
    running_engine,
    serving,
    stopped,
    with_template,
)
from tiny_decoders.needed import Sizes
from tiny_decoders.rows import rows
from tiny_decoders.shrink import tiny_decoder

from locret_kit import BoundedCache, Document
from locret_kit.backbones.intercept import Attachment
from locret_kit.backbones.libraries import ASKED_FOR_STATES
from locret_kit.backbones.spec import spec_of
from locret_kit.naming import show
from locret_kit.planning.inference_plan import Setting
from locret_kit.planning.server_caches import Caches
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime import engine as loop
from locret_kit.runtime.session import Answer, Sampling
from locret_kit.serving.answers import event
from locret_kit.serving.completions import logprobs_of
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.process import HeaderTimeout
from locret_kit.settings import RunSettings

# ---- stop texts --------------------------------------------------------------------------------------------------------


def test_a_stop_text_ends_an_answer_and_its_conversation_goes_on(engine):
    cancelled, ids = engine.counters.cancelled, random_ids(150, 1)
    request = ask(engine, "anna", ids, tokens=16, stop_at=lambda tokens: 2 if len(tokens) == 5 else None)
    assert (request.sequence.finish_reason, len(request.sequence.tokens)) == ("stop", 5)  # nothing was written after it
    longer = ids + array("i", request.sequence.tokens[:2]) + random_ids(20, 2)  # the last three are the stop text
    again = ask(engine, "anna", longer)
    assert again.cached_tokens == len(ids) + 2 and engine.counters.cancelled == cancelled
    # An answer that had ended by itself after the same two tokens goes on alike.
    shorter = ask(engine, "bert", ids, tokens=3)
    assert shorter.sequence.tokens == request.sequence.tokens[:3]
    assert ask(engine, "bert", longer).sequence.tokens == again.sequence.tokens


@pytest.mark.parametrize("written", [0, 3])
def test_a_cancelled_answer_goes_on_from_what_was_read_and_written(engine, written):
    """A shorter prompt than one that was read in part, whose tail begins earlier, is read by itself."""
    ids, owner, ended = random_ids(300, 3), f"anna{written}", threading.Event()
    request = new_request(ids, 60, owner=owner)

    def change() -> None:
        if request.sequence.finish_reason is not None:
            ended.set()
        elif len(request.sequence.written) == written and request.cache.get_seq_length() >= 128:
            engine.cancel(request)

    request.on_change = change
    engine.submit(request)
    assert ended.wait(300) and request.sequence.finish_reason == "cancelled"
    if written:
        again = ask(engine, owner, ids + array("i", request.sequence.written) + random_ids(20, 2))
        assert again.cached_tokens == 302
    else:
        assert ask(engine, owner, ids[:200]).cached_tokens == 0
        again, other = (ask(engine, name, ids) for name in (owner, "bert"))
        assert again.cached_tokens == 128 and again.sequence.written == other.sequence.written


def test_evictions_are_counted_once():
    """A conversation's cache counts all its turns, and a copy what its document was read with."""
    model, tokenizer, heads = parts("llama")
    document = Document.read(model, tokenizer, text_of(200), SETTINGS, "locret", heads)
    with running_engine() as engine:
        ids = random_ids(300, 1)
        first = ask(engine, "anna", ids)
        again = ask(engine, "anna", ids + array("i", first.sequence.tokens) + random_ids(200, 2))
        assert again.cached_tokens > 300 and 0 < first.evictions < again.evictions == engine.counters.evictions
        prompts = map(document.prompt, ("Who?", "When?"))
        more = [ask(engine, "bert", prompt, document=document).evictions for prompt in prompts]
        before = document.cache.counters.evictions
        assert before > 0 and engine.counters.evictions == again.evictions + sum(more) - 2 * before


def test_a_token_of_a_long_answer_costs_what_one_of_a_short_answer_does(engine, monkeypatch):
    given, decode = [], engine.tokenizer.decode
    monkeypatch.setattr(engine.tokenizer, "decode", lambda ids, **more: given.append(len(ids)) or decode(ids, **more))
    asked = {"max_tokens": 110, "temperature": 1.5, "seed": 3}
    plain = "ab" * 80
    with serving(engine, replace(LIMITS, answer_tokens=110)) as address:
        for more in ({}, {"stop": [plain]}, {"stream": True, "logprobs": True, "stop": [plain]}):
            biased = {**asked, **more, "logit_bias": {str(engine.tokenizer.eos_token_id): -100}}
            assert chat(address, user("A story."), **biased).status_code == 200
    cache = BoundedCache(SETTINGS, parse_policy("streaming"), prompt_length=4)
    assert str(Answer(engine.model, engine.tokenizer, [5, 6, 7, 8], cache, max_new_tokens=110, sampling=Sampling(1.5)))
    assert len(given) > 400 and max(given) <= 80


# ---- log-probabilities -------------------------------------------------------------------------------------------------


def truth(ids: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities ``[tokens, V]`` by the model alone, in one forward; nothing is evicted of so short a text."""
    model = parts("llama")[0]
    with torch.no_grad():
        logits_TV = model(torch.tensor([ids + tokens])).logits[0]
    return logits_TV[len(ids) - 1 : -1].float().log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_logprobs_are_those_of_the_model(engine, temperature):
    ids = random_ids(40, 5)
    spec = {"top_logprobs": 4, "sampling": Sampling(temperature)}
    request = ask(engine, "anna", ids, tokens=8, spec=spec)
    said = request.sequence
    logprobs_TV = truth(list(ids), said.tokens)
    assert len(said.logprobs) == len(said.tokens) == 8
    for row, token, row_V in zip(said.logprobs, said.tokens, logprobs_TV, strict=True):
        assert row.pop() == (token, pytest.approx(float(row_V[token]), abs=1e-5))
        best = row_V.topk(4)
        assert [value for _, value in row] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert [token for token, _ in row] == best.indices.tolist()


def test_logprobs_of_chat_completions(client):
    asked = dict(model="tiny", messages=user("Who came in?"), max_tokens=8, temperature=0, logprobs=True)
    asked["top_logprobs"] = 3
    whole = client.chat.completions.create(**asked)
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens == 8
    for one in entries:  # greedy
        values = [top.logprob for top in one.top_logprobs]
        assert values == sorted(values, reverse=True) and len(values) == 3
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, values[0])
        assert bytes(one.bytes).decode(errors="replace") == one.token
    streamed = [event.choices[0] for event in client.chat.completions.create(**asked, stream=True)]
    assert [one for event in streamed if event.logprobs for one in event.logprobs.content] == entries
    assert client.chat.completions.create(model="tiny", messages=user("x"), max_tokens=2).choices[0].logprobs is None
    for body in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.chat.completions.create(model="tiny", messages=user("x"), extra_body=body)


def test_a_token_that_cannot_be_has_a_number_that_json_has(url, engine, monkeypatch):
    forward = loop.logits_after

    def seven_tokens_alone(*given):
        logits = forward(*given)
        return logits.masked_fill(torch.arange(logits.shape[-1]) > 6, float("-inf"))

    monkeypatch.setattr(loop, "logits_after", seven_tokens_alone)
    whole = chat(url, user("x"), max_tokens=1, logprobs=True, top_logprobs=20).json()
    values = [top["logprob"] for top in whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    assert len(values) == 20 and values[7:] == [-9999.0] * 13 and values[6] > -100


def test_the_bytes_of_logprobs_make_the_text_also_of_parts_of_characters(url):
    answer = chat(url, user("Who came in?"), max_tokens=60, temperature=2, seed=1, logprobs=True).json()["choices"][0]
    found = [bytes(one["bytes"]) for one in answer["logprobs"]["content"]]
    assert b"".join(found).decode(errors="replace") == answer["message"]["content"]
    assert any(len(one) == 1 and one[0] >= 0x80 for one in found)  # half a character


def test_logprobs_of_completions_and_at_a_stop_text(client):
    asked = dict(model="tiny", prompt="The harbour was quiet", max_tokens=8, temperature=0)
    whole = client.completions.create(**asked, logprobs=2).choices[0]
    said = whole.logprobs
    assert len(said.tokens) == len(said.token_logprobs) == len(said.text_offset) == len(said.top_logprobs) == 8
    assert said.text_offset[0] == 0 and said.text_offset == sorted(said.text_offset)
    for token, value, top in zip(said.tokens, said.token_logprobs, said.top_logprobs, strict=True):
        assert top[token] == value == max(top.values())  # greedy
    stop = whole.text[len(whole.text) // 2 :][:2]
    cut = client.completions.create(**asked, logprobs=0, stop=stop).choices[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    kept = [at for at in said.text_offset if at < len(cut.text)]
    assert cut.logprobs.text_offset == kept and cut.logprobs.tokens == said.tokens[: len(kept)]


def test_words_that_differ_by_a_blank_have_a_number_each():
    """As lm-eval reads them: the likeliest is not the one that was chosen."""
    tokenizer = real_tokenizer("gemma")
    likeliest, chosen = tokenizer.convert_tokens_to_ids(["▁had", "had"])
    row = [(likeliest, -0.1), (chosen, -3.0), (chosen, -3.0)]
    said = logprobs_of(tokenizer, [(chosen, row, 0)], chat=False)
    assert said["tokens"] == ["had"] and said["top_logprobs"] == [{" had": -0.1, "had": -3.0}]


@pytest.mark.parametrize("sign", ["\x85", "\u2028", "\u2029"])
def test_an_event_is_one_line_for_every_client(sign):
    """Python's ``str.splitlines``, by which httpx and requests read lines, ends one at these signs too."""
    value = {"content": f"one{sign}two"}
    line, blank = event(value).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == value and not blank


# ---- equal beginnings --------------------------------------------------------------------------------------------------


def test_equal_beginnings_are_read_once(monkeypatch):
    engine, tokenizer = new_engine(sessions=2, shared_prefixes=1), parts("llama")[1]
    start, read = random_ids(200, 1), []
    forward = loop.logits_after
    prompts = [start + random_ids(length, length) for length in (3, 30, 150)]
    with monkeypatch.context() as patch:
        patch.setattr(loop, "logits_after", lambda *given: read.append(given[2].shape[1]) or forward(*given))
        requests = [ask(engine, "anna", ids, shared_tokens=200) for ids in prompts]
    said = [tokenizer.decode(request.sequence.tokens, skip_special_tokens=True) for request in requests]
    assert said == [alone(ids, max_new_tokens=4) for ids in prompts]
    tail = SETTINGS.local_len
    assert [request.cached_tokens for request in requests] == [0, 200 - tail, 200 - tail]
    decoded = sum(max(0, len(request.sequence.tokens) - 1) for request in requests)
    assert sum(read) - decoded <= 200 - tail + sum(len(ids) - 200 + tail for ids in prompts)
    other = ask(engine, "bert", prompts[1] + random_ids(9, 9), shared_tokens=200)
    assert other.cached_tokens == 0
    # Bert's is in the place of Anna's.
    assert engine.figures["beginnings"] == 1 and engine.figures["sessions_in_use"] <= 2
    engine.stop()


@pytest.mark.parametrize(("length", "evicts"), [(60, False), (300, True)])
def test_equal_prompts_are_read_once(length, evicts):
    """Also where they evict; an answer that evicts cannot be taken back. The first conversation goes on all the same."""
    with running_engine() as engine:
        ids = random_ids(length, length)
        first, again = (ask(engine, "anna", ids, tokens=6) for _ in range(2))
        assert (first.cached_tokens, again.cached_tokens) == (0, length - 1)
        assert first.sequence.tokens == again.sequence.tokens and again.evictions == first.evictions
        assert ask(engine, "bert", ids).cached_tokens == 0
        turn = ids + array("i", first.sequence.tokens) + random_ids(20, 1)
        assert ask(engine, "anna", turn).cached_tokens >= length
        long = [ask(engine, "carla", ids, tokens=64) for _ in range(2)]
        assert [one.cached_tokens for one in long] == [0, (length - 1) * (not evicts)]
        assert long[0].sequence.tokens == long[1].sequence.tokens


@pytest.mark.parametrize(("name", "cached"), {"lfm2": [40, 68], "bamba": [0, 0]}.items() if ASKED_FOR_STATES else ())
def test_layers_with_a_state_go_on_or_are_read_again(name, cached):
    """Equal beginnings, a turn, and a document; Bamba loses its state between pieces of a text."""
    sizes, tokenizer = Sizes(vocab=400), parts("llama")[1]
    model = tiny_decoder(*rows(sizes)[name], sizes, 0).double()

    def fresh(ids: array) -> list[int]:
        made = Answer(
            model, tokenizer, ids, BoundedCache(SETTINGS, "streaming", prompt_length=len(ids)), max_new_tokens=4
        )
        str(made)
        return made.tokens

    with stopped(EngineThread(model, tokenizer, SETTINGS, parse_policy("streaming"), None, sessions=2)) as engine:
        prompts = [random_ids(45, 1) + random_ids(20, seed) for seed in (2, 3)]
        answers = ask_together(engine, *prompts, shared_tokens=45)
        prompts.append(prompts[0] + array("i", answers[0].sequence.written) + random_ids(9, 4))
        answers.append(ask(engine, "", prompts[2]))
        assert [one.sequence.written for one in answers] == list(map(fresh, prompts))
        assert [one.cached_tokens for one in answers[1:]] == cached
        document = Document.read(model, tokenizer, text_of(40), SETTINGS, "streaming", reader=engine.read, ahead=True)
        question = document.prompt("Who?")
        assert ask(engine, "", question, document=document).sequence.written == fresh(question)


def test_a_beginning_that_cannot_be_begun_ends_one_request(engine, monkeypatch):
    """Those that begin alike do not wait for it."""
    empty, errors, start = engine.spec.cache, [ValueError("no room")], random_ids(200, 11)

    def make(*given: object) -> BoundedCache:
        if errors:
            raise errors.pop()
        return empty(*given)

    monkeypatch.setattr(engine.spec, "cache", make)
    prompts = [start + random_ids(20, seed) for seed in (12, 13, 14)]
    with pytest.raises(AssertionError, match="no room"):
        ask(engine, "anna", prompts[0], shared_tokens=200)
    cached = [ask(engine, "anna", ids, shared_tokens=200).cached_tokens for ids in prompts[1:]]
    assert cached == [0, 200 - SETTINGS.local_len]


def test_a_beginning_that_the_model_cannot_read_ends_one_request_after_another(engine):
    """None waits for it: its first token has no row in the embedding."""
    for seed in (15, 16):
        with pytest.raises(AssertionError, match="must be from 0 to 399"):
            ask(engine, "anna", array("i", [400]) + random_ids(200, 11) + random_ids(20, seed), shared_tokens=200)
    assert engine.figures["requests_waiting"] == 0


def test_system_prompts_over_http(url):
    system, cached = {"role": "system", "content": text_of(120, 3)}, []
    for seed in range(3):
        messages = [system, *user(text_of(30, seed))]
        answer = chat(url, messages, max_tokens=6).json()
        assert answer["choices"][0]["message"]["content"] == expected(messages, max_new_tokens=6)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and cached[1] == cached[2] > 100


def test_a_template_may_leave_out_the_first_question(url, engine, monkeypatch):
    """Then prompts share nothing before it."""
    with_template(monkeypatch, engine, "{{ messages[-1].content }}")
    system, begun = ({"role": role, "content": "Be brief."} for role in ("system", "assistant"))
    answer = chat(url, [system, *user("a"), begun, *user("c")], max_tokens=2)
    assert answer.status_code == 200, answer.text


# ---- saved caches ------------------------------------------------------------------------------------------------------


def test_a_saved_cache_is_a_document(url, client, tmp_path):
    model, tokenizer, heads = parts("llama")
    text = text_of(200)
    Document.read(model, tokenizer, text, SETTINGS, "locret", heads).save(tmp_path / "a.locret")
    shown = uploaded(url, "a.locret", (tmp_path / "a.locret").read_bytes())
    assert shown["status"] == "ready", shown
    asked = dict(model="tiny", messages=user("Who came in?"), temperature=0, max_tokens=8)
    answer = client.chat.completions.create(**asked, extra_body={"document_id": shown["id"]})
    assert answer.choices[0].message.content == expected(user(f"{text}\n\nWho came in?"))
    assert deleted(url, shown)


def test_saved_caches_that_do_not_fit_are_refused_with_their_sentence(url, tmp_path):
    model, tokenizer, heads = parts("llama")
    path = tmp_path / "a.locret"
    larger = RunSettings(**{**vars(SETTINGS), "budget": 128})
    own = (SETTINGS, "streaming", "policy='streaming' is not allowed here"), (SETTINGS, "locret", "is damaged")
    for settings, policy, words in ((larger, "locret", "budget=128 must be at most 96"), *own):
        Document.read(model, tokenizer, text_of(200), settings, policy, heads).save(path)
        data = path.read_bytes()
        flipped = data[:-100] + bytes([data[-100] ^ 1]) + data[-99:]
        shown = uploaded(url, "a.locret", flipped if "damaged" in words else data)
        assert shown["status"] == "failed" and words in shown["error"] and shown["error"].startswith("a.locret")
        assert deleted(url, shown)


def test_a_model_is_attached_once_for_all_tokens_of_an_answer(engine, monkeypatch):
    """That takes longer than a token of a small model."""
    starts, real = [], Attachment.start
    monkeypatch.setattr(Attachment, "start", lambda self: starts.append(1) or real(self))
    assert len(ask(engine, "anna", random_ids(150, 1), tokens=6).sequence.tokens) == 6
    assert len(starts) == 1


# ---- bounds ------------------------------------------------------------------------------------------------------------


def test_the_plan_says_the_bytes_that_are_allocated():
    model, tokenizer, heads = parts("llama")
    model, heads = type(model)(model.config).float(), type(heads)(heads.config).float()
    sizes = dict(sessions=3, piece=64, shared_prefixes=2)
    engine = EngineThread(model, tokenizer, SETTINGS, parse_policy("locret"), heads, **sizes)
    for number in range(3):
        ids = random_ids(150, number)
        ask(engine, "anna", ids, shared_tokens=100 if number < 2 else 0)
    document = Document.read(model, tokenizer, text_of(150), SETTINGS, "locret", heads)
    caches = [one.cache for held in (engine._parked.parked, engine._admission.prefixes) for one in held.values()]
    setting = Setting(4000, SETTINGS, dtype="float32")
    planned = Caches.of(spec_of(model.config), setting, [parse_policy("locret")], 3, 1, 2)
    assert len(caches) == 5
    assert planned.bytes == sum(cache.nbytes for cache in (*caches, document.cache))
    assert str(planned).endswith(show(planned.bytes))
    engine.stop()


def test_headers_must_come_in_time(url, monkeypatch):
    monkeypatch.setattr(HeaderTimeout, "seconds", 0.2)
    address = ("127.0.0.1", httpx.URL(url).port)
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"):
        with socket.create_connection(address) as line:
            line.sendall(sent)
            line.settimeout(300)
            assert line.recv(100).startswith(b"HTTP/1.1 408")
            with suppress(ConnectionResetError):  # where the server was faster than what was sent
                assert line.recv(100) == b""
    with httpx.Client() as client:  # a connection that is used again; the first headers may be late on a busy machine
        until(lambda: client.get(f"{url}/health").status_code == 200)
        time.sleep(0.3)
        assert client.get(f"{url}/health").status_code == 200
