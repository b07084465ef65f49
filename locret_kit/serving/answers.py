"""Answers on their way from the engine to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from ..naming import first_line
from ..runtime.kept_text import token_texts
from ..runtime.sequence import Logprob
from ..runtime.tokens import answer_text, token_bytes
from .engine import Engine
from .errors import Failed
from .request import ServerRequest, Stopping
from .tools import CLOSE, Call, CallReader

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
        self._starts: list[int] = []  # of tokens, in characters of the text; where they are wanted
        self._news, self._loop = asyncio.Event(), asyncio.get_running_loop()
        one = calls is not None and not calls.parallel
        ends = [*stops, CLOSE] if one else stops
        self._window = 8 + 4 * max((len(end) for end in ends), default=0)  # a character has 4 tokens at most
        request.on_change, request.stop_at = self._tell, self._stopped if ends else None

    def _tell(self) -> None:
        """Wake the event loop, from the engine's thread."""
        self._loop.call_soon_threadsafe(self._news.set)

    def _stopped(self, tokens: Sequence[int]) -> int | None:
        """Number of tokens before a stop text, or with the one call that there may be, where the newest of them show its end;
        asked by the engine's thread, so that nothing is written after it."""
        newest = self._decode(tokens[-self._window :])
        if self.calls is not None and CLOSE in newest and self.calls.ends_in(self._decode(tokens)):
            return len(tokens)
        if not any(stop in newest for stop in self.stops):
            return None
        end = self._end(self._decode(tokens))
        return next((at for at in range(len(tokens), 0, -1) if end is None or len(self._decode(tokens[:at])) <= end), 0)

    def _end(self, said: str) -> int | None:
        """Place at which the first stop text begins."""
        return min((at for stop in self.stops if (at := said.find(stop)) >= 0), default=None)

    def _decode(self, tokens: Sequence[int]) -> str:
        return answer_text(self.engine.tokenizer, tokens)

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
        text, calls = self.calls.end()
        if text or calls:
            yield AnswerPiece(text, self.shown_tokens, self.shown_tokens, calls)
        if self.calls.calls:
            self.reason = "tool_calls"

    async def texts(self) -> AsyncIterator[AnswerPiece]:
        """Pieces of final text, as the model writes it.

        Raises:
            ValueError: the request cannot be answered. Failed: the engine could not. Stopping: the server stops.
        """
        shown, withheld = 0, max((len(stop) for stop in self.stops), default=1) - 1
        while True:
            await self._news.wait()
            self._news.clear()
            sequence = self.request.sequence
            if sequence is None:
                continue
            ended, tokens = sequence.finish_reason, list(sequence.tokens)
            if ended == "cancelled":
                raise Stopping("the server is stopping")
            if sequence.error is not None:
                raise sequence.error if isinstance(sequence.error, ValueError) else Failed(first_line(sequence.error))
            said = self._decode(tokens)
            end = self._end(said)
            if end is not None:
                self.stop_text = next(stop for stop in self.stops if said.startswith(stop, end))
                said, ended = said[:end], "stop"
                self.leave()
            elif ended is None:  # neither half a character, nor what may begin a stop text
                if said.endswith("\ufffd"):
                    continue
                said = said[: max(shown, len(said) - withheld)]
            start = self.shown_tokens
            self.shown_tokens = self._count(tokens, None if ended and end is None else len(said))
            if len(said) > shown or self.shown_tokens > start:
                yield AnswerPiece(said[shown:], start, self.shown_tokens)
                shown = max(shown, len(said))
            if ended is not None:
                self.reason = "length" if ended in ("length", "read") else "stop"
                return

    def _count(self, tokens: list[int], end: int | None) -> int:
        """Number of tokens that begin before a character; 0 where nobody wants to know."""
        if self.request.top_logprobs is None:
            return 0
        for at in range(len(self._starts), len(tokens)):
            self._starts.append(len(self._decode(tokens[:at]).rstrip("\ufffd")))
        return len(tokens) if end is None else max(self.shown_tokens, sum(start < end for start in self._starts))

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
        return {
            "tokens": [spell(token) for token, _ in pairs],
            "token_logprobs": [one.token for _, one in pairs],
            "top_logprobs": [
                {spell(id): value for id, value in one.top} | {spell(token): one.token} for token, one in pairs
            ],
            "text_offset": [at + len(self.echoed) for at in self._starts[start:end]],
        }

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
        return {
            "tokens": [spell(token) for token in ids],
            "token_logprobs": [None, *values],
            "top_logprobs": [None, *tops],
            "text_offset": [0, *accumulate(len(text) for text in texts[:-1])],
        }
