"""Chat templates compiled in transformers' sandbox: they render a ``Traced``, and have a limit of work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, cast

from jinja2 import Template, meta, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup

from .untrusted import NOTHING, OTHERS, OWN, Traced, traced

if TYPE_CHECKING:
    from _typeshed import TraceFunction

GIVEN = {"messages", "tools", "add_generation_prompt"}
"""Arguments of every template, which no caller replaces."""


def _formatting(environment: ImmutableSandboxedEnvironment, method: object) -> Callable[..., str] | None:
    """``str.format`` and ``format_map`` of the sandbox, for a method that is one of them."""
    sandboxed = ImmutableSandboxedEnvironment.wrap_str_format(environment, method)
    text = getattr(method, "__self__", None)
    if sandboxed is None or not isinstance(text, str) or isinstance(text, Markup):
        return sandboxed

    def formatted(*args: object, **names: object) -> str:
        sandboxed(*args, **names)  # so that it raises what it would
        if getattr(method, "__name__", "") == "format_map":
            names, args = cast(dict[str, object], args[0]), ()
        formatter, numbers, parts = SandboxedFormatter(environment), count(), list[str]()
        origin = OWN if isinstance(text, Traced) and set(text.origin) == {OWN} else OTHERS
        for literal, field, form, conversion in formatter.parse(text):
            parts.append(Traced(literal, origin))
            if field is not None:
                field = f"{next(numbers)}{field}" if field[:1] in ("", ".", "[") else field
                value, _ = formatter.get_field(field, args, names)
                if form or conversion or not isinstance(value, str):
                    value = formatter.format_field(formatter.convert_field(value, conversion), form or "")
                parts.append(value)
        return NOTHING.join(parts)

    return formatted


class _Code(CodeGenerator):
    """Code of a template whose literals are traced to it."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(self._output_const_repr([node.value]))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self._output_const_repr([node.data]))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[str]) -> str:
        return f"environment.own({''.join(group)!r})"


@pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[object], d: str = "", attribute: str | None = None) -> str:
    return do_join(context, value, traced(d), attribute)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox of transformers, with its filters and functions, for templates that render a ``Traced``."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template("").environment.overlay(optimized=False)
    environment.code_generator_class, environment.concat = _Code, NOTHING.join
    environment.filters = {**environment.filters, "join": _join}
    environment.own = lru_cache(maxsize=1 << 14)(lambda text: Traced(text, OWN))
    environment.wrap_str_format = partial(_formatting, environment)
    return environment


@lru_cache(maxsize=32)
def compiled(template: str) -> tuple[Template, frozenset[str]]:
    """A chat template that renders a ``Traced``, and the names of the arguments that a caller may give it.

    Raises:
        jinja2.TemplateError: it is none. ValueError: it may take too much work.
    """
    environment = _environment()
    check_template(tree := environment.parse(template))
    names = meta.find_undeclared_variables(tree).difference(environment.globals, GIVEN)
    return environment.from_string(template), frozenset(names)


STEPS = 2_000_000
"""Lines of a template, compiled to Python, that a rendering may run: real ones run some ten for each message."""
LARGEST = 1_000_000
"""The largest number in a template: a text repeated or indented so often takes all memory in one step."""


def check_template(tree: nodes.Template) -> None:
    """Raise ValueError for a template with numbers above ``LARGEST``, or with powers."""
    for number in tree.find_all(nodes.Const):
        if isinstance(number.value, int | float) and abs(number.value) > LARGEST:
            raise ValueError(f"the chat template holds {number.value!s:.20}: numbers are at most {LARGEST}")
    if next(tree.find_all(nodes.Pow), None) is not None:
        raise ValueError("the chat template computes a power (**), which no template needs")


def checked_arguments(tokenizer, names: frozenset[str], arguments: Mapping[str, object]) -> dict[str, object]:
    """Arguments of a chat template that has ``names``, traced to others.

    Raises:
        ValueError: the template has no such argument, or one is not plain JSON or a number above ``LARGEST``.
    """
    known = sorted(names.difference(tokenizer.special_tokens_map))
    if wrong := next((name for name in arguments if name not in known), None):
        raise ValueError(f"the chat template takes no argument {wrong[:64]!r}, only: {', '.join(known) or 'none'}")

    def number(written: str) -> None:
        if abs(float(written)) > LARGEST:
            raise OverflowError

    for name, value in arguments.items():
        try:  # to JSON and back, which shows each number
            json.loads(json.dumps(value, allow_nan=False), parse_int=number, parse_float=number)
        except (TypeError, ValueError, RecursionError):
            raise ValueError(f"the chat template's argument {name!r} must be plain JSON") from None
        except OverflowError:
            raise ValueError(f"the chat template's argument {name!r} holds a number above {LARGEST}") from None
    return traced(dict(arguments))


@contextmanager
def limited_steps() -> Iterator[None]:
    """Raise ValueError in this thread when a template that is rendered within has run more than ``STEPS`` of its lines."""
    left = STEPS

    def line(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise ValueError(f"the chat template takes more than {STEPS} steps")
        return line

    def call(frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        return line if frame.f_code.co_filename in ("<template>", "<unknown>") else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
