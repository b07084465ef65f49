"""Texts that know who wrote each of their characters, and chat templates that render into them.

A template looks for its own tokens in what it is given: it cuts an answer at ``</think>``. So it gets every text as it is, and
each character of what it makes is traced to the template's own literals or to a text of others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, SupportsIndex, TypeVar, cast

from jinja2 import Template, meta, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import do_join
from jinja2.nodes import EvalContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from markupsafe import Markup

if TYPE_CHECKING:
    from _typeshed import TraceFunction

T = TypeVar("T")

OTHERS, OWN, FIRST = "\0", "\1", 2
"""Origins of a character: of others, or of the template; the content of messages[i] has chr(FIRST + i)."""

GIVEN = {"messages", "tools", "add_generation_prompt"}
"""Arguments of every template, which no caller replaces."""


class Traced(str):
    """A text with the origin of each of its characters.

    What templates do with texts keeps origins: slices, sums, joins, splits, strips, replacements, formats. What anything else
    makes of it (JSON, ``indent``, ``escape``) is a plain text, of others: no text becomes the template's.

    Args:
        origin: one for each character, or one for all.
    """

    origin: str

    def __new__(cls, text: str, origin: str = OTHERS) -> Traced:
        made = super().__new__(cls, text)
        made.origin = origin * len(text) if len(origin) == 1 else origin
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Traced:
        return NOTHING.join((self, other)) if type(other) in (str, Traced) else NotImplemented

    def __radd__(self, other: str) -> Traced:
        return NOTHING.join((other, self)) if type(other) is str else NotImplemented

    def __mul__(self, times: SupportsIndex) -> Traced:
        return Traced(str.__mul__(self, times), self.origin * times)

    __rmul__ = __mul__

    def __getitem__(self, at: SupportsIndex | slice) -> Traced:
        return Traced(str.__getitem__(self, at), self.origin[at])

    def __iter__(self) -> Iterator[str]:
        return map(Traced, str.__iter__(self), self.origin)

    def __mod__(self, values: object) -> str:
        made, parts = str.__mod__(self, values), self.split("%s")
        given = list(values) if isinstance(values, tuple) else [values]
        if len(parts) != len(given) + 1 or str.count(self, "%") != len(given):  # other signs than %s
            return made
        texts = [part for pair in zip(parts, map(str, given), strict=False) for part in pair]
        return NOTHING.join([*texts, parts[-1]])

    def join(self, parts: Iterable[str]) -> Traced:
        parts = list(parts)
        return Traced(str.join(self, parts), self.origin.join(map(_origin, parts)))

    def lstrip(self, chars: str | None = None) -> Traced:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None) -> Traced:
        return self[: len(str.rstrip(self, chars))]

    def strip(self, chars: str | None = None) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Traced:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str) -> Traced:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(str.rsplit(self, sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._found(str.splitlines(self, keepends))

    def partition(self, sep: str) -> tuple[str, str, str]:
        return cast(tuple[str, str, str], tuple(self._found(str.partition(self, sep), "")))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        return cast(tuple[str, str, str], tuple(self._found(str.rpartition(self, sep), "")))

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        return traced(new).join(self.split(old, count)) if old else str.replace(self, old, new, count)

    def _found(self, pieces: Iterable[str], sep: str | None = None) -> list[str]:
        """Pieces of this text in their order, with ``sep`` between them; None for blanks or line ends, which begin no piece."""
        at, made = 0, list[str]()
        for piece in pieces:
            at = str.find(self, piece, at) if sep is None else at
            made.append(self[at : at + len(piece)])
            at += len(piece) + len(sep or "")
        return made


def _recased(change: Callable[[str], str]) -> Callable[[Traced], str]:
    return lambda text: Traced(made, text.origin) if len(made := change(text)) == len(text) else made


for _change in (str.upper, str.lower, str.title, str.capitalize):
    setattr(Traced, _change.__name__, _recased(_change))
NOTHING = Traced("")


def _origin(text: str) -> str:
    return text.origin if isinstance(text, Traced) else OTHERS * len(text)


def traced(value: T, origin: str = OTHERS) -> T:
    """A value of JSON with every text in it traced; one that is traced already stays."""
    if isinstance(value, str):
        return cast(T, value if isinstance(value, Traced) else Traced(value, origin))
    if isinstance(value, Mapping):
        return cast(T, {traced(name, origin): traced(inner, origin) for name, inner in value.items()})
    return cast(T, [traced(inner, origin) for inner in value]) if isinstance(value, (list, tuple)) else value


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
        origin = OWN if set(_origin(text)) == {OWN} else OTHERS
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
def _join(context: EvalContext, value: Iterable[object], d: str = "", attribute: str | None = None) -> str:
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


@contextmanager
def limited_steps(steps: int = STEPS) -> Iterator[None]:
    """Raise ValueError in this thread when a template that is rendered within has run more than ``steps`` of its lines."""
    left = steps

    def line(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise ValueError(f"the chat template takes more than {steps} steps")
        return line

    def call(frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        return line if frame.f_code.co_filename in ("<template>", "<unknown>") else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
