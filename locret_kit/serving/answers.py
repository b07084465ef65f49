"""Answers on their way from the engine to the client."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import itemgetter

from ..naming import first_line
from ..runtime.kept_text import token_texts
from ..runtime.sequence import Logprob
from ..runtime.tokens import TextStream, token_bytes
from .engine import Engine
from .errors import Failed
from .request import ServerRequest, Stopping
from .tools import Call, CallReader

LEAST = -9999.0
"""Log-probability of a token that cannot be, as OpenAI has it: JSON has no infinity."""


@dataclass(frozen=True)
class AnswerPiece:
    """Final text of an answer, which of its tokens begin in it, and the calls of tools that end in it."""

    text: str
    start: int
    end: int
    calls: list[Call] = field(default_factory=list)


class AnswerStream:
    """One answer on its way to the client: final text, cut at the first stop text.

    Args:
        echoes: whether the prompt's text stands before it. calls: a reader of calls of tools; None where there are none.

    Attributes:
        reason: why it ended: "stop", "length" or "tool_calls". stop_text: the stop text at which it ended; None where at none.
    """

    def __init__(
        self, engine: Engine, request: ServerRequest, stops: Sequence[str], *, echoes: bool = False,
        calls: CallReader | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.request, self.stops, self.echoes, self.calls = engine, request, stops, echoes, calls
        self.reason, self.shown_tokens = "stop", 0
        self.stop_text: str | None = None
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        # Written by the engine's thread: final text, of which each token has a piece, and its characters after so many tokens.
        self._text, self._said, self._ends = self._stream(), list[str](), [0]
        self._withheld = max((len(stop) for stop in stops), default=1) - 1  # characters that may begin a stop text
        self._newest = ""
        self._cut: int | None = None
        self._ended: str | None = None
        self._first_call = deepcopy(calls) if calls is not None and not calls.parallel else None
        request.on_change, request.stop_at = self._tell, self._take

    def _stream(self) -> TextStream:
        tokenizer = self.engine.tokenizer
        marks = tokenizer.get_added_vocab().items() if self.calls is not None else ()
        return TextStream(
            tokenizer, shown=frozenset(at for mark, at in marks if self.calls and mark in self.calls.marks)
        )

    def _tell(self) -> None:
        """Wake the event loop, from the engine's thread."""
        sequence = self.request.sequence
        if sequence is not None and sequence.finish_reason is not None and self._ended is None:
            self._add(self._text.end())
            self._ended = sequence.finish_reason
        self._loop.call_soon_threadsafe(self._news.set)

    def _take(self, tokens: Sequence[int]) -> int | None:
        """Take the newest tokens, from the engine's thread. Gives the number of tokens before a stop text, or with the one call
        that there may be, where these show its end, so that nothing is written after it."""
        ends = self._ends
        for token in tokens[len(ends) - 1 :]:
            ends.append(ends[-1])
            self._add(self._text.add(token))
        if self._cut is not None:
            return bisect_left(ends, ends[bisect_right(ends, self._cut) - 1])
        return len(tokens) if self._first_call is not None and self._first_call.ended else None

    def _add(self, piece: str) -> None:
        """Add final text. Where stop texts end in it, the answer is cut at the one that begins first."""
        if not piece or self._cut is not None:
            return
        text = self._newest + piece
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.stop_text = min(found, key=itemgetter(0))
            self._cut = self._ends[-1] - len(self._newest) + at
        elif self._first_call is not None:
            self._first_call.feed(piece)
        self._newest = text[max(0, len(text) - self._withheld) :]
        self._ends[-1] += len(piece)
        self._said.append(piece)

    def leave(self) -> None:
        """Cancel what is still running."""
        if self.request.sequence is None or self.request.sequence.finish_reason is None:
            self.engine.cancel(self.request)

    async def whole(self) -> AnswerPiece:
        """All of the answer."""
        pieces = [piece async for piece in self.pieces()]
        calls = [call for piece in pieces for call in piece.calls]
        return AnswerPiece("".join(piece.text for piece in pieces), 0, self.shown_tokens, calls)

    async def blocks(self) -> AsyncIterator[tuple[int, str | Call]]:
        """Pieces of text and calls of tools, each with the number of its block: a run of text, or one call. Blanks
        around calls are left out. Raises as ``pieces``."""
        number, in_text, blanks = -1, False, ""
        async for piece in self.pieces():
            text = blanks + piece.text
            blanks = text[len(text.rstrip()) :] if self.calls is not None else ""
            if text := text.removesuffix(blanks):
                number += not in_text
                in_text = True
                yield number, text
            for call in piece.calls:
                number, in_text, blanks = number + 1, False, ""
                yield number, call
        if in_text and blanks:
            yield number, blanks

    async def whole_blocks(self) -> list[str | Call]:
        """All of the answer, by blocks."""
        made: dict[int, str | Call] = {}
        async for number, part in self.blocks():
            made[number] = f"{made.get(number, '')}{part}" if isinstance(part, str) else part
        return [*made.values()]

    async def pieces(self) -> AsyncIterator[AnswerPiece]:
        """Pieces of text, and calls of tools, each when it is whole. Raises as ``texts``."""
        if self.calls is None:
            async for piece in self.texts():
                yield piece
            return
        async for piece in self.texts():
            text, calls = self.calls.feed(piece.text)
            yield replace(piece, text=text, calls=calls)
        text, calls = self.calls.end(cut=self.reason == "length")
        if text or calls:
            yield AnswerPiece(text, self.shown_tokens, self.shown_tokens, calls)
        if self.calls.calls:
            self.reason = "tool_calls"

    async def texts(self) -> AsyncIterator[AnswerPiece]:
        """Pieces of final text, as the model writes it.

        Raises:
            ValueError: the request cannot be answered. Failed: the engine could not. Stopping: the server stops.
        """
        rest, taken, shown = "", 0, 0
        while True:
            await self._news.wait()
            self._news.clear()
            sequence, ended = self.request.sequence, self._ended
            if sequence is None:
                continue
            if ended == "cancelled":
                raise Stopping("the server is stopping")
            if sequence.error is not None:
                raise sequence.error if isinstance(sequence.error, ValueError) else Failed(first_line(sequence.error))
            new = self._said[taken:]
            rest, taken = rest + "".join(new), taken + len(new)
            size = len(rest) if ended else max(0, len(rest) - self._withheld)
            size = size if self._cut is None else min(size, self._cut - shown)
            shown, start = shown + size, self.shown_tokens
            if self.request.top_logprobs is not None:
                tokens = min(len(sequence.tokens), len(self._ends) - 1)
                all_shown = ended and self._cut is None
                self.shown_tokens = tokens if all_shown else bisect_left(self._ends, shown, 0, tokens)
            if size or self.shown_tokens > start:
                yield AnswerPiece(rest[:size], start, self.shown_tokens)
                rest = rest[size:]
            if ended is not None:
                self.reason = "length" if ended in ("length", "read") and self._cut is None else "stop"
                return

    def logprobs(self, kind: str, start: int, end: int) -> dict[str, object] | None:
        """Log-probabilities of some tokens, as the protocol has them."""
        sequence = self.request.sequence
        if sequence is None or self.request.top_logprobs is None:
            return None
        spell = lru_cache(lambda token: str(self.engine.tokenizer.decode([token])))
        finite = [
            Logprob(max(one.token, LEAST), tuple((id, max(value, LEAST)) for id, value in one.top))
            for one in sequence.logprobs[start:end]
        ]
        pairs = list(zip(sequence.tokens[start:end], finite, strict=True))
        if kind == "chat.completion":

            def entry(token: int, value: float) -> dict[str, object]:
                return {"token": spell(token), "logprob": value, "bytes": [*token_bytes(self.engine.tokenizer, token)]}

            return {
                "content": [
                    entry(token, one.token) | {"top_logprobs": [entry(*pair) for pair in one.top]}
                    for token, one in pairs
                ]
            }
        said, values = [spell(token) for token, _ in pairs], [one.token for _, one in pairs]
        tops = [{spell(id): value for id, value in one.top} | {spell(token): one.token} for token, one in pairs]
        offsets = [at + len(self.echoed) for at in self._ends[start:end]]
        return {"tokens": said, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    @cached_property
    def echoed(self) -> str:
        """The prompt's text, where it is to stand before the answer."""
        return str(self.engine.tokenizer.decode(list(self.request.ids))) if self.echoes else ""

    def echo_logprobs(self) -> dict[str, object] | None:
        """Log-probabilities of the prompt's tokens, the first of which has none, as the protocol has them."""
        sequence = self.request.sequence
        if sequence is None or not self.request.prompt_logprobs:
            return None
        decode, ids = self.engine.tokenizer.decode, list(self.request.ids)
        spell = lru_cache(lambda token: str(decode([token])))
        texts = token_texts(self.engine.tokenizer, ids)
        tops = [{spell(id): max(value, LEAST) for id, value in one.top} for one in sequence.prompt_logprobs]
        values = [max(one.token, LEAST) for one in sequence.prompt_logprobs]
        for token, top, value in zip(ids[1:], tops, values, strict=True):
            top[spell(token)] = value
        said, offsets = [spell(token) for token in ids], [0, *accumulate(len(text) for text in texts[:-1])]
        return {
            "tokens": said,
            "token_logprobs": [None, *values],
            "top_logprobs": [None, *tops],
            "text_offset": offsets,
        }
