"""The server over HTTP: a real port, OpenAI's own client, and requests as others send them."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from http_bodies import bearer, chat, deleted, expected, until, uploaded, user
from read_texts import parts, text_of
from served import KEYS, SETTINGS, running_engine, serving, with_template
from tokenizers.processors import TemplateProcessing

from locret_kit import Document
from locret_kit.settings import RunSettings

ROUTES = ("chat/completions", "messages", "responses")


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
    same = [client.chat.completions.create(**asked, extra_body={"budget": 96, "policy": "locret"}) for _ in range(2)]
    assert {answer.choices[0].message.content for answer in same} == {expected(messages)}
    assert same[1].usage.prompt_tokens_details.cached_tokens > 0, "the server's own are those of its conversations"
    allowed = "policy='tova' is not allowed here; allowed: locret, h2o"
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
    asked = httpx.post(f"{url}/v1/messages", json=body | {"max_tokens": 4}, headers=bearer()).json()["usage"]
    for path, count in (("v1/messages/count_tokens", "input_tokens"), ("tokenize", "count")):
        known = httpx.post(f"{url}/{path}", json=body, headers=bearer()).json()[count]
        assert known == asked["input_tokens"] + asked["cache_read_input_tokens"] > 500
        assert httpx.post(f"{url}/{path}", json=body, headers=other).status_code == 404
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
    body = {"messages": user("Who?"), "input": "Who?", "max_tokens": 8, "evidence": True}
    refused = [httpx.post(f"{url}/v1/{path}", json=body, headers=bearer()) for path in ROUTES]
    assert [answer.status_code for answer in refused] == [400] * 3
    for answer, word in zip(refused, ("document_id", "/v1/chat", "/v1/chat"), strict=True):
        assert word in answer.json()["error"]["message"]
    httpx.delete(f"{url}/v1/documents/{made['id']}", headers=bearer())


def test_an_upload_and_a_request_name_their_budget():
    """An upload more than a session's, where the server gives as much. Lengths that nobody set follow it, as those of a run do:
    here published ones, of half the budget."""
    text, question = text_of(400), "Who came in?"
    given = {"settings": RunSettings(chunk=32), "published": {"budget": 96, "stabilizers": 48, "local_len": 20}}
    with running_engine(**given, document_budget=160) as engine, serving(engine) as url:

        def post(**data: object) -> httpx.Response:
            return httpx.post(f"{url}/v1/documents", files={"file": ("a.txt", text)}, data=data, headers=bearer())

        for data, budget in (({}, 96), *(({"budget": budget}, budget) for budget in (48, 160))):
            place = f"{url}/v1/documents/{post(**data).json()['id']}"
            shown = until(lambda at=place: (one := httpx.get(at, headers=bearer()).json())["status"] == "ready" and one)
            lost = shown.get("lost", [""])[0]
            assert re.match(rf"{budget} slots .* documents have up to 160 here$" if budget < 160 else "$", lost), lost
            lengths = {"stabilizers": budget // 2, "local_len": min(20, 20 * budget // 96)}
            want = expected(user(f"{text}\n\n{question}"), budget=budget, **lengths)
            asked = [(user(question), {"document_id": shown["id"]})]
            asked += [(user(f"{text}\n\n{question}"), {"budget": budget})] if budget <= 96 else []
            said = [chat(url, messages, **more).json()["choices"][0]["message"]["content"] for messages, more in asked]
            assert said == [want] * len(asked)
            assert httpx.delete(place, headers=bearer()).status_code == 200
        for wrong, words in ((161, "budget=161 must be at most 160"), (0, "budget"), ("many", "budget")):
            refused = post(budget=wrong)
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
    for wrong in (*({"start": at} for at in (-1, "x", 2**31, 10**20)), {"limit": 0}, {"limit": 10**6}):
        assert httpx.get(address, params=wrong, headers=bearer()).status_code == 400
    assert deleted(url, made)


def test_a_prompt_has_the_tokens_that_it_is_completed_with(url, engine, monkeypatch):
    """As in vLLM, BOS included; a content has none, as in llama.cpp."""
    tokenizer = with_template(monkeypatch, engine, "")
    first = tokenizer.convert_ids_to_tokens(0)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])

    def tokens(**body: object) -> list[int]:
        return httpx.post(f"{url}/tokenize", json=body, headers=bearer()).json()["tokens"]

    bos, *own = tokenizer("The harbour").input_ids
    assert tokens(prompt="The harbour") == tokens(content="The harbour", add_special=True) == [bos, *own]
    assert tokens(content="The harbour") == tokens(prompt="The harbour", add_special_tokens=False) == own


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
