"""What clients send beside the first example: nulls, parts, lists, token ids, echoes, biases, begun answers; and silence."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import product

import httpx
import pytest
import torch
from http_bodies import CHAT_TOOL, NOW, alone, bearer, chat, deleted, expected, sent, until, uploaded, user
from read_texts import parts, text_of
from served import LIMITS, held, serving
from tiny_tokenizer import TEMPLATE, TEXT, byte_level, chatting

from locret_kit.backbones.intercept import attached
from locret_kit.cli.serve import sampling_defaults
from locret_kit.config.serve_options import ServeOptions
from locret_kit.runtime.sampling import Chooser, Sampling
from locret_kit.serving.app import Detokenize
from locret_kit.serving.bodies import ChatBody, TextBody
from locret_kit.text.template import render_messages

OTHER_NAMES = ("max_completion_tokens", "reasoning", "user", "functions", "function_call", "modalities", "suffix")
"""Names of fields that no attribute of a body has."""


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, silence=0.2, defaults={"temperature": 0.0}) as address:
        yield address


def text(url: str, prompt: object, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=bearer(), timeout=300)


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


# ---- fields ------------------------------------------------------------------------------------------------------------


def test_null_is_absence(url):
    messages = [{"role": "user", "content": "Who came in?", "name": None, "tool_calls": None}]
    for kind, body in ((ChatBody, {"messages": user("a")}), (TextBody, {"prompt": "a"})):
        plain, names = kind.model_validate(body), kind.model_fields.keys() - body.keys()
        assert all(kind.model_validate(body | {name: None}) == plain for name in (*names, *OTHER_NAMES))
    assert said(chat(url, messages, stream_options={"include_usage": None})) == expected(user("Who came in?"))


@pytest.mark.parametrize("answer", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_answer_may_have_no_content(url, answer):
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [*user("a"), {"role": "assistant", **answer}, *user("b")]
    plain = [*user("a"), {"role": "assistant", "content": ""}, *user("b")]
    assert said(chat(url, messages)) == expected(plain)
    messages[1] |= {"tool_calls": calls}
    assert said(chat(url, [*messages[:2], {"role": "tool", "tool_call_id": "1", "content": "3"}, *user("b")]))


def test_parts_have_openais_names(url):
    texts = [{"type": "text", "text": "Who"}, {"type": "input_text", "text": " came"}]
    pieces = [{"type": "output_text", "text": "no"}, {"type": "refusal", "refusal": "!"}]
    earlier = {"role": "assistant", "content": pieces}
    messages = [{"role": "user", "content": texts}, earlier, *user("b")]
    plain = [*user("Who came"), {"role": "assistant", "content": "no!"}, *user("b")]
    assert said(chat(url, messages)) == expected(plain)
    for wrong in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"text": "x"}, 1):
        error = chat(url, [{"role": "user", "content": [wrong]}])
        assert error.status_code == 400 and "parts must be text" in error.json()["error"]["message"]
    for role in ("user", "system", "developer"):
        error = chat(url, [{"role": role, "content": None}])
        assert error.status_code == 400 and f"role '{role}' needs a content" in error.json()["error"]["message"]


def test_seeds_minus_one_and_others(url):
    drawn = [said(chat(url, user("a"), temperature=1.5, seed=-1)) for _ in range(4)]
    assert len(set(drawn)) > 1
    same = {said(chat(url, user("a"), temperature=1.5, seed=seed)) for seed in (5, 2**32 + 5, 5 - 2**32)}
    assert len(same) == 1
    choices = chat(url, user("a"), temperature=1.5, seed=5, n=2).json()["choices"]
    assert same == {choices[0]["message"]["content"]} != {choices[1]["message"]["content"]}
    likeliest = said(chat(url, user("a"), temperature=0))
    assert {said(chat(url, user("a"), temperature=1.5, top_p=0)) for _ in range(3)} == {likeliest}


def test_penalties_biases_and_min_p(url, engine):
    messages = user(text_of(20))
    plain = said(chat(url, messages, max_tokens=24))
    assert said(chat(url, messages, max_tokens=24, frequency_penalty=0, presence_penalty=0, logit_bias={})) == plain
    forced = chat(url, messages, logit_bias={"7": 100}, max_tokens=5).json()["choices"][0]["message"]["content"]
    assert forced == engine.tokenizer.decode([7] * 5)
    for wrong in ({"x": 1}, {"99999999": 1}):
        assert chat(url, messages, logit_bias=wrong).status_code == 400
    alone = said(chat(url, messages, temperature=1.5, min_p=1.0, max_tokens=24))
    assert alone == plain  # nothing but the likeliest is left


@pytest.mark.parametrize("drawn", [{}, dict(temperature=0.5, top_k=1)])
def test_penalties_by_their_definition(drawn):
    """OpenAI's: mu[j] - c[j] * frequency - (c[j] > 0) * presence, of the answer's tokens alone; also where tokens are drawn."""
    logits = torch.tensor([3.0, 2.93, 1.07, 0.11])
    sampling = Sampling(frequency_penalty=0.5, presence_penalty=0.2, logit_bias=((2, 2.0),), **drawn)
    choose = Chooser(sampling, 0, torch.device("cpu"), [0, 0, 0])
    scores, counts, want = [3.0, 2.93, 3.07, 0.11], [0] * 4, []
    for _ in range(12):
        now = [x - n * 0.5 - (n > 0) * 0.2 for x, n in zip(scores, counts, strict=True)]
        want.append(max(range(4), key=lambda j: now[j]))
        counts[want[-1]] += 1
    assert [choose(logits.clone()) for _ in range(12)] == want and len(set(want)) > 2


def test_a_begun_answer_is_gone_on_with(url, engine):
    _, tokenizer, _ = parts("llama")
    messages = [*user("Who came in?"), {"role": "assistant", "content": "The first"}]
    ids = tokenizer(render_messages(tokenizer, messages[:1])[1] + "The first", add_special_tokens=False).input_ids
    answer = chat(url, messages)
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    assert said(answer) == text(url, ids).json()["choices"][0]["text"]
    other = chat(url, messages, continue_final_message=False).json()["usage"]["prompt_tokens"]
    assert other > len(ids)


# ---- texts -------------------------------------------------------------------------------------------------------------


def test_lists_and_token_ids(url, engine):
    one, two = (text(url, prompt).json()["choices"][0]["text"] for prompt in ("The harbour", "A man"))
    both = text(url, ["The harbour", "A man"], n=2).json()
    assert [choice["text"] for choice in both["choices"]] == [one, one, two, two]
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    ids = engine.tokenizer("The harbour").input_ids
    assert text(url, ids).json()["choices"][0]["text"] == one == alone(ids)
    assert text(url, [ids, ids[:2]]).json()["choices"][0]["text"] == one
    assert both["usage"]["prompt_tokens"] == len(ids) + len(engine.tokenizer("A man").input_ids)
    for wrong in ([], [[]], [10**9], [-1], [1.5], [True], [[1, "1"]], ["a", 1], {"a": 1}, ["x"] * 65):
        assert text(url, wrong).status_code == 400, wrong


@pytest.mark.parametrize("stream", [False, True])
def test_echoes_with_log_probabilities(url, engine, stream):
    """As lm-eval's local-completions asks: of every token of the prompt but the first, by full attention where all fits."""
    ids = engine.tokenizer(text_of(30)).input_ids[:60]
    model = engine.model
    with torch.no_grad(), attached(model):
        pass
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    want = [float(logits[at, token]) for at, token in enumerate(ids[1:])]
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    answer = text(url, ids, **fields)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choice = events[0]["choices"][0]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    else:
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length" and answer.json()["usage"]["completion_tokens"] == 0
    values = choice["logprobs"]
    assert values["token_logprobs"][0] is None and len(values["tokens"]) == len(ids)
    assert values["token_logprobs"][1:] == pytest.approx(want, abs=1e-4)
    assert choice["text"] == engine.tokenizer.decode(ids)
    for at in range(1, len(ids)):
        best = int(logits[at - 1].argmax())
        assert engine.tokenizer.decode([best]) in values["top_logprobs"][at]
    one = text(url, ids, echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert one["logprobs"]["token_logprobs"][1:-1] == pytest.approx(want, abs=1e-4)
    assert len(one["logprobs"]["text_offset"]) == len(ids) + 1 and one["text"].startswith(choice["text"])
    assert one["logprobs"]["text_offset"][-1] == len(choice["text"])
    assert text(url, "a b", echo=True).json()["choices"][0]["text"].startswith("a b")


# ---- documents ---------------------------------------------------------------------------------------------------------


def test_a_system_prompt_beside_a_document(url):
    document = uploaded(url, "a.txt", text_of(40).encode())
    name = document["id"]
    system = {"role": "system", "content": "Be brief."}
    joined = said(chat(url, user("Be brief.\n\nWho came in?"), document_id=name))
    assert said(chat(url, [system, *user("Who came in?")], document_id=name)) == joined
    assert said(chat(url, [{**system, "role": "developer"}, *user("Who came in?")], document_id=name)) == joined
    for first in ([], [{"role": "assistant", "content": "x"}]):
        error = chat(url, [system, *first], document_id=name)
        assert error.status_code == 400 and "must be a user's" in error.json()["error"]["message"]
    assert deleted(url, document)


def test_a_clock_in_the_template(engine):
    from locret_kit.documents.document_text import DocumentText
    from locret_kit.samples import encode_chat

    _, tokenizer, _ = parts("llama")
    plain = tokenizer.chat_template
    tokenizer.chat_template = "{{ strftime_now('%H:%M:%S.%f') }}\n" + plain
    try:
        document = DocumentText.begin(tokenizer, True)
        document.feed("The harbour was quiet.")
        assert document.prompt("Who?")
        body = ChatBody.model_validate({"messages": user("Who?")})
        assert body.ids(tokenizer, type("Read", (), {"text": document})())[0] == document.prompt("Who?")
        assert encode_chat(tokenizer, [*user("a"), {"role": "assistant", "content": "b"}]).answers
    finally:
        tokenizer.chat_template = plain


@pytest.mark.parametrize(
    "fields, refused",
    [
        ({"tools": [CHAT_TOOL]}, True), ({"tools": [CHAT_TOOL], "tool_choice": "none"}, False),
        ({"reasoning_effort": "high"}, True), ({"chat_template_kwargs": {"style": "brief"}}, False), ({}, False),
    ],
)  # fmt: skip
def test_what_a_template_shows_before_a_document(fields, refused):
    """A document was read without that: it would have no effect. The day, which is another one now, is no such thing."""
    from locret_kit.documents.document_text import DocumentText

    shown = "{{ tools | tojson if tools }}{{ reasoning_effort }}" + TEMPLATE + "{{ style }}"
    tokenizer = chatting(byte_level([TEXT], 400), f"Monday\n{shown}")
    document = DocumentText.of(tokenizer, "The harbour was quiet.", True)
    tokenizer.chat_template = f"Tuesday\n{shown}"
    body = ChatBody.model_validate({"messages": user("Who?"), **fields})
    about = type("Read", (), {"text": document})()
    if refused:
        with pytest.raises(ValueError, match="document_id does not go with tools, or arguments"):
            body.ids(tokenizer, about)
        return
    prompt = tokenizer.decode(body.ids(tokenizer, about)[0])
    assert prompt.startswith("Monday") and prompt.endswith(
        "brief" if "chat_template_kwargs" in fields else "assistant\n"
    )


# ---- information -------------------------------------------------------------------------------------------------------


def test_models_and_tokens(url, engine):
    model = httpx.get(f"{url}/v1/models/tiny", headers=bearer()).json()
    assert model == httpx.get(f"{url}/v1/models", headers=bearer()).json()["data"][0]
    assert model["max_model_len"] == 4000 and abs(model["created"] - time.time()) < 86400
    assert httpx.get(f"{url}/v1/models/other", headers=bearer()).json()["error"]["type"] == "not_found_error"
    for path in ("/v1/models/tiny", "/v1/models"):
        assert httpx.get(f"{url}{path}").status_code == 401
    ids = engine.tokenizer("The harbour").input_ids

    def post(path: str, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
        return httpx.post(f"{url}/{path}", json=body, headers=bearer() if headers is None else headers)

    answer = post("tokenize", content="The harbour").json()
    assert answer["tokens"] == ids and answer["count"] == len(ids)
    pieces = post("tokenize", prompt="The harbour", with_pieces=True).json()
    assert "".join(piece["piece"] for piece in pieces["tokens"]) == "The harbour"
    assert post("detokenize", tokens=ids).json()["content"] == "The harbour"
    prompt = post("tokenize", messages=user("a")).json()
    assert prompt["count"] == chat(url, user("a")).json()["usage"]["prompt_tokens"]
    wrong = post("tokenize", messages=[{"role": "robot", "content": "a"}]).json()["error"]
    assert wrong["param"] == "messages.0.role" and wrong["message"].startswith("messages.0.role: Input")
    for path, body in (("tokenize", {}), ("detokenize", {"tokens": [10**9]}), ("detokenize", {})):
        assert (post(path, **body).status_code, post(path, {}, **body).status_code) == (400, 401)
    with pytest.raises(ValueError, match="at most 1048576 items"):
        Detokenize(tokens=[0] * (2**20 + 1))


def test_lists_of_tokens_have_a_bound(url, monkeypatch):
    monkeypatch.setattr("locret_kit.serving.app.MAX_TOKENS", 5000)
    text = "word " * 1100  # more than a prompt may have: who cuts it wants to know how many there are
    answer = httpx.post(f"{url}/tokenize", json={"content": text}, headers=bearer()).json()
    assert answer["count"] == len(answer["tokens"]) > answer["max_model_len"] == 4000
    for body, bound in (
        ({"content": text, "with_pieces": True}, 4000), ({"content": text * 2}, 5000), ({"messages": user(text * 2)}, 5000)
    ):  # fmt: skip
        refused = httpx.post(f"{url}/tokenize", json=body, headers=bearer())
        assert refused.status_code == 400 and f"more than {bound} tokens" in refused.json()["error"]["message"]


OTHER = {"type": "function", "function": {"name": "other"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [OTHER]}}


def schema(kind: str | None) -> dict:
    """A form of answers by a schema, which has a type that there is not, or is missing."""
    return {"type": "json_schema", "json_schema": {"name": "a", **({"schema": {"type": kind}} if kind else {})}}


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("completions", {"prompt": [1, "a"]}, "prompt", "must be a text, token ids, or a list of at most 64 of either"),
        ("completions", {"prompt": []}, "prompt", "must be a text, token ids"),
        ("completions", {"prompt": "a", "stop": 5}, "stop", "must be a text, or at most 64 of them"),
        ("chat/completions", {"messages": user("a"), "tool_choice": "some"}, "tool_choice", "must be 'none', 'auto', 'required'"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "image"}]}]}, "input.0.content", "'image'"),
        ("responses", {"model": "x"}, "input", "Field required"),
        ("responses", {"input": "a" * 100_000}, "input", "more than 4000 tokens"),
        ("responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0 must be at least 1"),
        ("chat/completions", {"messages": user("a"), "max_tokens": -2}, "max_tokens", "max_tokens=-2 must be at least -1"),
        ("chat/completions", {"messages": user("a"), "temperature": 9}, "temperature", "temperature=9 must be at most 2"),
        ("completions", {"prompt": "a", "temperature": -0.5}, "temperature", "temperature=-0.5 must be at least 0"),
        ("responses", {"input": "a", "top_p": 1.5}, "top_p", "top_p=1.5 must be at most 1"),
        ("completions", {"prompt": "a", "presence_penalty": -3}, "presence_penalty", "=-3 must be at least -2"),
        ("completions", {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5=101 must be at most 100"),
        ("completions", {"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty", "=1e-300 must be at least 0.01"),
        ("chat/completions", b"", None, "the body must be a JSON object, with content-type: application/json"),
        ("chat/completions", b"[]", None, "the body must be a JSON object"),
        ("chat/completions", b'{"a": "caf\xe9"}', None, "the body is not JSON: 'utf-8' codec can't decode byte 0xe9"),
        ("chat/completions", {}, "messages", "Field required"),
        ("chat/completions", {"messages": []}, "messages", ""),
        ("chat/completions", {"messages": [{"role": "friend", "content": "x"}]}, "messages.0.role", ""),
        ("chat/completions", {"messages": user("a"), "functions": [{"name": "f"}]}, None, "functions is not supported"),
        ("chat/completions", {"messages": user("a"), "top_logprobs": 3}, None, "top_logprobs needs logprobs=true"),
        ("chat/completions", {"messages": user("a"), "tools": [{"type": "function"}]}, "tools.0.function", ""),
        ("chat/completions", {"messages": user("a"), "tool_choice": "required"}, None, "tool_choice needs tools"),
        ("chat/completions", {"messages": user("a"), "tools": [NOW], "tool_choice": OTHER}, None, "none of tools"),
        ("chat/completions", {"messages": user("a"), "tools": [NOW], "tool_choice": ALLOWED}, None, "none of tools"),
        ("chat/completions", {"messages": user("a"), "response_format": {"type": "xml"}}, "response_format.type", ""),
        ("chat/completions", {"messages": user("a"), "response_format": schema("x")}, None, "cannot be followed"),
        ("chat/completions", {"messages": user("a"), "response_format": schema(None)}, "response_format", "needs a schema"),
        ("chat/completions", {"messages": user("a"), "document_id": "doc_0"}, None, "document 'doc_0' is not there"),
        ("chat/completions", {"messages": user("x" * 300_000)}, None, "at most 200000 bytes"),
        ("responses", {"input": "a", "previous_response_id": "r"}, None, "nothing is stored here"),
        ("responses", {"input": "a", "conversation": "c"}, None, "conversation is not supported"),
        ("responses", {"input": "a", "background": True}, None, "background is not supported"),
        ("responses", {"input": "a", "include": ["message.output_text.logprobs"]}, None, "/v1/chat/completions"),
        ("responses", {"input": ["a"]}, None, "input.0: must be an object"),
        ("responses", {"input": []}, "input", "input: "),
        ("responses", {"input": "a", "tools": [{"type": 5}]}, "tools.0.type", "valid string"),
        ("responses", {"input": "a", "tools": 5}, "tools", "valid list"),
        ("responses", {"input": "a", "reasoning": {"effort": 5}}, "reasoning.effort", "must be true, false, or an effort"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0", "a function"),
        ("responses", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs a schema"),
        ("embeddings", {"input": "a"}, None, "there is no /v1/embeddings here"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named_as_the_client_has_it(url, path, body, field, words):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = bearer() | {"content-type": "application/json"}
    answer = httpx.post(f"{url}/v1/{path}", content=content, headers=headers, timeout=300)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404, 413) and error["param"] == field and words in error["message"], error
    assert field is None or error["message"].startswith((f"{field}: ", f"{field}=", "the prompt has"))


def test_more_tokens_than_the_server_gives_are_what_it_gives(engine):
    bodies = [
        ("chat/completions", {"messages": user("a")}, "max_tokens", "length"),
        ("chat/completions", {"messages": user("a")}, "max_completion_tokens", "length"),
        ("completions", {"prompt": "a"}, "max_tokens", "length"),
        ("messages", {"messages": user("a")}, "max_tokens", "max_tokens"),
        ("responses", {"input": "a"}, "max_output_tokens", "max_output_tokens"),
    ]
    tokens = ((10**30, 3), (-1, 3), (None, 3), (2, 2))
    with serving(engine, replace(LIMITS, answer_tokens=3), silence=0.0001) as url:
        for (path, body, field, reason), (asked, given), stream in product(bodies, tokens, (False, True)):
            if (path, asked) != ("messages", None):
                made = {**body, "model": "any", "temperature": 0, field: asked, "stream": stream}
                answer = httpx.post(f"{url}/v1/{path}", json=made, headers=bearer(), timeout=300)
                assert answer.status_code == 200 and answer.headers["x-max-tokens"] == str(given), answer.text
                assert f'"{reason}"' in answer.text


def test_codes(url):
    long = chat(url, user("word " * 9000)).json()["error"]
    assert long["code"] == "context_length_exceeded" and long["param"] == "messages"
    assert "this model's maximum context length is 4000 tokens" in long["message"]  # LangChain and LiteLLM look for it
    assert text(url, "word " * 9000).json()["error"]["code"] == "context_length_exceeded"
    error = text(url, "").json()["error"]
    assert error["message"] == "the prompt holds no tokens" and error["code"] is None
    assert httpx.get(f"{url}/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_defaults_of_the_server_and_the_backbone(url):
    """Options go before generation_config, that before OpenAI's; of a request that says it, nothing does."""
    from transformers import GenerationConfig

    sampled = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    assert sampling_defaults(ServeOptions(), sampled) == {"temperature": 0.6, "top_p": 0.95, "top_k": 20.0}
    assert sampling_defaults(ServeOptions(temperature=0.1), sampled)["temperature"] == 0.1
    assert sampling_defaults(ServeOptions(), GenerationConfig()) == sampling_defaults(ServeOptions(), None) == {}
    answers = {said(chat(url, user("Who came in?"), temperature=None)) for _ in range(3)}
    assert answers == {expected(user("Who came in?"))}  # the fixture's server means temperature 0


# ---- silence and clients that leave --------------------------------------------------------------------------------------


def test_nobody_waits_in_silence(url, engine):
    kinds = {"chat/completions": {"messages": user(text_of(30))}, "completions": {"prompt": text_of(30)}}
    for kind, fields in kinds.items():
        for stream in (True, False):
            body = {**fields, "temperature": 0, "max_tokens": 2, "stream": stream}
            said, seen = b": waiting\n\n" if stream else b"\n", b""
            post = httpx.stream("POST", f"{url}/v1/{kind}", json=body, headers=bearer(), timeout=300)
            with held(engine, 1) as goes_on, post as one:
                assert one.status_code == 200
                for piece in one.iter_raw():
                    seen += piece
                    if seen.count(said) >= 2:
                        goes_on.set()
            if stream:
                assert seen.endswith(b"data: [DONE]\n\n")
            else:
                assert json.loads(seen)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("stream", "n"), [(True, 1), (False, 3)])
def test_a_client_that_left_is_noticed(url, engine, stream, n):
    """While its prompt is read, and before: n answers of which some wait."""
    body = json.dumps({"messages": user(text_of(150)), "max_tokens": 64, "stream": stream, "n": n}).encode()
    before = engine.counters.cancelled

    def cancelled() -> list[bool]:
        with engine._changed:
            return [request.cancelled for request in (*engine._admission.active, *engine._admission.queue)]

    with held(engine, 1):
        with sent(url, "/v1/chat/completions", body):
            until(lambda: len(cancelled()) == n)
        until(lambda: all(cancelled()))
    until(lambda: engine.counters.cancelled == before + n)


def test_pages_of_known_origins(engine):
    page = {"origin": "http://localhost:3000", "sec-fetch-site": "cross-site"}
    names = {"method": "POST", "headers": "authorization, content-type"}
    asks = page | {f"access-control-request-{name}": value for name, value in names.items()}
    body = {"messages": user("a"), "max_tokens": 2}
    with serving(engine, keys=()) as url:
        assert httpx.options(f"{url}/v1/chat/completions", headers=asks).status_code == 405
        refused = httpx.post(f"{url}/v1/chat/completions", json=body, headers=page)
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    with serving(engine, keys=(), origins=frozenset({"http://localhost:3000"})) as url:
        before = httpx.options(f"{url}/v1/chat/completions", headers=asks)
        assert before.status_code == 200 and before.headers["access-control-allow-origin"] == page["origin"]
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=page, timeout=300)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page["origin"]
        assert "retry-after" in answer.headers["access-control-expose-headers"]
        other = httpx.post(f"{url}/v1/chat/completions", json=body, headers=page | {"origin": "https://evil.com"})
        assert other.status_code == 403 and "access-control-allow-origin" not in other.headers
        assert httpx.get(f"{url}/v1/models", headers={"host": "evil.com"}).status_code == 403
    with serving(engine, origins=frozenset({"*"})) as url:
        wrong = httpx.get(f"{url}/v1/models", headers={"origin": "https://a.com"})
        assert wrong.status_code == 401 and wrong.headers["access-control-allow-origin"] == "*"
