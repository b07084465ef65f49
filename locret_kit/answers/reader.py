"""Readers of answers: pieces of an answer's text in, events of thoughts, text and calls of tools out."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import regex

from .arguments import JsonArguments, Parameters
from .forms import NEVER, AnswerForm, CallForm, declared_calls
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
    call is text.

    Args:
        tools: names of tools, and the schemas of their arguments; None for no calls.
        parallel: whether an answer may have more than one call; otherwise it ends with the first.
        thinks: whether the answer begins in a thought: see ``AnswerForm.opened``.

    Attributes:
        calls: those that have begun. thoughts: half-open spans of the thoughts, in characters of all that was fed.
    """

    def __init__(
        self, form: AnswerForm, tools: Mapping[str, Schema] | Sequence[str] | None = None, *, parallel: bool = True,
        thinks: bool = False,
    ) -> None:  # fmt: skip
        self.form, self.parallel = form, parallel
        self.tools = dict(tools) if isinstance(tools, Mapping) else dict.fromkeys(tools or (), Schema())
        self.calls, self.thoughts = list[Call](), list[list[int]]()
        calls = form.calls if tools or form.anywhere else CallForm("none", sections=form.calls.sections)
        self._events, self._held, self._fed, self._searched = list[Event](), "", 0, 0
        self._mode: Literal["text", "thought", "arguments", "tail"] = "text"
        self._fresh = self._begins = True  # nothing but blanks since a mark; nothing but blanks and thoughts at all
        self._thought_ended = False  # a thought is the newest
        self._blanks = ""  # at the end of a thought or text so far, or between two of them
        self._told = set[str]()  # kinds of events so far
        self._arguments: JsonArguments | Parameters = JsonArguments()  # of the newest call
        thought = form.open if form.anywhere else NEVER
        start = f"(?P<thought>{thought})|(?P<call>{calls.open})|(?P<section>{calls.sections or NEVER})"
        last = rf"\s*(?:{calls.close}|(?={calls.open}))"
        compiled = [form.open, form.close, start, calls.close, calls.head, calls.tail, last]
        self._form = calls
        self._open, self._end, self._start, self._close, self._head, self._tail, self._last = (
            regex.compile(pattern, regex.DOTALL) for pattern in compiled
        )
        if thinks:
            self._think(0)

    @property
    def thinks(self) -> bool:
        """Whether the answer is in a thought."""
        return self._mode == "thought"

    @property
    def ended(self) -> bool:
        """Whether the answer has all the calls that it may have."""
        return bool(self.calls) and not self.parallel and not self.calling

    @property
    def calling(self) -> bool:
        """Whether the answer is in a call that has begun."""
        return self._mode in ("arguments", "tail")

    @property
    def whole_calls(self) -> list[Call]:
        """The calls without one that is not at its end."""
        return self.calls[: len(self.calls) - self.calling]

    @property
    def marks(self) -> str:
        """A text that contains every token that is a mark of this reader."""
        marks = self.form.open, self.form.close, self._form if self.tools else self._form.sections
        return str(marks).replace("\\", "")

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
        if final and self._mode == "text" and self._blanks and not self._fresh:
            self._events.append(Event("text", self._blanks))
        return self._events

    def end(self, *, cut: bool = False) -> list[Event]:
        """The last events: see ``feed``."""
        return self.feed("", final=True, cut=cut)

    # ---- modes: each reads what is held, and says whether there may be more to read --------------------------------------

    def _text(self, final: bool, cut: bool) -> bool:
        if self._fresh and self.form.thinks and not self.form.anywhere:
            blanks = len(self._held) - len(self._held.lstrip())
            begin = self._open.match(self._held, blanks, partial=cut or not final)
            if begin is not None and begin.partial:
                return False
            if begin is not None:
                self._think(begin.end())
                return True
            self._take(blanks if self._thought_ended else 0)
            self._thought_ended = self._thought_ended and not self._held
        if self._form.bare and self.tools and self._begins and not self.calls:
            begun = self._held.lstrip()
            if not begun or begun[0] in "[{":  # it begins as a call does, and waits
                marked = begun and self._start.match(begun, partial=not final)
                if self._offer(self._json_calls(begun), len(self._held)) if final else not marked or marked.partial:
                    return False
        begin = self._start.search(self._held, partial=cut or not final)
        at = len(self._held) if begin is None else begin.start()
        at += cut and at == len(self._held) - 1  # one sign may be of any text
        self._say(at)
        if begin is None or begin.partial:  # of what may begin a mark
            return False
        if begin["thought"] is not None:
            self._think(begin.end() - at)
            return True
        if begin["call"] is not None:
            return self._begun(begin.end() - at, final, cut)
        self._take(begin.end() - at)
        self._fresh = True
        self._between("text")
        return True

    def _between(self, kind: str) -> None:
        """Begin another thought or text: a line of its own."""
        self._blanks = "\n" if kind in self._told else ""

    def _think(self, size: int) -> None:
        self._mode, self._fresh = "thought", True
        self._between("thought")
        self.thoughts.append([self._fed - len(self._held), self._fed])
        self._take(size)

    def _thought(self, final: bool, cut: bool) -> bool:
        if self._fresh:  # blanks, and a mark once more, where the prompt had it
            self._take(len(self._held) - len(self._held.lstrip()))
            again = self._open.match(self._held, partial=not final)
            if not self._held or (again is not None and again.partial):
                return False
            self._take(0 if again is None else again.end())
            self._held = self._held.lstrip()
            self._fresh = not self._held
        end = self._end.search(self._held, partial=cut or not final)  # half of a mark is no part of a thought
        at = len(self._held) if end is None else end.start()
        piece = self._blanks + self._take(at)
        said = piece.rstrip()
        self._blanks = piece[len(said) :]
        if said:
            self._events.append(Event("thought", said))
            self._told.add("thought")
        if end is None or end.partial:
            return False
        self._take(end.end() - at)
        self.thoughts[-1][1] = self._fed - len(self._held)
        self._mode, self._fresh, self._thought_ended = "text", True, True
        self._between("text")
        return True

    def _begun(self, inner: int, final: bool, cut: bool) -> bool:
        """Read a possible call at the start of the held text."""
        if self._form.head:
            head, begun = self._head.match(self._held, partial=cut or not final), self._held[inner:].lstrip()
            if head is not None and not head.partial and head["name"] in self.tools:
                call = self._new(head["name"], head.groupdict().get("id"))
                self._events.append(Event("call", call.name, call))
                tagged, self._mode = bool(self._form.key), "arguments"
                self._arguments = Parameters(self._form, self.tools[call.name]) if tagged else JsonArguments()
                self._take(head.end() if tagged else head.start("args"))
                return True
            if head is not None and head.partial:
                return False
            if begun and begun[0] not in "[{":
                self._say(max(1, inner))
                return True
        end = self._close.search(self._held, max(self._searched, inner), partial=not final)
        if (end is None or end.partial) and (cut or not final):
            self._searched = len(self._held) if end is None else end.start()
            return False
        stop, size = (len(self._held),) * 2 if end is None else end.span()
        block = self._held[:size]
        calls = self._json_calls(block[inner:stop]) or self._marked_calls(block)
        self._searched = 0
        if not self._offer(calls, size):
            self._say(max(1, inner))
        return True

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
        blanks = len(self._held) - len(self._held.lstrip(" \n}"))
        at = tail.end() if tail is not None else blanks if final else 0
        last = self._last.match(self._held, at, partial=cut or not final) if tagged else None
        if last is not None and last.partial and not final:
            return False
        self._write(self._arguments.closing)
        self._take(at if last is None else last.end())
        self._mode, self._fresh = "text", True
        return True

    # ---- calls that are read when they are whole ---------------------------------------------------------------------------

    def _marked_calls(self, block: str) -> list[Call]:
        """The calls of a text that is no JSON, their arguments typed by the tool's schema; none where it is something else."""
        found = [] if self._form.field is None else declared_calls(self._form.field, block)
        for one in found:
            if one.get("name") in [*self.tools] and isinstance(values := one.get("arguments"), dict):
                known = properties_of(schema := self.tools[one["name"]])
                texts = [(key, text) for key, text in values.items() if isinstance(text, str)]
                values |= {key: typed(text, types_of(known.get(key), schema)) for key, text in texts}
        return self._offered(found)

    def _json_calls(self, text: str) -> list[Call]:
        """The calls that a text is, as many as there may be; none where it is something else."""
        found, at, read = list[object](), 0, json.JSONDecoder()
        with suppress(ValueError, RecursionError):
            while text := text[at:].lstrip("; \n"):  # Llama's stand in a row
                value, at = read.raw_decode(text)
                found += value if isinstance(value, list) else [value]
            return self._offered(found)
        return []

    def _offered(self, found: Sequence[object]) -> list[Call]:
        """Calls, as many as there may be; none where one is of no tool."""
        calls = list[Call]()
        for one in found:
            if not isinstance(one, dict) or one.get("name") not in [*self.tools]:  # it may be a list
                return []
            said = one.get("arguments") or one.get("parameters") or {}
            text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, allow_nan=False)
            calls.append(self._call_of(one["name"], None, text))
        return calls if self.parallel else calls[:1]

    def _call_of(self, name: str, id: str | None, arguments: str = "") -> Call:
        """A call, with the id that the model gave it, or a new one in the model's own form."""
        if id is None and self._form.name == "list":  # Mistral's templates take nine letters and digits
            id = secrets.token_hex(5)[:9]
        return Call(name, arguments) if id is None else Call(name, arguments, id)

    def _new(self, name: str, id: str | None) -> Call:
        self.calls.append(call := self._call_of(name, id))
        self._begins, self._blanks = False, ""
        return call

    def _offer(self, calls: list[Call], size: int) -> bool:
        """Emit calls that take ``size`` characters of the held text. Returns whether there are any."""
        for call in calls:
            self._events += [Event("call", call.name, call), Event("arguments", call.arguments, call)]
        self.calls += calls
        if calls:
            self._take(size)
            self._fresh, self._begins, self._blanks = True, False, ""
        return bool(calls)

    def _take(self, size: int) -> str:
        """The first ``size`` characters of the held text, removed from it."""
        piece, self._held = self._held[:size], self._held[size:]
        return piece

    def _say(self, size: int) -> None:
        """Emit ``size`` characters of the held text as text."""
        piece = self._take(size)
        if not piece:
            return
        if piece.strip():
            self._fresh = self._begins = False
        piece = self._blanks + piece
        said = piece.rstrip() if self.tools else piece
        self._blanks = piece[len(said) :]
        if said:
            self._events.append(Event("text", said))
            self._told.add("text")
