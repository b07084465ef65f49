"""Calls of tools as models of several families write them, and a reader of them."""

from locret_kit.answers.forms import CALLS, AnswerForm
from locret_kit.answers.reader import Call, Reader

TYPED = {
    "type": "object", "required": ["city"], "$defs": {"Wind": {
        "type": "object", "properties": {"gale": {"type": "boolean"}}, "required": ["gale"], "additionalProperties": False,
    }},
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "limit": {"type": "number"}, "tide": {"type": "boolean"},
        "by": {"type": ["null", "integer"]}, "names": {"type": "array"}, "wind": {"$ref": "#/$defs/Wind"},
        "kind": {"enum": ["a", "b"]},
    },
}  # fmt: skip
VALUES = {"city": '  if a < b:\n    say("ü </b>") ', "days": "3", "limit": "2.5", "tide": "true", "by": "null"}
VALUES["names"] = '["x", 1]'
TYPES = {**VALUES, "days": 3, "limit": 2.5, "tide": True, "by": None, "names": ["x", 1]}
GEMMA = 'call:weather{city:<|"|>' + VALUES["city"] + '<|"|>,days:3,limit:2.5,tide:true,by:null,names:[<|"|>x<|"|>,1]}'


def xml(name: str, values: dict[str, str]) -> str:
    said = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{said}</function>\n</tool_call>"


def pairs(name: str, values: dict[str, str]) -> str:
    said = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{said}</tool_call>"


OWN = {
    "xml": ("<function=", xml("weather", VALUES), xml("now", {}), [
        xml("other", {}), "<tool_call>\n<function=now>", "<tool_call> <function>now</function></tool_call>",
    ], ["<tool_call>\n<function=now>\n<parameter=a>\n1\n</tool_call>", "<function=now>\n<parameter=a>\n1\n"]),
    "pairs": ("<arg_key>", pairs("weather", VALUES), pairs("now", {}), [
        pairs("other", {}), "<tool_call>now\n<arg_key>a</arg_key>\n</tool_call>", "<tool_call>now and then</tool_call>",
    ], ["<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_valu"]),
    "gemma": ("<|tool_call>", f"<|tool_call>{GEMMA}<tool_call|>", "<|tool_call>call:now{}<tool_call|>", [
        "<|tool_call>call:other{}<tool_call|>", "<|tool_call>call:now{",
    ], ['<|tool_call>call:now{a:<|"|>}<tool_call|>', "<|tool_call>call:now{a:[1,2}<tool_call|>"]),
}  # fmt: skip


def reader(form: str, tools, **given) -> Reader:
    """A reader of calls in a form."""
    return Reader(AnswerForm(calls=CALLS[form]), tools, **given)


def read(reader: Reader, text: str, **end) -> tuple[str, list[Call]]:
    """An answer that comes in characters. ``tests/answers/test_families.py``: it is the same in all other pieces."""
    events = [event for letter in text for event in reader.feed(letter)] + reader.end(**end)
    for call in reader.calls:
        assert call.arguments == "".join(one.text for one in events if one.kind == "arguments" and one.call is call)
    return "".join(one.text for one in events if one.kind == "text"), reader.calls
