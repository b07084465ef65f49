"""Histories that a strict template refuses, by its known repairs; and what a body names as left out."""

from __future__ import annotations

import json

import httpx
import pytest
from http_bodies import NOW, bearer, chat, user
from served import serving
from strict_templates import tokenizer_of

from locret_kit.serving.anthropic_messages import CountBody
from locret_kit.serving.bodies import ChatBody
from locret_kit.serving.responses import ResponsesBody

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
    "{% endfor %}{# tools #}"
)


def prompt(template: str, messages: list[dict], kind=ChatBody, **more) -> str:
    tokenizer = tokenizer_of(template)
    field = "input" if kind is ResponsesBody else "messages"
    return tokenizer.decode(kind.model_validate({field: messages, **more}).ids(tokenizer, None)[0])


def system(text: str, role: str = "system") -> dict:
    return {"role": role, "content": text}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def call(arguments: object, id: object = "c1", content: object = "", **more) -> dict:
    function = {"name": "depth", "arguments": arguments}
    calls = [{"type": "function", "id": id, "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def result(text: str, id: str | None = "c1") -> dict:
    return {"role": "tool", "tool_call_id": id, "content": text}


(ASK,), (GO,) = user("Ask."), user("Go.")
SPOILED = ('{"zone": "U', '"UTC"', "UTC, please", "3", "[1]")
NOTHING = ("null", "[]", "", "  ", None)


@pytest.mark.parametrize("template", ["MISTRAL", "GPT_OSS", "LLAMA31", PLAIN])
def test_what_a_template_takes_is_unchanged(template):
    """By transformers itself. None of these has a fault for its template."""
    messages = [system("Be brief."), ASK, call({"a": 1}, "abcdefghi"), result("7 m", "abcdefghi"), said("7 m"), GO]
    if template == PLAIN:
        more = [system("B"), call("spoiled"), result("x", None), GO, GO, system("C"), said(""), GO]
        messages = [said(""), *messages, *more]
    messages = [{"content": "", **{k: v for k, v in one.items() if v is not None}} for one in messages]
    want = tokenizer_of(template).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt(template, messages) == want


@pytest.mark.parametrize("spoiled", [*SPOILED, *NOTHING], ids=str)
@pytest.mark.parametrize("kind", [ChatBody, ResponsesBody])
def test_spoiled_arguments(spoiled, kind):
    """Of a template that walks through them: the text under one name, or none."""
    history = [ASK, call(spoiled), result("bad"), GO]
    if kind is ResponsesBody:
        one = {"type": "function_call", "call_id": "c1", "name": "depth", "arguments": spoiled}
        history = [ASK, one, {"type": "function_call_output", "call_id": "c1", "output": "bad"}, GO]
    text = prompt("QWEN35", history, kind)
    value = spoiled if spoiled in SPOILED[:1] + SPOILED[2:3] else str(spoiled).strip('"')
    inner = "" if spoiled in NOTHING else f"<parameter=arguments>\n{value}\n</parameter>\n"
    assert f"<function=depth>\n{inner}</function>" in text and "bad" in text and "Go." in text


def test_arguments_that_a_template_writes_as_texts():
    text = prompt("DEEPSEEK", [ASK, call({"city": "Kiel"}), result("7 m"), GO])
    assert '<|call|>depth\n```json\n{"city": "Kiel"}\n```<|tool|>7 m<|User|>Go.' in text
    assert "```json\nhalf {\n```" in prompt("DEEPSEEK", [ASK, call("half {"), result("7 m"), GO])


@pytest.mark.parametrize("id", ["call_abcdef0123456789", "toolu_01AbC", "functions.depth:0", "", None, "ä" * 9])
def test_identifiers_of_other_servers(id):
    """Nine letters and digits for Mistral's; calls and results have the same, and each turn the same again."""
    begun, turns = [ASK, call({}, id), result("7 m", id)], ([said("7.")], [said("8."), ASK, said("")])
    texts = [prompt("MISTRAL", [*begun, *more, GO]) for more in turns]
    for text in texts:
        first = text.split('"id": "')[1].split('"')[0]
        assert len(first) == 9 and first.isalnum() and f'"call_id": "{first}"' in text
    one, other = (text.split("[TOOL_RESULTS]")[0].split("[INST]")[1:] for text in texts)
    assert one == other
    own = [ASK, call({}, "a" * 9), result("1", "a" * 9)]
    two = prompt("MISTRAL", [*own, call({}, "x"), result("2", "x"), said("3"), GO])
    assert '"call_id": "aaaaaaaaa"' in two and two.count("[TOOL_RESULTS]") == 2, "its own stay"


def test_system_messages():
    """Those in a row are one; a later one stays where it is, as a user's; where there is none, it stands before the question."""
    history = [system("A"), system("B", "developer"), ASK, said("Yes?"), system("C"), GO]
    head, tail = prompt("QWEN35", history).split("<|im_start|>user\nAsk.")
    assert head == "<|im_start|>system\nA\n\nB<|im_end|>\n"
    assert "<|im_start|>user\nC<|im_end|>\n<|im_start|>user\nGo." in tail
    assert prompt("GEMMA", history).startswith("<start_of_turn>user\nA\n\nB\n\nAsk.<end_of_turn>")
    assert "<start_of_turn>user\nC\n\nGo.<end_of_turn>" in prompt("GEMMA", history)
    assert prompt("DEEPSEEK", history).startswith("A\n\nB<|User|>Ask."), "it shows the last alone"
    for template in ("QWEN35", "GEMMA"):
        assert "user\nA" in prompt(template, [system("A")])
    trailing = [system("A"), ASK, system("B")]
    assert "[INST] A\n\nAsk.\n\nB[/INST]" in prompt("MISTRAL", trailing)
    silent = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert prompt(silent, trailing) == "[user]A\n\nAsk.[user]B", "a template that leaves them out"


def test_turns_alternate():
    """Neighbours of one role are one, a text after a result stands in it, empty messages go."""
    model, end = "<start_of_turn>model\n", "<end_of_turn>\n"
    for history, want in [
        ([ASK, GO, said("1"), said("2"), GO], f"user\nAsk.\n\nGo.{end}{model}1\n\n2{end}<start_of_turn>user\nGo."),
        ([said("Hello."), GO], f"<start_of_turn>user\n{end}{model}Hello.{end}"),
        ([system("A"), said("Hello."), GO], f"<start_of_turn>user\nA{end}{model}Hello.{end}"),
    ]:
        assert want in prompt("GEMMA", history), history
    mixed = [ASK, call({"a": 1}), result("7"), GO, said("Yes."), GO]
    assert '{"content": "7\\n\\nGo.", "call_id"' in prompt("MISTRAL", mixed)
    full = "{% for m in messages %}{{ raise_exception('empty') if not m.content }}[{{ m.role }}]{{ m.content }}{% endfor %}"
    spoken = prompt(full, [ASK, said(""), GO, said("1"), user("")[0], said(" "), GO])
    assert spoken == "[user]Ask.[user]Go.[assistant]1[user]Go."
    begun = prompt("GEMMA", [ASK, GO, said("It is")])
    assert begun.endswith(f"user\nAsk.\n\nGo.{end}{model}It is"), "an answer is continued"


def test_several_calls_and_texts_beside_calls():
    """Each call with its result, for templates that show or take one."""
    two = call({"a": 1}, "x", "I look.", reasoning_content="Hm.")
    two["tool_calls"] += call({"b": 2}, "y")["tool_calls"]
    history = [ASK, two, result("1 m", "x"), result("2 m", "y"), GO]
    text = prompt("GPT_OSS", history)
    places = [text.index(one) for one in ("I look.", "Hm.", '{"a": 1}', "1 m", '{"b": 2}', "2 m", "Go.")]
    assert places == sorted(places) and text.count("<|call|>") == 2
    text = prompt("LLAMA31", history)
    assert text.index('{"a": 1}') < text.index("1 m") < text.index('{"b": 2}') < text.index("2 m") and "I look." in text


def test_results_without_calls_and_calls_without_results():
    text = prompt("GPT_OSS", [result("lost"), GO])
    assert "<|start|>user<|message|><tool_response>\nlost\n</tool_response>" in text
    text = prompt("MISTRAL", [ASK, call({"a": 1}), GO])
    for part in ("[/INST] <tool_call>", '{"name": "depth", "arguments": {"a": 1}}', "[INST] Go.[/INST]"):
        assert part in text


def test_older_and_other_calls():
    """One call alone, as before there were several; and of a tool whose argument is a text."""
    old = {"role": "assistant", "content": None, "function_call": {"name": "depth", "arguments": '{"a": 1}'}}
    patch = {"id": "x", "type": "custom", "custom": {"name": "patch", "input": "+1"}}
    custom, seven = {"role": "assistant", "tool_calls": [patch]}, {"role": "function", "name": "depth", "content": "7"}
    text = prompt(PLAIN, [ASK, old, seven, custom, result("done", "x"), GO])
    assert '"name": "depth", "arguments": {"a": 1}' in text and '"name": "patch", "arguments": {"input": "+1"}' in text
    assert "[tool]7" in text and prompt(PLAIN, [{"role": "tool", "content": None}, GO]) == "[tool][user]Go."
    assert prompt(PLAIN, [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]) == "[user]ab"


NO = "{% for m in messages %}{% if 'no' in m.content %}{{ raise_exception('not this') }}{% endif %}{{ m.content }}{% endfor %}"


def test_what_cannot_be_repaired_is_named():
    """By its index in the client's body and its role."""
    for kind, history, place in [
        (ChatBody, [ASK, said("yes"), *user("no"), said("yes"), GO], "messages.2 (user)"),
        (ChatBody, [ASK, system("no"), GO], "messages.1 "), (ChatBody, [ASK, said("no"), GO], "messages.1 (assistant)"),
        (CountBody, [ASK, {"role": "assistant", "content": [{"type": "text", "text": "no"}]}, GO], "messages.1 (assistant)"),
        (ResponsesBody, [ASK, {"type": "reasoning", "summary": []}, said("no"), GO], "input.2 (assistant)"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="refuses the conversation: not this") as refused:
            prompt(NO, history, kind)
        assert str(refused.value).startswith(place), refused.value


BODIES = [
    ("messages", {"messages": [ASK, {"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "messages.1.content: "),
    ("messages", {"messages": [ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}], "max_tokens": 1},
     "messages.1.tool_calls.0: "),
    ("messages", {"messages": [ASK, 5], "max_tokens": 1}, "messages.1: "),
    ("responses", {"input": [ASK, {"type": "function_call", "call_id": "x"}]}, "input.1.tool_calls.0: "),
    ("responses", {"input": [ASK, {"role": "friend", "content": "x"}]}, "input.1.role: "),
    ("chat/completions", {"messages": [ASK, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages.1.content: "),
]  # fmt: skip


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine, defaults={"temperature": 0.0}) as address:
        yield address


def post(url: str, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=body, headers=bearer(), timeout=300)


@pytest.mark.parametrize(("path", "body", "place"), BODIES, ids=str)
def test_a_wrong_message_is_named(url, path, body, place):
    answer = post(url, path, **body)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(place), answer.text


@pytest.mark.parametrize("content", ["3", "", [{"type": "text", "text": "3"}], None])
def test_a_tools_failure_reaches_the_model(content):
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "count", "input": {}}]}
    texts = []
    for failed in (False, None, True):
        block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": failed}
        texts.append(prompt(PLAIN, [ASK, use, {"role": "user", "content": [block]}], CountBody))
    assert texts[0] == texts[1] != texts[2] and "[tool]The tool failed:\n" in texts[2]
    assert texts[2].replace("The tool failed:\n", "") == texts[0]


LINE = "x-anthropic-billing-header: cc_version=2.1.280.{0}; cc_entrypoint=cli; cch={0}f3c;"


@pytest.mark.parametrize("after", ["", "\n", "\n\n"])
def test_the_line_before_a_system_prompt_that_changes(after):
    """As a block, at the beginning of one, of a text, by each protocol; another text that begins so stays."""
    for kind, field in ((CountBody, "system"), (ResponsesBody, "instructions"), (ChatBody, None)):
        texts = set()
        for number in range(3):
            line = LINE.format(f"a{number}") + after
            for given in (line + "Be brief.", [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}]):
                more = {field: given} if field else {}
                texts.add(prompt(PLAIN, [*([] if field else [system(given)]), ASK], kind, **more))
        assert texts == {"[system]Be brief.[user]Ask."}
    assert "[system]About x-anthropic" in prompt(PLAIN, [system(f"About {LINE}"), ASK])
    assert LINE in prompt(PLAIN, [system("Be brief."), *user(LINE)])


# ---- tools of other types, formats, temperatures -----------------------------------------------------------------------------

OTHERS = [
    {"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
    {"type": "namespace", "name": "mcp", "tools": []}, {"type": "local_shell"}, {"type": "mcp", "server_label": "x"},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, {"type": "bash_20250124", "name": "bash"},
    {"type": "custom", "custom": {"name": "apply_patch"}},
]  # fmt: skip
OWN = {
    "chat/completions": NOW, "responses": {"type": "function", "name": "now"},
    "messages": {"name": "now", "input_schema": {"type": "object"}},
}  # fmt: skip


@pytest.mark.parametrize("path", OWN)
def test_tools_of_other_types_are_left_out(url, path, caplog):
    given = {"messages": [ASK], "input": [ASK], "max_tokens": 2, "max_output_tokens": 2}
    want = post(url, path, **given, tools=[OWN[path]])
    assert want.status_code == 200 and "x-left-out" not in want.headers
    answer = post(url, path, **given, tools=[*OTHERS, OWN[path], *OTHERS])
    assert answer.status_code == 200, answer.text
    said = ", ".join(sorted({f"tool {other['type']}" for other in OTHERS}))
    assert answer.headers["x-left-out"] == said and f"left out of a request: {said}\n" in caplog.text
    usages = (one.json()["usage"] for one in (answer, want))
    used, alone = (usage.get("prompt_tokens") or usage["input_tokens"] for usage in usages)
    assert used == alone or path == "messages", "cached tokens are no input there"
    left = post(url, path, **given, tools=[{"type": "a\r\nx-evil: 1"}]).headers
    assert "x-evil" not in left and left["x-left-out"] == "tool a??x-evil: 1"


@pytest.mark.parametrize("choice", [
    {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "custom", "custom": {"name": "apply_patch"}},
    {"type": "function", "name": "apply_patch"},
])  # fmt: skip
def test_a_forced_tool_of_another_type_is_refused(choice):
    tools = [NOW, *OTHERS]
    for kind, given, chosen, words in (
        (ChatBody, tools, choice, "tool_choice names '.*', which is of a type that is not supported"),
        (ChatBody, OTHERS, "required", "tool_choice needs tools"),
        (CountBody, OTHERS[5:6], {"type": "tool", "name": "web_search"}, "not supported"),
    ):
        with pytest.raises(ValueError, match=words):
            kind.model_validate({"messages": [ASK], "tools": given, "tool_choice": chosen})
    some = [{"type": "function", "name": "now"}, {"type": "web_search"}]
    named = {"type": "allowed_tools", "mode": "required", "tools": some}
    assert ChatBody.model_validate({"messages": [ASK], "tools": tools, "tool_choice": named}).called == ["now"]


def test_items_of_other_tools():
    """Calls that the client answers are calls; what ran elsewhere is left out."""
    items = [
        ASK, {"type": "web_search_call", "status": "completed", "action": {"type": "search"}}, {"type": "mcp_list_tools"},
        {"type": "custom_tool_call", "call_id": "p", "name": "apply_patch", "input": "+1"},
        {"type": "custom_tool_call_output", "call_id": "p", "output": [{"type": "input_text", "text": "patched"}]},
        {"type": "local_shell_call", "call_id": "s", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "s", "output": "a.py"},
        {"type": "shell_call", "call_id": "t", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "t", "output": [{"stdout": "/root"}]}, GO,
    ]  # fmt: skip
    text = prompt(PLAIN, items, ResponsesBody)
    parts = "[tool]patched", '"command": ["ls"]', "[tool]a.py", "/root", "pwd"
    for part in ('"apply_patch", "arguments": {"input": "+1"}', *parts):
        assert part in text
    assert ResponsesBody.model_validate({"input": items}).left_out == ["item mcp_list_tools", "item web_search_call"]
    blocks = [
        {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}, {"type": "text", "text": "It rains."},
        {"type": "web_search_tool_result", "tool_use_id": "x", "content": []},
    ]  # fmt: skip
    history = [ASK, {"role": "assistant", "content": blocks}, GO]
    assert prompt(PLAIN, history, CountBody) == "[user]Ask.[assistant]It rains.[user]Go."


def test_unknown_formats_are_notes(url, caplog):
    """In schemas of answers and of tools, at any depth; a property that has the name of a word is none."""
    for name in ("password", "x y\n\u00fc", "date"):
        text = {"type": "string", "format": name, "maxLength": 3}
        schema = {
            "type": "object", "required": ["format"], "additionalProperties": False, "properties": {
                "format": text, "enum": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
                "const": {"type": "array", "items": text},
            }, "$defs": {"a": text},
        }  # fmt: skip
        if known := name == "date":
            schema = json.loads(json.dumps(schema).replace(', "maxLength": 3', ""))
        asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
        function = {"name": "f", "parameters": schema}
        for fields in (asked, {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}):
            answer = chat(url, [ASK], max_tokens=2, **fields)
            assert answer.status_code == 200, answer.text
            assert ("x-left-out" in answer.headers) is not known
            assert known or answer.headers["x-left-out"] == "format " + name.replace("\n", "?").replace("\u00fc", "?")
    assert "format password" in caplog.text
    example = {"properties": {"a": {"const": {"format": "path"}}}, "required": ["a"], "type": "object"}
    example["additionalProperties"] = False
    wanted = {"type": "json_schema", "json_schema": {"schema": example}}
    answer = chat(url, [ASK], max_tokens=64, response_format=wanted)
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": {"format": "path"}}


@pytest.mark.parametrize(("schema", "words"), [
    ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'), ({"not": {}}, 'keys: ["not"]'),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, 'keys: ["propertyNames"]'),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
     "pattern '^(?!^[-+.]*$)[+-]?0*[0-9]*\\\\.?[0-9]*$': look-around"),
    ({"type": "string", "pattern": "("}, "pattern '(': unclosed"),
    ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}, "max is 2000"),
])  # fmt: skip
def test_schemas_that_are_not_followed_say_why(url, schema, words):
    answer = chat(url, [ASK], response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("the schema cannot be followed: ") and words in message


@pytest.mark.parametrize(("path", "place"), [
    ("chat/completions", ("choices", 0, "message", "content")), ("completions", ("choices", 0, "text")),
    ("messages", ("content", 0, "text")), ("responses", ("output", 0, "content", 0, "text")),
])  # fmt: skip
def test_nearly_no_temperature_is_greedy(url, path, place):
    def answer(temperature: float) -> str:
        asked = {"prompt": "Ask."} if path == "completions" else {"messages": [ASK], "input": "Ask."}
        value = post(url, path, **asked, max_tokens=6, max_output_tokens=6, temperature=temperature).json()
        for name in place:
            value = value[name]
        return value

    assert {answer(temperature) for temperature in (9.9e-4, 1e-40, 5e-324)} == {answer(0)}
