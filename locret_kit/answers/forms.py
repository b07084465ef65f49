"""Forms of answers: the marks of thoughts, channels and calls, as a tokenizer and its chat template spell them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import regex
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from ..naming import prefixed_errors
from ..text.template import template_source
from .shown import parameters_shown, tags_around
from .values import check_json, nested, python_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAGS = "<tool_call>|<seed:tool_call>|<minimax:tool_call>"
NEVER = "(?!)"
"""A pattern that nothing has."""
PAIR = regex.compile(r"(?P<a>[<\[◁])/(?P<word>(?:\w+:)?(?:think|thought|reason)\w*)(?P<b>[>\]▷])", regex.IGNORECASE)
"""End of a thought; its start is the same without the slash."""
PHRASES = {
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought\n": "<channel|>",
    "Here is my thought process:": "Here is my response:",
}
"""Start and end of thoughts with other marks."""
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
"""Start and end of a thought in answers with channels."""
CALL_LIST = "python-call-list"
"""Transformers' name of Python's calls, in the field of a response template."""
FINAL = "<|channel|>final<|message|>"
"""Start of the text in answers with channels."""
DECLARED = ("thinking", "reasoning_content", "reasoning")
"""Names of thoughts in response templates of transformers."""


@dataclass(frozen=True)
class CallForm:
    """Form of an answer's tool calls.

    Attributes:
        name: of the form. marks: texts in a chat template; one of them shows that the model uses this form.
        open, close: patterns before and after calls.
        head, tail: patterns of a call up to its arguments, with its ``name``, and of the text after them. JSON arguments begin
            with the brace ``args`` of the head. rest: pattern of what is the call's where there is no such text.
        key, end: patterns of the beginning of a parameter, with its ``key``, and of its value's end, where each parameter has
            marks of its own. quotes: whether texts have a ``quote``; other values end with their brackets.
        field: a field of a response template of transformers; it parses calls that are read whole.
        written: a call's text before and after its JSON arguments, with ``{name}``. Of parameters also the beginning of one, with
            ``{key}``, the end of its value, and the text between two.
        row: texts before, between and after calls that stand in a list.
        keys: the names in a JSON object of a name and arguments. json: whether parameters' texts are written as JSON too.
        python: whether values may be written as Python has them. unwritten: why it is not known how calls are written.
        bare: whether JSON that is the whole answer is a call too.
        sections: pattern of marks around calls that are not part of the text.
    """

    name: str
    marks: tuple[str, ...] = ()
    open: str = NEVER
    close: str = NEVER
    head: str = ""
    tail: str = ""
    rest: str = ""
    key: str = ""
    end: str = ""
    quotes: bool = False
    field: Mapping[str, object] | None = None
    bare: bool = False
    sections: str = ""
    written: tuple[str, ...] = ()
    row: tuple[str, str, str] = ("", "", "")
    keys: tuple[str, ...] = ()
    json: bool = False
    python: bool = True
    unwritten: str = ""

    @property
    def text_end(self) -> str:
        """Text after a parameter's value, for values that are texts."""
        return self.written[2] if len(self.written) > 2 and not self.json else ""


NAMED = ("name", "arguments")
QUOTED = r'"(?:[^"\\]|\\.)*+"'


FENCE = r'```(?:json)?\s*(?=\{{1,2}\s*"name"\s*:)'
"""A code block in the place of marks: Qwen2.5-Coder writes its calls so."""


def _json(name: str, mark: str, close: str, *written: str, row: tuple[str, str, str] = ("", "", "")) -> CallForm:
    """Calls of JSON objects with a name, between marks. With two braces, as the template of Qwen2.5-Coder shows them, too."""
    open_, end = regex.escape(mark), "|".join(map(regex.escape, close.split()))
    open_, end = (f"{open_}|{FENCE}", f"{end}|```") if mark == OPEN else (open_, end)
    head = rf'(?:{open_})\s*\{{{{1,2}}\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<args>\{{)'
    more = rf'(?:\s*,\s*{QUOTED}\s*:\s*(?:{QUOTED}|[^\s"{{}}\[\],<]++))*+'  # other fields of the object
    tail = rf"{more}\s*\}}*\s*(?:{end}|(?={open_}))"
    rest = rf"{more}(?:\s*\}})?"
    return CallForm(name, (mark,), open_, end, head, tail, rest, written=written or ("", ""), row=row, keys=NAMED)


KIND = r"\s*(?:<\|constrain\|>)?\s*(?:json)?\s*"
CHANNEL = r"(?:analysis|commentary|final)"
LINE, LINES = r"(?:\n|(?=[^\n])|END)", r"\n?"
"""A line end before and after a parameter's value, where the form has them."""
PYTHON = ("{name}(", "{key}=", "", ", ", ")")
PARAMETER = r"<parameter(?:=| name=)"
DEEPSEEK = [
    f"<\uff5ctool\u2581{word}\uff5c>"
    for word in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
]
FORMS = (
    CallForm(
        "channels", ("<|channel|>",),
        rf" ?to=functions\.[^\s<]+\s*(?=<\|channel\|>)|<\|channel\|>{CHANNEL} to=functions\.", r"<\|call\|>",
        rf"(?: ?to=functions\.(?P<name>[^\s<]+)\s*<\|channel\|>{CHANNEL}|<\|channel\|>{CHANNEL} to=functions\.(?P<name>[^\s<]+))"
        rf"{KIND}<\|message\|>\s*(?P<args>\{{|(?=<\|call\|>))", r"[\s}]*(?:<\|call\|>|<\|end\|>)",
        sections=rf"<\|start\|>assistant|<\|channel\|>{CHANNEL}(?: to=[^\s<]+)?{KIND}<\|message\|>|<\|(?:end|return|call)\|>",
        written=("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", ""),
    ),
    CallForm(
        "xml", ("<function=", "<invoke name="), f"{TAGS}|<function=|<invoke name=", ENDS := f"(?:{TAGS.replace('<', '</')})",
        rf"""(?:(?:{TAGS})\s*)?<(?:function|invoke name)="?(?P<name>[^">\s]+)"?\s*>\s*(?={PARAMETER}|</(?:function|invoke)>)""",
        rf"\s*(?:</(?:function|invoke)>|(?={ENDS}))",
        key=rf"""\s*{PARAMETER}"?(?P<key>[^">\n]+)"?>{LINE}""",
        end=rf"""{LINES}(?:</parameter>(?=\s*(?:{PARAMETER}|</(?:function|invoke)>|{ENDS}\s*(?:{TAGS}|END)|END))"""
        rf"""|(?=\n{PARAMETER}"?(?:KEYS)"?>|</(?:function|invoke)>\s*(?:{ENDS}\s*(?:{TAGS}|END)|END)))""",
        written=(
            "<tool_call>\n<function={name}>\n", "<parameter={key}>\n", "\n</parameter>\n", "", "</function>\n</tool_call>",
        ),
    ),
    CallForm(
        "pairs", ("<arg_key>",), OPEN, CLOSE,
        r"<tool_call>\s*(?P<name>[^\s<{\[]+)\s*(?=<arg_key>[^<]*</arg_key>\s*<arg_value>|</tool_call>)", r"\s*</tool_call>",
        key=r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>",
        end=r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|END))",
        written=("<tool_call>{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n", "", "</tool_call>"),
    ),
    CallForm(
        "gemma", ("<|tool_call>",), r"<\|tool_call>", r"<tool_call\|>", r"<\|tool_call>\s*call:(?P<name>[^\s{]+)\s*\{(?=\s*\S)",
        r"[\s,]*\}", key=r"""[\s,]*(?:"(?P<key>[^"]+)"|<\|"\|>(?P<key>.+?)<\|"\|>|(?P<key>[^\s:,{}"<]+))\s*:\s*"""
        r"""(?:(?P<quote><\|"\|>)|(?=[^<\s]))""",
        end=r'<\|"\|>', quotes=True,
        written=("<|tool_call>call:{name}{", "{key}:", '<|"|>', ",", "}<tool_call|>"),
    ),
    CallForm(
        "deepseek", (DEEPSEEK[2],), DEEPSEEK[2], DEEPSEEK[3],
        rf"{DEEPSEEK[2]}(?:function{DEEPSEEK[4]}(?P<name>[^\s<]+)\s*```json\s*|(?P<name>[^\s<]+){DEEPSEEK[4]}\s*)(?P<args>\{{)",
        rf"[\s}}]*(?:```)?\s*{DEEPSEEK[3]}", sections="|".join(DEEPSEEK[:2]),
        written=(
            f"{DEEPSEEK[0]}{DEEPSEEK[2]}function{DEEPSEEK[4]}{{name}}\n```json\n", f"\n```{DEEPSEEK[3]}{DEEPSEEK[1]}",
        ),
    ),
    CallForm(
        "kimi", ("<|tool_call_begin|>",), r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>",
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*"
        r"(?P<args>\{|(?=<\|tool_call_end\|>))", r"[\s}]*<\|tool_call_end\|>",
        sections=r"<\|tool_calls_section_begin\|>|<\|tool_calls_section_end\|>",
        written=(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ),
    CallForm(
        "python", ("<|tool_call_start|>", "<|tool_list_start|>"), r"<\|tool_call_start\|>", r"<\|tool_call_end\|>",
        json=True, written=PYTHON, row=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    ),
    _json("toolcall", "<TOOLCALL>", "</TOOLCALL>", row=("<TOOLCALL>[", ", ", "]</TOOLCALL>")),
    _json("piped", "<|tool_call|>", "<|/tool_call|>", row=("<|tool_call|>[", ", ", "]")),
    _json("tags", OPEN, CLOSE, f"{OPEN}\n", f"\n{CLOSE}"),
    CallForm(
        "list", ("[TOOL_CALLS]",), r"\[TOOL_CALLS\]", head=r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\](?P<id>\w+))?"
        r"(?:\[ARGS\])?\s*(?P<args>\{)", bare=True,
        written=("", ""), row=("[", ", ", "]"), keys=NAMED,
    ),
    CallForm(
        "object", ('"parameters"', "<|python_tag|>"), r"<\|python_tag\|>", bare=True, written=("", ""),
        keys=("name", "parameters"),
    ),
)  # fmt: skip
CALLS = {form.name: form for form in FORMS}
TOLD = CALLS["tags"]
"""The form of calls of a model whose template has no tools, and is told of them in words."""
UNKNOWN = replace(CALLS["object"], name="unknown", marks=(), open=NEVER)


@dataclass(frozen=True)
class AnswerForm:
    """Marks in a model's answers.

    Attributes:
        open, close: patterns of the marks around a thought. calls: form of tool calls.
        anywhere: whether a thought may start within the text, not only before it.
        words: literal start and end of a thought, where they are known. around: names of tags around the text.
    """

    open: str = NEVER
    close: str = NEVER
    calls: CallForm = TOLD
    anywhere: bool = False
    words: tuple[str, str] | None = None
    around: tuple[str, ...] = ()

    @property
    def thinks(self) -> bool:
        """Whether there are marks of thoughts."""
        return self.open != NEVER

    @property
    def marks(self) -> str:
        """A text that contains every token that is a mark."""
        return " ".join([str(self).replace("\\", ""), *(f"<{name}></{name}>" for name in self.around)])

    @property
    def places(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Texts before and after an answer's own text: none, or a channel's or a tag's."""
        channel = [((FINAL,), ())] if self.anywhere else []
        return [((), ()), *channel, *(((f"<{name}>\n",), (f"\n</{name}>",)) for name in self.around)]

    def opened(self, prompt: str, *, continued: bool = False) -> bool:
        """Whether a prompt ends with the start of a thought. If its answer is ``continued``, whether it ends within a thought."""
        *_, at = [0, *(found.end() for found in regex.finditer(self.open, prompt))]
        rest = prompt[at:]
        return bool(at) and not regex.search(self.close, rest) and (continued or not rest.strip())


def response_field(tokenizer: PreTrainedTokenizerBase, *names: str) -> tuple[Mapping[str, object], Any] | None:
    """A field of a tokenizer's own ``response_template``, as it is and loaded; None where there is none.

    Raises:
        ValueError: this transformers cannot read it.
    """
    fields: Any = getattr(tokenizer, "response_template", None)
    for name in names:
        with suppress(LookupError, TypeError, AttributeError):
            field: Any = fields["fields"][name]
            shown = {**field, "content": "json"} if field.get("content") == CALL_LIST else field
            with prefixed_errors(f"the tokenizer's response_template, field {name!r}", ValueError):
                loaded = load_response_template({"start_anchor": "<", "fields": {name: shown}}).fields[name]
            if loaded.open_re is not None:
                return field, loaded
    return None


def call_form(template: str, tokenizer: PreTrainedTokenizerBase | None = None) -> CallForm:
    """Form of the calls of a model with this chat template, and with the tokenizer's marks; ``UNKNOWN`` where none is known."""
    if "tools" not in template:
        return TOLD
    known = next((form for form in FORMS if any(mark in template for mark in form.marks)), UNKNOWN)
    declared = None if tokenizer is None or (known.head and not known.bare) else response_field(tokenizer, "tool_calls")
    if declared is not None:
        field, loaded = declared
        close = NEVER if loaded.close_re is None else loaded.close_re.pattern
        return writing(CallForm("declared", (), loaded.open_re.pattern, close, field=field), field)
    if known == UNKNOWN and tokenizer is not None:  # the template names no mark
        added = tokenizer.get_added_vocab()
        marked = (form for form in FORMS if any(mark in added for mark in form.marks))
        return next((replace(form, bare=True) for form in marked), UNKNOWN)
    return known


def block_calls(form: CallForm, text: str) -> list[Any]:
    """Names and arguments of the calls that a text is without the marks around it; none where it cannot be read. A form with a
    field reads all of the text."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        python = form.name == "python" and not regex.match(r"\[\s*\{", text)
        made = (
            python_calls(text) if python else json.loads(text) if form.field is None else parsed(form, form.field, text)
        )
        check_json(made)
        rows = made if isinstance(made, list) else [made]
        found = [call for row in rows for call in (row if isinstance(row, list) else [row])]
        found = [inner if isinstance(inner := nested(call, "function"), dict) else call for call in found]
        return found if all(isinstance(one, dict) for one in found) else []
    return []


def parsed(form: CallForm, field: Mapping[str, object], text: str) -> object:
    """The value of a response template's field. Raises ValueError, LookupError, TypeError."""
    if field.get("content") == CALL_LIST:  # not in every release, and without integers beyond 2^53
        begin = regex.match(form.open, text)
        start, stop = 0 if begin is None else begin.end(), text.rindex("]") + 1
        text = text[:start] + json.dumps(python_calls(text[start:stop])) + text[stop:]
        field = {**field, "content": "json"}
    return parse_response(text, {"start_anchor": "<", "fields": {"tool_calls": field}}, prefix="")["tool_calls"]


def example(form: CallForm, name: str, keys: Iterable[str]) -> str:
    """A call in a form, each of its arguments the text "v"."""
    before, after = around_arguments(form, name)
    if len(form.written) == 2:
        said = json.dumps(dict.fromkeys(keys, "v"))
    else:
        _, begin, end, between, _ = form.written
        value = ('"v"' if form.json else end * form.quotes + "v") + end
        said = between.join(begin.replace("{key}", spelt_key(form, key)) + value for key in keys)
    return "".join([form.row[0], *before, said, after, form.row[2]])


def spelt_key(form: CallForm, key: str) -> str:
    """A parameter's name as a form writes it: where texts have quotes, a name that is no word has some too."""
    return json.dumps(key, ensure_ascii=False) if form.quotes and not regex.fullmatch(r"\w+", key) else key


def around_arguments(form: CallForm, name: str) -> tuple[list[str], str]:
    """Text before a call's arguments, each piece one of JSON's tokens, and text after them."""
    before, after = form.written[0].replace("{name}", name), form.written[-1]
    if not form.keys:
        return [before], after
    first, second = map(json.dumps, form.keys)
    return [before, "{", first, ": ", json.dumps(name, ensure_ascii=False), ", ", second, ": "], f"}}{after}"


def writes(form: CallForm, name: str, keys: Iterable[str]) -> bool:
    """Whether a call of these names is read as it is written, in a form of calls that are read whole."""
    wanted, said = [{"name": name, "arguments": dict.fromkeys(keys, "v")}], example(form, name, keys)
    if form.field is None:  # in brackets, between marks
        said = said[said.index("[") : said.rindex("]") + 1] if form.name == "python" else ""
    return not said or block_calls(form, said) == wanted


def literal(field: Mapping[str, Any], side: str) -> str:
    """The text of a field's mark, with {names} for what its pattern names."""
    texts = field.get(side)
    return texts[0] if isinstance(texts, list) else texts or literal_of(field.get(f"{side}_pattern", ""))


def literal_of(pattern: object) -> str:
    """The text that a pattern stands for, with {names} for its groups."""
    text = regex.sub(r"\(\?P<(\w+)>(?:\[(?:\\.|[^\]])*\]|\\.|[^()\\])*\)|\(\?=.*\)", r"{\1}", str(pattern))
    return regex.sub(r"\\(.)", r"\1", regex.sub(r"\\s[*+?]?|{}", "", text).replace(r"\n", "\n"))


def writing(form: CallForm, field: Mapping[str, Any]) -> CallForm:
    """A declared form with what is written of it, where its field's marks are each one text."""
    kind, given = str(field.get("content", "text")), field.get("content_args", {})
    first, last = (literal(field, side) for side in ("open", "close"))
    function = nested(field, "transform", "function")
    keys = NAMED if isinstance(function, str) else tuple(str(nested(function, key))[9:-1] for key in NAMED)
    begin, _, end = literal_of(given.get("tag_pattern")).partition("{value}")
    written = {
        "json": (first, last),
        "kv-lines": (first, "{key}" + given.get("kv_sep", ":"), given.get("line_sep", "\n"), "", last),
        "python-call-list": PYTHON,
    }.get(kind, (first, begin, end, "", last))
    row = (f"{first}[", ", ", f"]{last}") if written is PYTHON else form.row
    form = replace(form, written=written, row=row, keys=keys if kind == "json" and "{name}" not in first else ())
    for made in (form, replace(form, json=True)):
        if writes(made, "n", "k"):
            return made
    marks = ", ".join(repr(str(given)) for name, given in field.items() if name.startswith(("open", "close")))
    why = f"of this tokenizer's calls, {kind} with the marks {marks}, no text can be made by which they are parsed"
    return replace(form, written=(), unwritten=why)


def answer_form(tokenizer: PreTrainedTokenizerBase, *, tools: bool = False) -> AnswerForm:
    """Marks of thoughts and calls of a tokenizer's model, from its chat template, response template and added tokens.

    Args:
        tools: whether the prompt has tools. Some tokenizers have a separate template for them.
    """
    template = template_source(tokenizer, tools=tools)
    return _answer_form(tokenizer, template, len(tokenizer))


@lru_cache(maxsize=8)
def _answer_form(tokenizer: PreTrainedTokenizerBase, template: str, size: int) -> AnswerForm:
    added = tokenizer.get_added_vocab()
    words = "\n".join([template, *added])
    calls = call_form(template, tokenizer)
    ends = rf"(?:{calls.tail})?\s*(?:{calls.close})?"
    if calls.key and not calls.quotes and (known := parameters_shown(tokenizer, calls.head, ends)):
        written, python = known  # as the template writes words, line ends and values
        key = calls.key if written[1].endswith("\n") else calls.key.replace(LINE, "")
        end = calls.end if written[2].startswith("\n") else calls.end.removeprefix(LINES)
        calls = replace(calls, written=written, python=python, key=key, end=end)
    if calls.name == "list" and "[ARGS]" in added:
        calls = replace(calls, written=("[TOOL_CALLS]{name}[ARGS]", ""), row=("", "", ""), keys=())
    if "<|channel|>" in words and "<|message|>" in words:
        open_ = rf"<\|channel\|>analysis(?! to=functions){KIND}<\|message\|>"
        return AnswerForm(open_, r"<\|end\|>|<\|return\|>|<\|call\|>", CALLS["channels"], True, ANALYSIS)
    around = tags_around(tokenizer, template)
    if thought := response_field(tokenizer, *DECLARED):
        given, field = thought
        marks = literal(given, "open"), literal(given, "close")
        close = NEVER if field.close_re is None else field.close_re.pattern
        alike = regex.fullmatch(field.open_re.pattern, marks[0]) and regex.fullmatch(close, marks[1])
        return AnswerForm(field.open_re.pattern, close, calls, words=marks if alike else None, around=around)
    pairs = {f"{found['a']}{found['word']}{found['b']}": found[0] for found in PAIR.finditer(words)}
    pairs |= {open_: close for open_, close in PHRASES.items() if open_.strip() in words}
    if not pairs:
        return AnswerForm(calls=calls, around=around)
    open_, close = ("|".join(map(regex.escape, marks)) for marks in (pairs, pairs.values()))
    return AnswerForm(open_, close, calls, words=next(iter(pairs.items())), around=around)
