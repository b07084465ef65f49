"""Chat templates: the text of a conversation, and the template's text around a message.

To separate a message from the text around it, the conversation is rendered with a marker in its place that no text
contains. Only the template may write control tokens. Others in its output are marked (``text.untrusted``).
"""

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from typing import cast

from jinja2 import TemplateError

from ..naming import first_line
from ..settings import read_protect
from .sandbox import checked_arguments, compiled, limited_steps
from .tokens import encode, stream_ids, token_span
from .untrusted import FIRST, OWN, Span, Traced, controls, defused, defused_pieces, traced

Objects = Sequence[Mapping[str, object]]
"""Messages, or tools, as chat templates have them."""
DEFAULTS = "template_arguments"
"""Attribute of a tokenizer that holds its template's arguments, for callers that give no others."""
ROLES = {"system", "developer", "user", "assistant", "tool", "function", "observation", "ipython"}
"""Roles that templates write as control tokens, such as ``<|user|>``."""
REFUSALS = (TemplateError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of templates that refuse a conversation."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thought."""


class Refusal(ValueError):
    """A chat template refuses a conversation."""


def render_prompt(tokenizer, question: str, *, chat: bool = True) -> tuple[str, str]:
    """The text before and after a long document, so that `before + document + after` is the prompt.

    The document comes first, then a blank line, then the question. With `chat` the prompt is the chat template's
    rendering of one user message, with generation prompt; without a template, "{document}\\n\\n{question}\\n".
    `chat=False` gives ("", "\\n\\n" + question): nothing is added, so an answer prefix may end the question.

    Raises:
        ValueError: if the template does not show the message exactly once.
    """
    if not chat:
        return "", f"\n\n{question}"
    return render_messages(tokenizer, [{"role": "user", "content": question}], about=True)


def prompt_ids(tokenizer, text: Iterable[str], question: str | None, *, chat: bool = True) -> array:
    """Token ids of a text, with or without a question after it. With the chat template, no control token forms in text or
    question."""
    special = True
    if question is not None:
        before, after = render_prompt(tokenizer, question, chat=chat)
        text = chain([before], defused_pieces(tokenizer, text, before) if chat else text, [after])
        special = not (chat and has_template(tokenizer))
    return stream_ids(tokenizer, text, special=special)


def message_ids(tokenizer, messages: Objects) -> array:
    """Token ids of a conversation up to its next answer. Raises ValueError as ``render_messages`` does."""
    return stream_ids(tokenizer, render_messages(tokenizer, messages), special=not has_template(tokenizer))


def protected_spans(tokenizer, ids: Sequence[int], protect: str | None, system: str | None = None) -> list[Span]:
    """Token spans of a prompt that ``protect`` names (see ``RunSettings``), except 'first': the system prompt (the
    template's or the given one), and all of the template's text around a user's message, including the generation
    prompt.

    A token that spans template and message belongs to the message. The first words of an answer may follow the
    template.

    Args:
        ids: a single user message in the chat template (see `render_prompt`), with generation prompt.

    Raises:
        ValueError: an unknown name, a slow tokenizer, or a template that does not show the message exactly once.
    """
    names = read_protect(protect) - {"first"}
    if not names or not has_template(tokenizer):
        return []
    marker = _marker([system or ""])
    before, after = _split(render_first(tokenizer, marker, system), marker, "the message")
    tokens, offsets = encode(tokenizer, before)
    head, tail = spans_around(ids, tokens, encode(tokenizer, after)[0])
    start, end = token_span(offsets[: head[1]], *_system_span(tokenizer, before), inner=True)
    spans = [(start, end)] if "system" in names else []
    if "markers" in names:
        spans += [(0, start), (end, head[1]), tail]
    return [(a, b) for a, b in spans if a < b]


def spans_around(ids: Sequence[int], head: list[int], tail: list[int]) -> tuple[Span, Span]:
    """Token spans of the template's text around a message: as much of ``head`` as ``ids`` begin with, and the last stretch that
    equals ``tail``, empty where there is none."""
    same = next((i for i, (a, b) in enumerate(zip(head, ids, strict=False)) if a != b), min(len(head), len(ids)))
    # Where the message's end and the template make one token, the rest of the template follows it.
    return (0, same), _last_occurrence(ids, tail) or _last_occurrence(ids, tail[1:]) or (0, 0)


def _system_span(tokenizer, before: str) -> Span:
    """Half-open character span of the system prompt in the rendering ``before`` a user's message; empty where there is none."""
    user = {"role": "user", "content": "U"}
    try:
        head, tail = around_message(tokenizer, [{"role": "system", "content": "S"}, user], 0)
    except ValueError:  # a template that takes no system message, and so shows none
        return 0, 0
    tail = tail[: len(tail) - len(around_message(tokenizer, [user], 0)[1])].removesuffix("U")
    fits = len(head) + len(tail) <= len(before) and before.startswith(head) and before.endswith(tail)
    return (len(head), len(before) - len(tail)) if fits else (0, 0)


def _last_occurrence(ids: Sequence[int], part: list[int]) -> Span | None:
    """Span of the last stretch of ``ids`` that equals ``part``; None where there is none."""
    n = len(part)
    starts = range(len(ids) - n, -1, -1) if n else ()
    return next(((i, i + n) for i in starts if list(ids[i : i + n]) == part), None)


def render_first(tokenizer, question: str, system: str | None = None) -> str:
    """The text of a conversation up to its first answer.

    Raises:
        ValueError: if the template refuses the conversation, as some do with a system prompt.
    """
    if not has_template(tokenizer):
        return defused(tokenizer, (f"{system}\n\n" if system else "") + f"{question}\n")
    messages = [{"role": "system", "content": system}] if system else []
    return render(tokenizer, [*messages, {"role": "user", "content": question}], generation=True)


def render_messages(
    tokenizer,
    messages: Objects,
    *,
    about: bool = False,
    tools: Objects = (),
    continued: bool = False,
    arguments: Mapping[str, object] | None = None,
    by: Callable[..., str] | None = None,
) -> tuple[str, str]:
    """The text of a conversation up to its next answer, as two parts: '' and all of it, or, with ``about``, the text
    before and after a document that precedes the first user message.

    Args:
        tools: functions that the answer may call, in OpenAI's form, for templates with tools.
        continued: the last message is the beginning of the answer.
        arguments: more arguments of the template, such as ``enable_thinking``; they override the tokenizer's.
        by: a function that renders in place of ``render``.

    Raises:
        ValueError: the template refuses the conversation or an argument, there is no template for an argument, or no
            user message for the document.
    """
    if not has_template(tokenizer):
        if arguments:
            raise ValueError(f"the model has no chat template, which would take {', '.join(arguments):.64}")
        text = defused(tokenizer, "".join(f"{message['content']}\n" for message in messages))
        text = text.removesuffix("\n") if continued else text
        return "", f"\n\n{text}" if about else text
    shown = partial(by or render, tokenizer, generation=True, tools=tools, continued=continued, arguments=arguments)
    if not about:
        return "", shown(messages)
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        raise ValueError("a question about a document needs a user message")
    marker = _marker([str(message["content"]) for message in messages])
    changed = [*messages]
    changed[first] = {**messages[first], "content": f"{marker}\n\n{messages[first]['content']}"}
    return _split(shown(changed), marker, "the document")


def render_turn(tokenizer, question: str, *, chat: bool = True) -> str:
    """The text between the end of an answer and the next one's beginning: the next question in its turn.

    Raises:
        ValueError: if the template does not show the answer exactly once.
    """
    if not chat or not has_template(tokenizer):
        return f"\n\n{defused(tokenizer, question)}\n" if chat else f"\n\n{question}"
    marker = _marker([question])
    turns = (("user", "Hello"), ("assistant", marker), ("user", question))
    messages = [{"role": role, "content": content} for role, content in turns]
    return _split(render(tokenizer, messages, generation=True), marker, "the answer")[1]


def around_turn(tokenizer) -> tuple[str, str]:
    """Text that `render_turn` puts before and after the question; '' without a template. Raises ValueError as it does."""
    if not has_template(tokenizer):
        return "", ""
    marker = _marker([])
    return _split(render_turn(tokenizer, marker), marker, "the message")


def takes(tokenizer, name: str) -> bool:
    """Whether the chat template, if any, has an argument of that name."""
    return has_template(tokenizer) and name in compiled(tokenizer.get_chat_template())[1]


SWITCHES = ("enable_thinking", "thinking")
"""Arguments of chat templates that turn thinking off."""


def set_defaults(tokenizer, given: str | None = None, think: bool | None = None, effort: str | None = None) -> None:
    """Set the arguments of the tokenizer's chat template: those ``given`` as JSON, and those for answers with thoughts or
    without, and with so much effort.

    Raises:
        ValueError: invalid JSON, or an argument that the template does not take.
    """
    if given is None and think is None and effort is None:
        return
    try:
        made = json.loads(given or "{}")
    except ValueError:
        made = None
    if not isinstance(made, dict):
        raise ValueError(f"template_kwargs={given!s:.64} must be a JSON object")
    for name, value, arguments in (("think", think, SWITCHES), ("reasoning_effort", effort, ("reasoning_effort",))):
        if value is not None:
            known = next((one for one in arguments if takes(tokenizer, one)), None)
            if known is None:
                raise ValueError(f"{name}={value}: the model's chat template has no {' or '.join(arguments)}")
            made[known] = value
    render_messages(tokenizer, [{"role": "user", "content": "?"}], arguments=made)
    setattr(tokenizer, DEFAULTS, made)


def before_arguments(tokenizer) -> str:
    """The text before a document, without the arguments of ``set_defaults``."""
    given = vars(tokenizer).pop(DEFAULTS, {})
    try:
        return render_prompt(tokenizer, "")[0]
    finally:
        setattr(tokenizer, DEFAULTS, given)


def has_template(tokenizer) -> bool:
    """Whether the tokenizer has a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def template_source(tokenizer, *, tools: bool = False) -> str:
    """The chat template's source, of several the one for a prompt with or without tools; '' where there is none."""
    return str(tokenizer.get_chat_template(tools=[{}] if tools else None)) if has_template(tokenizer) else ""


def render(tokenizer, messages: Objects, generation: bool = False, **more) -> str:
    """The chat template's text of a conversation, with marks (``text.untrusted``). Arguments and errors of ``render_traced``."""
    return str.__str__(render_traced(tokenizer, messages, generation, **more))


def render_traced(
    tokenizer,
    messages: Objects,
    generation: bool = False,
    *,
    tools: Objects = (),
    continued: bool = False,
    arguments: Mapping[str, object] | None = None,
) -> Traced:
    """``render`` with origins: characters of the content of messages[i] have chr(FIRST + i).

    Args:
        generation: whether the beginning of an answer is added. tools, continued, arguments: see ``render_messages``.

    Raises:
        Refusal: the template refuses it. ValueError: it takes too long, or not the arguments.
    """
    try:
        said = [_traced_message(number, message) for number, message in enumerate(messages)]
        if continued:
            begun = {"content"} if said[-1].get("content") else said[-1].keys() & THOUGHTS
            beginning, end = str(said[-1][min(begun)]), _marker([str(message) for message in messages])
            said[-1] = {**said[-1], **dict.fromkeys(begun, beginning + f"{end} ")}
        template, names = compiled(tokenizer.get_chat_template(tools=tools or None))
        given = checked_arguments(tokenizer, names, {**getattr(tokenizer, DEFAULTS, {}), **(arguments or {})})
        given = {**traced(tokenizer.special_tokens_map, OWN), "documents": None, **given}
        given |= {"messages": said, "tools": traced(tools) or None}
        given["add_generation_prompt"] = generation and not continued
        with limited_steps():
            text = cast(Traced, template.render(given))
            if not _shows_content(text):
                with suppress(*REFUSALS):  # a template that reads lists of parts alone
                    parts = cast(Traced, template.render({**given, "messages": [*map(_in_parts, said)]}))
                    text = parts if _shows_content(parts) else text
    except REFUSALS as error:
        kind = ValueError if isinstance(error, RecursionError) else Refusal  # too deep, in whatever form it is given
        raise kind(f"the chat template refuses the conversation: {first_line(error)}") from error
    if continued:
        at = text.rfind(end)
        if at < 0 or beginning.strip() not in text[:at]:
            raise ValueError("the chat template does not show the answer that is to be continued")
        text = text[:at] if text.startswith(f"{end} ", at) else text[:at].rstrip()
    return controls(tokenizer).cut(text)


def _traced_message(number: int, message: Mapping[str, object]) -> dict[str, object]:
    """A message as transformers gives it to a template: nothing null, and thoughts under each of their names."""
    said = {name: traced(value) for name, value in message.items() if value is not None}
    thoughts = next((said[name] for name in THOUGHTS if name in said), None)
    if thoughts is not None:
        said = {"thinking": thoughts, **said, "reasoning_content": thoughts}
    if message.get("role") in ROLES:
        said["role"] = Traced(str(message["role"]), OWN)
    if isinstance(message.get("content"), str):
        said["content"] = Traced(str(message["content"]), chr(FIRST + number))
    return said


def _shows_content(text: Traced) -> bool:
    """Whether a rendering has a character of a message's content."""
    return any(origin > OWN for origin in text.origin)


def _in_parts(message: dict[str, object]) -> dict[str, object]:
    """A message whose content is a list of one part."""
    content = message.get("content")
    return {**message, "content": traced([{"type": "text", "text": content}], OWN)} if content else message


def _marker(contents: Sequence[str]) -> str:
    """A word that occurs in none of the texts."""
    names = map("LOCRETMARK{}X".format, count())
    return next(name for name in names if not any(name in content for content in contents))


def _split(text: str, marker: str, what: str) -> tuple[str, str]:
    if text.count(marker) != 1:
        raise ValueError(f"the chat template shows {what} {text.count(marker)} times; it must show it once")
    before, after = text.split(marker)
    return before, after


def around_message(tokenizer, messages: Sequence[dict], index: int) -> tuple[str, str]:
    """The rendering before and after message `index`."""
    marker = _marker([str(message["content"]) for message in messages])
    changed = [{**message, "content": marker} if i == index else message for i, message in enumerate(messages)]
    return _split(render(tokenizer, changed), marker, f"messages[{index}] ({messages[index]['role']})")
