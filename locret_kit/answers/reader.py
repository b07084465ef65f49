"""Readers of answers: pieces of an answer's text in, events of thoughts, text and calls of tools out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import regex

from .arguments import JsonArguments, Parameters, Value
from .forms import CALL_LIST, NEVER, AnswerForm, CallForm, block_calls
from .values import Schema, properties_of, typed, types_of


@dataclass(eq=False)
class Call:
    """A call of a tool; its arguments, which are JSON, grow while it is written."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def values(self) -> Schema:
        """The arguments as an object; empty where the model wrote none."""
        with suppress(ValueError, RecursionError):
            if isinstance(values := json.loads(self.arguments), dict):
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
        self._events, self._held, self._fed, self._searched = list[Event](), "", 0, 0
        self._mode: Literal["text", "thought", "arguments", "tail"] = "text"
        self._fresh = self._begins = True  # nothing but blanks since a mark; nothing but blanks and thoughts at all
        self._trims = self._row = self._tagged = (
            False  # blanks are no text; others may follow the newest call; in a tag
        )
        self._blanks, self._pending = (
            "",
            "",
        )  # at the end of a thought or text so far, or between two; may begin a stop text
        self._spoken = 0  # characters up to the end of the text so far
        self._told = set[str]()  # kinds of events so far
        content = "json" if calls.field is None else calls.field.get("content")
        self._quotes = "\"'" if calls.name == "python" or content == CALL_LIST else '"'
        self._bracketed = content in ("json", CALL_LIST)
        self._form, self._value = calls, Value(self._quotes)
        self._arguments: JsonArguments | Parameters = JsonArguments(NEVER)  # of the newest call
        tags = "|".join(map(regex.escape, form.around)) or NEVER
        marks = f"{calls.open}|{calls.sections or NEVER}"
        last = rf"\s*(?:{calls.close}|(?={calls.open}))"
        patterns = form.open, form.close, f"<(?:{tags})>", marks, calls.close, calls.head, calls.tail, last, calls.rest
        compiled = [regex.compile(pattern, regex.DOTALL) for pattern in patterns]
        self._open, self._end, self._around, self._called, self._close, *others = compiled
        self._head, self._tail, self._last, self._rest = others
        self._start = self._starts(NEVER)
        if thinks:
            self._think(0)

    def _starts(self, around: str) -> list[regex.Pattern[str]]:
        """Patterns of marks in the text, before the answer's end and at it. ``around``: the tag that closes it before ``END``."""
        thought = self.form.open if self.form.anywhere else NEVER
        kinds = {"thought": thought, "call": self._form.open, "section": self._form.sections or NEVER}
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
        form = replace(self.form, calls=self._form if self.tools else CallForm("", sections=self._form.sections))
        return form.marks

    def feed(self, text: str, *, final: bool = False, cut: bool = False) -> list[Event]:
        """Events that are sure with this text.

        Args:
            final: the answer has ended. cut: it would have gone on; half of a mark or of a call's beginning is left out.
        """
        self._held, self._fed, self._events = self._held + text, self._fed + len(text), []
        steps = {"text": self._text, "thought": self._thought, "arguments": self._argue, "tail": self._after}
        while not self.ended and steps[self._mode](final, cut):
            pass
        if self.thinks and self.thoughts:
            self.thoughts[-1][1] = self._fed
        if self._mode == "text" and (final or self.stop is not None):
            self._goes_on()
            self._events += [Event("text", self._blanks)] if self._blanks and not self._fresh else []
            self._blanks = ""
        return self._events

    def end(self, *, cut: bool = False) -> list[Event]:
        """The last events: see ``feed``."""
        return self.feed("", final=True, cut=cut)

    # ---- modes: each reads what is held, and says whether there may be more to read --------------------------------------

    def _text(self, final: bool, cut: bool) -> bool:
        waits = cut or not final
        if self._fresh and not self.form.anywhere:
            blanks = len(self._held) - len(self._held.lstrip())
            begin = self._open.match(self._held, blanks, partial=waits)
            around = self._around.match(self._held, blanks, partial=waits) if self._begins else None
            if (begin is not None and begin.partial) or (around is not None and around.partial):
                return False
            if begin is not None:
                self._think(begin.end())
                return True
            if around is not None:  # once
                self._take(around.end())
                self._start = self._starts(rf"{around[0].replace('<', '</')}(?=\s*(?:{self._form.open}|END))")
                self._around, self._trims, self._tagged = regex.compile(NEVER), True, True
                return True
            self._take(blanks if self._trims else 0)
            self._trims = self._trims and not self._held
        begun = self._held.lstrip("; \n" if self._row else None)
        if self._row or (self._form.bare and self.tools and self._begins and not self.calls):
            if not begun and not final:
                return False
            if begun and begun[0] in "[{":
                marked = self._start[0].match(begun, partial=not final)  # such as [TOOL_CALLS]
                if not marked:
                    return self._block(0, len(self._held) - len(begun), final, cut)
                if marked.partial:
                    return False
            self._row = False
        begin = self._start[final and not cut].search(self._held, partial=waits)
        at = len(self._held) if begin is None else begin.start()
        at += cut and at == len(self._held) - 1  # one sign may be of any text
        self._say(at)
        if begin is None or begin.partial or self.stop is not None:  # of what may begin a mark
            return False
        if begin["call"] is not None:
            return self._begun(begin.end() - at, final, cut)
        if not self._goes_on():
            return False
        if begin["thought"] is not None:
            self._think(begin.end() - at)
            return True
        self._take(begin.end() - at)
        self._fresh = True
        self._between("text")
        return True

    def _between(self, kind: str) -> None:
        """Begin another thought or text: a line of its own."""
        self._blanks = "\n" if kind in self._told else ""

    def _think(self, size: int) -> None:
        self._mode, self._fresh, self._searched = "thought", True, 0
        self._between("thought")
        self.thoughts.append([self._fed - len(self._held), self._fed])
        self._take(size)

    def _thought(self, final: bool, cut: bool) -> bool:
        if self._fresh:  # blanks, and the mark again, where the prompt had it
            self._held = self._held.lstrip()
            again = self._open.match(self._held, partial=not final)
            if not self._held or (again is not None and again.partial):
                return False
            if again is not None:
                self._take(again.end())
                return True
            self._fresh = False
        waits = cut or not final  # half of a mark is no part of a thought
        end = self._end.search(self._held, self._searched, partial=waits)
        at = len(self._held) if end is None else end.start()
        closes, unsure = end is not None and not end.partial, at
        if self.tools and not self.form.anywhere and not closes:  # calls may be all that follows
            mark = self._called.search(self._held, 0, at, partial=not final)
            if mark is not None and not (final and cut):
                at = self._last_calls(mark.start()) if final else mark.start()
                closes = final and at < len(self._held)
        self._searched = unsure - at
        piece = self._blanks + self._take(at)
        said = piece.rstrip()
        self._blanks = piece[len(said) :]
        if said:
            self._events.append(Event("thought", said))
            self._told.add("thought")
        if not closes:
            return False
        self._take(end.end() - end.start() if end is not None and not end.partial else 0)
        self.thoughts[-1][1] = self._fed - len(self._held)
        self._mode, self._fresh, self._trims, self._searched = "text", True, True, 0
        self._between("text")
        return True

    def _last_calls(self, at: int) -> int:
        """The place in the held text from where there are calls alone, after ``at``; its end where there are none."""
        reader = Reader(self.form, self.tools)
        events = reader.feed(self._held[at:], final=True)
        calls = bool(events) and events[-1].call is not None and not reader.calling
        return at + reader._spoken if calls else len(self._held)

    def _begun(self, inner: int, final: bool, cut: bool) -> bool:
        """Read a possible call at the start of the held text."""
        start = len(self._held) - len(self._held[inner:].lstrip())
        if self._form.head:
            head = self._head.match(self._held, partial=cut or not final)
            if head is not None and not head.partial and head["name"] in self.tools:
                if not self._goes_on():
                    return False
                self.calls.append(call := self._call_of(head["name"], head.groupdict().get("id")))
                self._begins, self._blanks = False, ""
                self._events.append(Event("call", call.name, call))
                tagged, self._mode = bool(self._form.key), "arguments"
                marks = f"{self._form.close}|{self._form.open}|{self._form.sections or NEVER}"
                self._arguments = Parameters(self._form, self.tools[call.name]) if tagged else JsonArguments(marks)
                self._take(head.end() if tagged else head.start("args"))
                return True
            if head is not None and head.partial:
                return False
        return self._block(inner, start, final, cut)

    def _block(self, inner: int, start: int, final: bool, cut: bool) -> bool:
        """Read calls that are a value in brackets, or what a tokenizer's own parser reads.

        Args:
            inner: characters of the mark. start: place of the value.
        """
        waits, declared = (cut and inner > 0) or not final, self._form.field is not None
        if start == len(self._held) and waits:
            return False
        if self._bracketed and self._held[start : start + 1] in ("[", "{"):
            stop, whole = self._value.end(self._held, start, not waits)
        elif declared:
            end = self._close.search(self._held, max(self._searched, inner), partial=waits)
            stop, whole = len(self._held) if end is None else end.start(), end is None or not end.partial
            whole = whole if end is not None else not waits
            self._searched = 0 if whole else stop
        else:
            stop, whole = inner, True
        last = self._last.match(self._held, stop, partial=waits) if whole else None
        if waits and (not whole or (last is not None and last.partial)):
            return False
        size = stop if last is None else last.end()
        calls = self._block_calls(0 if declared else start, stop) if whole else []
        self._value, self._row = Value(self._quotes), False
        if calls:
            if not self._goes_on():
                return False
            for call in calls:
                self._events += [Event("call", call.name, call), Event("arguments", call.arguments, call)]
            self.calls += calls
            self._take(size)
            self._fresh, self._begins, self._blanks = True, False, ""
            self._row = last is None or not last[0].strip()
            return True
        if not whole:  # up to the end of the block, if it has one
            end = self._close.search(self._held, max(1, inner))
            size = max(1, inner) if end is None else end.end()
        self._say(max(1, size))
        return True

    def _block_calls(self, start: int, stop: int) -> list[Call]:
        """The calls that a part of the held text is, as many as there may be; none where one is of no tool."""
        calls = list[Call]()
        quoted = self._bracketed or self._form.json
        for one in block_calls(self._form, self._held[start:stop]):
            if one.get("name") not in [*self.tools]:  # it may be a list
                return []
            said, schema = one.get("arguments") or one.get("parameters") or {}, self.tools[one["name"]]
            if isinstance(said, dict) and (self._form.field is not None or self._form.name == "python"):
                known = {key: types_of(properties_of(schema).get(key), schema) for key in said}
                texts = [(key, text) for key, text in said.items() if isinstance(text, str)]
                said |= {key: typed(text, known[key]) for key, text in texts if not (quoted and "string" in known[key])}
            text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, allow_nan=False)
            calls.append(self._call_of(one["name"], None, text))
        return calls if self.parallel else calls[:1]

    def _argue(self, final: bool, cut: bool) -> bool:
        size, piece, done = self._arguments.read(self._held, final, cut)
        self._take(size)
        self._write(piece)
        self._mode = "tail" if done else "arguments"
        return done

    def _write(self, piece: str) -> None:
        """Emit a piece of the newest call's arguments."""
        if piece:
            self.calls[-1].arguments += piece
            self._events.append(Event("arguments", piece, self.calls[-1]))

    def _after(self, final: bool, cut: bool) -> bool:
        """Read the text after the arguments."""
        tail, tagged = self._tail.match(self._held, partial=cut or not final), bool(self._form.key)
        open_ = tail is not None and bool(tail.partial)
        if (open_ and not final) or (tagged and cut and (open_ or tail is None)):
            return False
        tail = self._rest.match(self._held) if tail is None else tail
        at = 0 if tail is None else tail.end()
        last = self._last.match(self._held, at, partial=cut or not final) if tagged else None
        if last is not None and last.partial and not final:
            return False
        self._write(self._arguments.closing)
        self._take(at if last is None else last.end())
        self._mode, self._fresh = "text", True
        return True

    def _call_of(self, name: str, id: str | None, arguments: str = "") -> Call:
        """A call, with the id that the model gave it, or a new one in the model's own form."""
        if id is None and self._form.name == "list":  # Mistral's templates take nine letters and digits
            id = secrets.token_hex(5)[:9]
        return Call(name, arguments) if id is None else Call(name, arguments, id)

    def _take(self, size: int) -> str:
        """The first ``size`` characters of the held text, removed from it."""
        piece, self._held = self._held[:size], self._held[size:]
        return piece

    def _goes_on(self) -> bool:
        """End the text so far, where a mark or nothing follows it. Returns whether it has no stop text."""
        if self.stop is None:
            self._say(0, final=True)
        return self.stop is None

    def _say(self, size: int, *, final: bool = False) -> None:
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
            self._spoken = before + at
        piece = self._blanks + piece
        said = piece.rstrip() if self.tools or self._tagged else piece
        self._blanks = piece[len(said) :]
        if said:
            self._events.append(Event("text", said))
            self._told.add("text")


def stop_in(text: str, stops: Sequence[str], final: bool) -> tuple[int, str | None]:
    """Place of the first stop text in a text, and the stop text; of several there the shortest. Without one the place where one
    may have begun, if the text is not ``final``; else its end."""
    found = min(((at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0), default=(len(text), 0, None))
    longest = max(map(len, stops), default=1)
    for at in range(max(0, len(text) - longest + 1), 0 if final else found[0]):
        if any(stop.startswith(text[at:]) for stop in stops):
            return at, None
    return found[0], found[2]
