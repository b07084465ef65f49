"""Readers of answers: pieces of an answer's text in, events of thoughts, text and calls of tools out."""

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import regex

from .arguments import JsonArguments, Parameters, Value
from .forms import CALL_LIST, NEVER, AnswerForm, CallForm, block_calls, example
from .values import Schema, check_json, properties_of, typed, types_of


@dataclass(eq=False)
class Call:
    """A call of a tool; its arguments, which are JSON, grow while it is written."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def values(self) -> Schema:
        """The arguments as an object; empty where the model wrote none, or one with numbers or texts that JSON has not."""
        with suppress(ValueError, RecursionError):
            check_json(values := json.loads(self.arguments))
            if isinstance(values, dict):
                return values
        return {}


@dataclass(frozen=True)
class Event:
    """A part of an answer.

    Attributes:
        kind: a piece of a thought or of the text, the beginning of a call, or a piece of its arguments.
        text: the piece; of a beginning the tool's name. call: the call that begins or goes on.
    """

    kind: Literal["thought", "text", "call", "arguments"]
    text: str
    call: Call | None = None


class Wait(Exception):
    """The held text decides nothing yet: it is empty, or may go on in more than one way."""


class Reader:
    """Reads an answer piece by piece. The events are the same, but for where they are cut, in whatever pieces it comes.

    Blanks around a thought and before a call are left out. Arguments of a call come as they are written; of parameters with marks
    of their own, a text in pieces and any other value when it is whole. What calls none of the tools is text. Without tools a
    call is text. Calls that end a thought without an end are calls.

    Args:
        tools: names of tools, and the schemas of their arguments; None for no calls.
        parallel: whether an answer may have more than one call; otherwise it ends with the first.
        thinks: whether the answer begins in a thought: see ``AnswerForm.opened``.
        stops: texts that end the answer where its own text has one, which is left out.

    Attributes:
        calls: those that have begun. thoughts: half-open spans of the thoughts, in characters of all that was fed.
        stop, stopped_at: the stop text that ended the answer, and the character at which it begins; None without one.
    """

    def __init__(
        self, form: AnswerForm, tools: Mapping[str, Schema] | Sequence[str] | None = None, *, parallel: bool = True,
        thinks: bool = False, stops: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.form, self.parallel, self.stops = form, parallel, stops
        self.tools = dict(tools) if isinstance(tools, Mapping) else dict.fromkeys(tools or (), Schema())
        self.calls, self.thoughts = list[Call](), list[list[int]]()
        self.stop: str | None = None
        self.stopped_at: int | None = None
        calls = form.calls if tools or form.anywhere else CallForm("none", sections=form.calls.sections)
        self._call_form = calls
        self._arguments: JsonArguments | Parameters = JsonArguments(NEVER)  # of the newest call
        self._events, self._held, self._fed, self._searched = list[Event](), "", 0, 0
        self._mode: Literal["text", "thought", "arguments", "tail"] = "text"
        self._fresh = self._begins = True  # nothing but blanks since a mark; nothing but blanks and thoughts at all
        # Blanks are no text; others may follow the newest call; the text is in a tag.
        self._trims = self._row = self._tagged = False
        # Blanks at the end of a thought or text so far, or between two; what may begin a stop text.
        self._blanks = self._pending = ""
        self._text_end = 0  # characters up to the end of the text so far
        self._kinds = set[str]()  # of events so far
        content = "json" if calls.field is None else calls.field.get("content")
        self._quotes = "\"'" if calls.name == "python" or content == CALL_LIST else '"'
        self._bracketed = content in ("json", CALL_LIST)
        self._value = Value(self._quotes)
        tags = "|".join(map(regex.escape, form.around)) or NEVER
        marks = f"{calls.open}|{calls.sections or NEVER}"
        last = rf"\s*(?:{calls.close}|(?={calls.open}))"
        patterns = form.open, form.close, f"<(?:{tags})>", marks, calls.close, calls.head, calls.tail, last, calls.rest
        compiled = [regex.compile(pattern, regex.DOTALL) for pattern in patterns]
        self._open, self._end, self._around, self._called, self._close, *others = compiled
        self._head, self._tail, self._last, self._rest = others
        self._start = self._starts(NEVER)
        if thinks:
            self._begin_thought(0)

    def _starts(self, around: str) -> list[regex.Pattern[str]]:
        """Patterns of marks in the text, before the answer's end and at it. ``around``: the tag that closes it before ``END``."""
        thought = self.form.open if self.form.anywhere else NEVER
        kinds = {"thought": thought, "call": self._call_form.open, "section": self._call_form.sections or NEVER}
        found = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in kinds.items())
        ends = [around.replace("END", end) for end in (NEVER, r"\Z")]
        return [regex.compile(f"{found}|(?P<around>{end})", regex.DOTALL) for end in ends]

    @property
    def thinks(self) -> bool:
        """Whether the answer is in a thought."""
        return self._mode == "thought"

    @property
    def ended(self) -> bool:
        """Whether the answer has all the calls that it may have, or a stop text."""
        return self.stop is not None or (bool(self.calls) and not self.parallel and not self.calling)

    @property
    def calling(self) -> bool:
        """Whether the answer is in a call that has begun."""
        return self._mode in ("arguments", "tail")

    @property
    def whole_calls(self) -> list[Call]:
        """The calls without one that is not at its end."""
        return self.calls[: len(self.calls) - self.calling]

    @property
    def settled(self) -> int:
        """Characters whose events have come."""
        return self._fed - len(self._held) - len(self._pending) if self.stopped_at is None else self.stopped_at

    @property
    def marks(self) -> str:
        """A text that contains every token that is a mark of this reader."""
        calls = self._call_form if self.tools else CallForm("", sections=self._call_form.sections)
        return replace(self.form, calls=calls).marks

    def feed(self, text: str, *, final: bool = False, cut: bool = False) -> list[Event]:
        """Events that are sure with this text.

        Args:
            final: the answer has ended. cut: it would have gone on; half of a mark or of a call's beginning is left out.
        """
        self._held, self._fed, self._events = self._held + text, self._fed + len(text), []
        self._final, self._cut, self._waits = final, cut, cut or not final
        with suppress(Wait):
            while not self.ended:
                getattr(self, f"_read_{self._mode}")()
        if self.thinks and self.thoughts:
            self.thoughts[-1][1] = self._fed
        if self._mode == "text" and (final or self.stop is not None):
            with suppress(Wait):
                self._close_text()
            self._events += [Event("text", self._blanks)] if self._blanks and not self._fresh else []
            self._blanks = ""
        return self._events

    def end(self, *, cut: bool = False) -> list[Event]:
        """The last events: see ``feed``."""
        return self.feed("", final=True, cut=cut)

    def _match(self, pattern: regex.Pattern[str], at: int, waits: bool) -> regex.Match[str] | None:
        """A mark at a place of the held text. Raises Wait where it may only begin there."""
        found = pattern.match(self._held, at, partial=waits)
        if found is not None and found.partial:
            raise Wait
        return found

    # ---- modes: each reads from the held text until it raises Wait, since what follows decides -----------------------

    def _read_text(self) -> None:
        if self._fresh and not self.form.anywhere:
            blanks = len(self._held) - len(self._held.lstrip())
            if (begin := self._match(self._open, blanks, self._waits)) is not None:
                return self._begin_thought(begin.end())
            if self._begins and (around := self._match(self._around, blanks, self._waits)) is not None:  # once
                self._take(around.end())
                self._start = self._starts(rf"{around[0].replace('<', '</')}(?=\s*(?:{self._call_form.open}|END))")
                self._around, self._trims, self._tagged = regex.compile(NEVER), True, True
                return None
            self._take(blanks if self._trims else 0)
            self._trims = self._trims and not self._held
        if self._row or (self._call_form.bare and self.tools and self._begins and not self.calls):
            at = len(self._held) - len(self._held.lstrip("; \n" if self._row else None))
            if at == len(self._held) and not self._final:
                raise Wait
            if self._held[at : at + 1] in ("[", "{") and not self._match(self._start[0], at, not self._final):
                return self._read_block(0, at)
            self._row = False
        begin = self._start[self._final and not self._cut].search(self._held, partial=self._waits)
        at = len(self._held) if begin is None else begin.start()
        at += self._cut and at == len(self._held) - 1  # one sign may be of any text
        self._emit_text(at)
        if begin is None or begin.partial or self.stop is not None:  # of what may begin a mark
            raise Wait
        if begin["call"] is not None:
            return self._read_call(begin.end() - at)
        self._close_text()
        if begin["thought"] is not None:
            return self._begin_thought(begin.end() - at)
        self._take(begin.end() - at)
        self._fresh = True
        self._between("text")
        return None

    def _between(self, kind: str) -> None:
        """Begin another thought or text: a line of its own."""
        self._blanks = "\n" if kind in self._kinds else ""

    def _begin_thought(self, size: int) -> None:
        self._mode, self._fresh, self._searched = "thought", True, 0
        self._between("thought")
        self.thoughts.append([self._fed - len(self._held), self._fed])
        self._take(size)

    def _read_thought(self) -> None:
        if self._fresh:  # blanks, and the mark again, where the prompt had it
            self._held = self._held.lstrip()
            again = self._match(self._open, 0, not self._final)
            if not self._held:
                raise Wait
            self._take(0 if again is None else again.end())
            self._fresh = again is not None
            return
        # Half of a mark is no part of a thought.
        end = self._end.search(self._held, self._searched, partial=self._waits)
        at = len(self._held) if end is None else end.start()
        closes, unsure = end is not None and not end.partial, at
        if self.tools and not self.form.anywhere and not closes:  # calls may be all that follows
            mark = self._called.search(self._held, 0, at, partial=not self._final)
            if mark is not None and not (self._final and self._cut):
                at = self._last_calls(mark.start()) if self._final else mark.start()
                closes = self._final and at < len(self._held)
        self._searched = unsure - at
        self._emit("thought", self._take(at), trims=True)
        if not closes:
            raise Wait
        self._take(end.end() - end.start() if end is not None and not end.partial else 0)
        self.thoughts[-1][1] = self._fed - len(self._held)
        self._mode, self._fresh, self._trims, self._searched = "text", True, True, 0
        self._between("text")

    def _last_calls(self, at: int) -> int:
        """The place in the held text from where there are calls alone, after ``at``; its end where there are none."""
        reader = Reader(self.form, self.tools)
        events = reader.feed(self._held[at:], final=True)
        calls = bool(events) and events[-1].call is not None and not reader.calling
        return at + reader._text_end if calls else len(self._held)

    def _read_call(self, inner: int) -> None:
        """Read a possible call at the start of the held text, after ``inner`` characters of its mark."""
        form = self._call_form
        head = self._match(self._head, 0, self._waits) if form.head else None
        if head is None or head["name"] not in self.tools:
            return self._read_block(inner, len(self._held) - len(self._held[inner:].lstrip()))
        self._close_text()
        self.calls.append(call := self._call_of(head["name"], head.groupdict().get("id")))
        self._begins, self._blanks, self._mode = False, "", "arguments"
        self._events.append(Event("call", call.name, call))
        if form.key:
            self._arguments = Parameters(form, self.tools[call.name])
        else:
            self._arguments = JsonArguments(f"{form.close}|{form.open}|{form.sections or NEVER}")
        self._take(head.end() if form.key else head.start("args"))
        return None

    def _read_block(self, inner: int, start: int) -> None:
        """Read calls that are a value in brackets, or what a tokenizer's own parser reads.

        Args:
            inner: characters of the mark. start: place of the value.
        """
        waits, declared = (self._cut and inner > 0) or not self._final, self._call_form.field is not None
        if start == len(self._held) and waits:
            raise Wait
        stop, whole = inner, True
        if self._bracketed and self._held[start : start + 1] in ("[", "{"):
            stop, whole = self._value.end(self._held, start, not waits)
        elif declared:
            end = self._close.search(self._held, max(self._searched, inner), partial=waits)
            stop, whole = (len(self._held), not waits) if end is None else (end.start(), not end.partial)
            self._searched = 0 if whole else stop
        if waits and not whole:
            raise Wait
        last = self._match(self._last, stop, waits) if whole else None
        calls = self._calls_in(0 if declared else start, stop) if whole else []
        self._value, self._row = Value(self._quotes), False
        if calls:
            self._close_text()
            for call in calls:
                self._events += [Event("call", call.name, call), Event("arguments", call.arguments, call)]
            self.calls += calls
            self._take(stop if last is None else last.end())
            self._fresh, self._begins, self._blanks = True, False, ""
            self._row = last is None or not last[0].strip()
            return
        size = stop if last is None else last.end()
        if not whole:  # up to the end of the block, if it has one
            end = self._close.search(self._held, max(1, inner))
            size = inner if end is None else end.end()
        self._emit_text(max(1, size))

    def _calls_in(self, start: int, stop: int) -> list[Call]:
        """The calls that a part of the held text is, as many as there may be; none where one is of no tool."""
        calls = list[Call]()
        quoted = self._bracketed or self._call_form.json
        for one in block_calls(self._call_form, self._held[start:stop]):
            if one.get("name") not in [*self.tools]:  # it may be a list
                return []
            said, schema = one.get("arguments") or one.get("parameters") or {}, self.tools[one["name"]]
            if isinstance(said, dict) and (self._call_form.field is not None or self._call_form.name == "python"):
                known = {key: types_of(properties_of(schema).get(key), schema) for key in said}
                texts = [(key, text) for key, text in said.items() if isinstance(text, str)]
                said |= {key: typed(text, known[key]) for key, text in texts if not (quoted and "string" in known[key])}
            text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, allow_nan=False)
            calls.append(self._call_of(one["name"], None, text))
        return calls if self.parallel else calls[:1]

    def _read_arguments(self) -> None:
        size, piece, done = self._arguments.read(self._held, self._final, self._cut)
        self._take(size)
        self._write(piece)
        if not done:
            raise Wait
        self._mode = "tail"

    def _write(self, piece: str) -> None:
        """Emit a piece of the newest call's arguments."""
        if piece:
            self.calls[-1].arguments += piece
            self._events.append(Event("arguments", piece, self.calls[-1]))

    def _read_tail(self) -> None:
        """Read the text after the arguments."""
        tail, tagged = self._tail.match(self._held, partial=self._waits), bool(self._call_form.key)
        open_ = tail is not None and bool(tail.partial)
        if (open_ and not self._final) or (tagged and self._cut and (open_ or tail is None)):
            raise Wait
        tail = self._rest.match(self._held) if tail is None else tail
        at = 0 if tail is None else tail.end()
        last = self._last.match(self._held, at, partial=self._waits) if tagged else None
        if last is not None and last.partial and not self._final:
            raise Wait
        self._write(self._arguments.closing)
        self._take(at if last is None else last.end())
        self._mode, self._fresh = "text", True

    def _call_of(self, name: str, id: str | None, arguments: str = "") -> Call:
        """A call, with the id that the model gave it, or a new one in the model's own form."""
        if id is None and self._call_form.name == "list":  # Mistral's templates take nine letters and digits
            id = secrets.token_hex(5)[:9]
        return Call(name, arguments) if id is None else Call(name, arguments, id)

    def _take(self, size: int) -> str:
        """The first ``size`` characters of the held text, removed from it."""
        piece, self._held = self._held[:size], self._held[size:]
        return piece

    def _close_text(self) -> None:
        """End the text so far, where a mark or nothing follows it. Raises Wait where a stop text has ended it."""
        if self.stop is None:
            self._emit_text(0, final=True)
        if self.stop is not None:
            raise Wait

    def _emit_text(self, size: int, *, final: bool = False) -> None:
        """Emit ``size`` characters of the held text as text, up to a stop text, or to what may begin one if the text is not
        ``final``."""
        text = self._pending + self._take(size)
        before = self._fed - len(self._held) - len(text)
        at, self.stop = stop_in(text, self.stops, final)
        piece, self._pending = text[:at], text[at:]
        if self.stop is not None:
            self.stopped_at, self._held, self._pending = before + at, "", ""
        if not piece:
            return
        if piece.strip():
            self._fresh = self._begins = False
            self._text_end = before + at
        self._emit("text", piece, trims=bool(self.tools) or self._tagged)

    def _emit(self, kind: Literal["thought", "text"], piece: str, *, trims: bool) -> None:
        """Add a piece of a thought or text to the events; ``trims`` holds back the blanks at its end."""
        piece = self._blanks + piece
        shown = piece.rstrip() if trims else piece
        self._blanks = piece[len(shown) :]
        if shown:
            self._events.append(Event(kind, shown))
            self._kinds.add(kind)


def reads(form: CallForm, name: str, keys: Sequence[str]) -> bool:
    """Whether a call of these names is read as it is written: many forms end a name at a blank."""
    reader = Reader(AnswerForm(calls=form), {name: {"properties": {key: {"type": "string"} for key in keys}}})
    reader.feed(example(form, name, keys), final=True)
    return [(call.name, call.values) for call in reader.calls] == [(name, dict.fromkeys(keys, "v"))]


def stop_in(text: str, stops: Sequence[str], final: bool) -> tuple[int, str | None]:
    """Place of the first stop text in a text, and the stop text; of several there the shortest. Without one the place where one
    may have begun, if the text is not ``final``; else its end."""
    found = min(((at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0), default=(len(text), 0, None))
    longest = max(map(len, stops), default=1)
    for at in range(max(0, len(text) - longest + 1), 0 if final else found[0]):
        if any(stop.startswith(text[at:]) for stop in stops):
            return at, None
    return found[0], found[2]
