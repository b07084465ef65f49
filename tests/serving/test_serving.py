"""The server over HTTP: a real port, OpenAI's own client, and requests as others send them; what answers come with and share."""

from __future__ import annotations

import json
import socket
import time
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import httpx
import openai
import pytest
import torch
from http_bodies import alone, bearer, chat, deleted, expected, until, uploaded, user
from read_texts import parts, text_of
from served import KEYS, LIMITS, SETTINGS, ask, new_engine, random_ids, running_engine, serving

from locret_kit import BoundedCache, Document
from locret_kit.backbones.spec import spec_of
from locret_kit.naming import show
from locret_kit.planning.inference_plan import Caches, Setting
from locret_kit.policies.grammar import parse_policy
from locret_kit.runtime import engine as loop
from locret_kit.runtime.session import Answer, Sampling
from locret_kit.serving.engine_thread import EngineThread
from locret_kit.serving.process import HeaderTimeout
from locret_kit.settings import RunSettings


def test_an_answer_whole_and_streamed(client):
    messages = [{"role": "system", "content": "Be brief."}, *user(text_of(60) + " Who came in?")]
    whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=8)
    assert whole.choices[0].message.content == expected(messages)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 8
    assert whole.usage.locret["evictions"] > 0 and whole.usage.locret["kept_rows"] <= 96 + 32
    asked = dict(model="tiny", messages=messages, temperature=0, max_completion_tokens=8)
    seen = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(event.choices[0].delta.content or "" for event in seen if event.choices)
    assert text == expected(messages) and seen[0].choices[0].delta.role == "assistant"
    assert seen[-1].usage.completion_tokens == 8 and seen[-2].choices[0].finish_reason == "length"


def test_a_text_completion(client):
    text = text_of(50)
    answer = client.completions.create(model="tiny", prompt=text, temperature=0, max_tokens=8)
    assert answer.choices[0].text == alone(parts("llama")[1](text).input_ids)


@pytest.mark.parametrize("value", ["x", float("nan")])
def test_a_field_of_the_other_kind_is_unknown(url, value):
    body = json.dumps({"prompt": "The harbour", "max_tokens": 4, "max_completion_tokens": value})
    headers = bearer() | {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/completions", content=body, headers=headers, timeout=300)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 4


def test_a_request_asks_for_less_and_for_a_policy_that_is_allowed(client):
    messages = user(text_of(80))
    asked = dict(model="tiny", messages=messages, temperature=0, max_tokens=8)
    answer = client.chat.completions.create(**asked, extra_body={"budget": 48, "policy": "h2o"})
    assert answer.choices[0].message.content == expected(messages, "h2o", 48)
    allowed = "policy='tova' is not allowed here; allowed: h2o"
    for body, words in (({"budget": 97}, "budget=97 must be at most 96"), ({"policy": "tova"}, allowed)):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(**asked, extra_body=body)


def test_a_conversation_is_not_read_again(client):
    messages = user(text_of(60, seed=7))
    kept = dict(model="tiny", temperature=0, max_tokens=6)
    first = client.chat.completions.create(messages=messages, **kept)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    content = first.choices[0].message.content
    longer = [*messages, {"role": "assistant", "content": content}, *user("And when?")]
    tokenizer = parts("llama")[1]
    said = tokenizer(content, add_special_tokens=False).input_ids
    second = client.chat.completions.create(messages=longer, **kept)
    if len(said) == 6:  # the answer's text has the tokens that were written
        assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    edited = [*user(text_of(60, seed=8)), *longer[1:]]
    third = client.chat.completions.create(messages=edited, **kept)
    assert third.usage.prompt_tokens_details.cached_tokens == 0
    assert third.choices[0].message.content == expected(edited, max_new_tokens=6)


def test_the_log_has_tokens_and_the_end(client, caplog):
    caplog.set_level("INFO", "locret_kit.serving")
    usage = client.chat.completions.create(model="tiny", messages=user(text_of(40)), temperature=0, max_tokens=3).usage
    read, cached = usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("answer: ")]
    assert line.startswith(f"answer: {read} tokens of prompt ({cached} cached), {usage.completion_tokens} written, ")
    assert line.endswith("s, end: length")


def test_many_at_once_are_each_right(url):
    asked = [user(text_of(20 + 15 * number, seed=number)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda messages: chat(url, messages), asked))
    right = [(messages, answer) for messages, answer in zip(asked, answers, strict=True) if answer.status_code != 429]
    assert len(right) >= 6
    for messages, answer in right:
        assert answer.json()["choices"][0]["message"]["content"] == expected(messages)


def test_a_document_is_read_once_and_belongs_to_its_owner(url):
    text = text_of(260)
    made = shown = uploaded(url, "book.txt", text.encode())
    assert shown["status"] == "ready" and shown["title"] == "book.txt" and shown["total_tokens"] > 500
    answer = chat(url, user("Who came in?"), document_id=made["id"]).json()
    assert answer["choices"][0]["message"]["content"] == expected(user(f"{text}\n\nWho came in?"))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 400
    other = bearer(KEYS[1])
    assert httpx.get(f"{url}/v1/documents", headers=other).json()["data"] == []
    for call in (httpx.get, httpx.delete):
        assert call(f"{url}/v1/documents/{made['id']}", headers=other).status_code == 404
    body = {"messages": user("Who?"), "document_id": made["id"]}
    for name, value in (("budget", 48), ("policy", "h2o")):
        refused = httpx.post(f"{url}/v1/chat/completions", json=body | {name: value}, headers=bearer()).json()["error"]
        assert refused["param"] == name and f"{name} has no effect with document_id" in refused["message"]
    assert httpx.post(f"{url}/v1/chat/completions", json=body, headers=other).status_code == 404
    assert httpx.delete(f"{url}/v1/documents/{made['id']}", headers=bearer()).json()["deleted"] is True
    assert httpx.get(f"{url}/v1/documents/{made['id']}", headers=bearer()).status_code == 404


@pytest.mark.parametrize("stop", [None, "e"])
def test_an_answer_has_passages_of_its_document(url, client, stop):
    text, about = text_of(260), {"model": "tiny", "messages": user("Who came in?"), "temperature": 0, "max_tokens": 8}
    made = uploaded(url, "book.txt", text.encode())
    plain = client.chat.completions.create(**about, stop=stop, extra_body={"document_id": made["id"]})
    asked = {"document_id": made["id"], "evidence": True}
    whole = client.chat.completions.create(**about, stop=stop, extra_body=asked).choices[0]
    assert whole.message.content == plain.choices[0].message.content and not hasattr(plain.choices[0], "evidence")
    assert 1 <= len(whole.evidence) <= 3
    for passage in whole.evidence:
        assert set(passage) == {"text", "line", "share", "file", "page"} and 0 < passage["share"] <= 1
        assert "".join(passage["text"].split())[5:-5] in "".join(text.split())
    chunks = list(client.chat.completions.create(**about, stop=stop, stream=True, extra_body=asked))
    assert [chunk.choices[0].evidence for chunk in chunks if hasattr(chunk.choices[0], "evidence")] == [whole.evidence]
    body = {"messages": user("Who?"), "evidence": True}
    refused = httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer())
    assert refused.status_code == 400 and "document_id" in refused.json()["error"]["message"]
    httpx.delete(f"{url}/v1/documents/{made['id']}", headers=bearer())


def test_an_upload_names_its_budget():
    """More than a session's, where the server gives as much."""
    text, question = text_of(900), user("Who came in?")
    with running_engine(document_budget=160) as engine, serving(engine) as url:

        def post(**data: object) -> httpx.Response:
            return httpx.post(f"{url}/v1/documents", files={"file": ("a.txt", text)}, data=data, headers=bearer())

        for budget, most, words in ((None, 96, "96 slots"), (64, 64, "64 slots"), (160, 160, "160 slots")):
            made = post(**{} if budget is None else {"budget": budget}).json()
            place = f"{url}/v1/documents/{made['id']}"
            shown = until(lambda at=place: (one := httpx.get(at, headers=bearer()).json())["status"] == "ready" and one)
            assert shown["lost"][0].startswith(words) and shown["lost"][0].endswith("documents have up to 160 here")
            answer = chat(url, question, document_id=made["id"]).json()
            assert answer["choices"][0]["message"]["content"] == expected(user(f"{text}\n\nWho came in?"), budget=most)
            assert httpx.delete(place, headers=bearer()).status_code == 200
        for budget, words in ((161, "budget=161 must be at most 160"), (0, "budget"), ("many", "budget")):
            refused = post(budget=budget)
            assert refused.status_code == 400 and words in refused.json()["error"]["message"]


def test_what_is_kept_of_a_document_page_by_page(url):
    text = text_of(90) + " \U0001f600 naïve. " + text_of(90)
    made = uploaded(url, "book.txt", text.encode())
    address = f"{url}/v1/documents/{made['id']}/kept"
    first = httpx.get(address, params={"limit": 70}, headers=bearer()).json()
    asked = ({"start": start, "limit": 70} for start in range(0, first["total_tokens"], 70))
    pages = [httpx.get(address, params=one, headers=bearer()).json() for one in asked]
    assert pages[0] == first and len(first["texts"]) == 70
    assert "".join(text for page in pages for text in page["texts"]) == f"<|im_start|>user\n{text}"
    model, tokenizer, heads = parts("llama")
    alone = Document.read(model, tokenizer, text, SETTINGS, "locret", heads, ahead=True)
    held = Counter(p for layer in range(3) for head in alone.cache.kept_positions(layer)[0] for p in head.tolist())
    seen = alone.cache.get_seq_length()
    shares = [held[at] / 6 if at < seen else None for at in range(alone.tokens)]
    assert [share for page in pages for share in page["shares"]] == shares
    assert first["heads"] == 6 and first["seen"] == seen < first["total_tokens"] == alone.tokens
    assert len(first["overview"]) == 200 and sum(first["overview"]) > 0
    assert httpx.get(address, headers=bearer(KEYS[1])).status_code == 404
    for wrong in ({"start": -1}, {"limit": 0}, {"limit": 10**6}, {"start": "x"}):
        assert httpx.get(address, params=wrong, headers=bearer()).status_code == 400
    assert deleted(url, made)


def test_an_endless_body_is_cut_off(url):
    def endless():
        for _ in range(1000):
            yield b"x" * 10_000

    answer = httpx.post(f"{url}/v1/chat/completions", content=endless(), headers=bearer(), timeout=300)
    assert answer.status_code == 413


def test_keys_health_and_figures(url):
    for headers in ({}, bearer("wrong"), bearer(KEYS[0] + "x")):
        for path in ("/v1/models", "/v1/documents", "/metrics"):
            answer = httpx.get(url + path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{url}/health").json() == {"status": "ok"} and httpx.head(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/models", headers=bearer()).json()["data"][0]["id"] == "tiny"
    figures = httpx.get(f"{url}/metrics", headers=bearer()).text
    for name in ("sessions 4.0", "new_tokens_total", "sessions_in_use", "token_seconds_sum"):
        assert f"locret_{name}" in figures
    assert 'locret_first_token_seconds_bucket{le="+Inf"}' in figures
    assert httpx.get(f"{url}/nothing", headers=bearer()).json()["error"]["type"] == "not_found_error"


# ---- stop texts, log-probabilities, equal beginnings, saved caches, bounds -------------------------------------------


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


def test_stop_texts_over_http_are_not_cancelled(client, engine):
    messages = user(text_of(40))
    whole = expected(messages, max_new_tokens=16)
    before = engine.counters.cancelled
    asked = dict(model="tiny", messages=messages, temperature=0, max_tokens=16, stop=whole[4:6])
    for stream in (False, True):
        answer = client.chat.completions.create(**asked, stream=stream)
        events = answer if stream else [answer]
        said = "".join((one.choices[0].delta if stream else one.choices[0].message).content or "" for one in events)
        assert said == whole[: whole.index(whole[4:6])]
    assert engine.counters.cancelled == before


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


def test_system_prompts_over_http(url):
    system, cached = {"role": "system", "content": text_of(120, 3)}, []
    for seed in range(3):
        messages = [system, *user(text_of(30, seed))]
        answer = chat(url, messages, max_tokens=6).json()
        assert answer["choices"][0]["message"]["content"] == expected(messages, max_new_tokens=6)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 and cached[1] == cached[2] > 100


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
