"""Answers as OpenAI's protocol has them, whole and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

from ..naming import first_line
from .answers import AnswerStream
from .bodies import CompletionBody
from .errors import Failed, problem
from .request import Stopping

Logprobs = dict[str, object] | None


async def events(
    answers: Sequence[AnswerStream], body: CompletionBody, kind: str, head: dict[str, object]
) -> AsyncIterator[str]:
    """Server-sent events of a streamed answer; choices one after another."""
    name = "chat.completion.chunk" if kind == "chat.completion" else kind
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    extra = {"usage": None} if wants_usage else {}

    def event(value: dict[str, object]) -> str:
        return f"data: {json.dumps({**head, 'object': name, **value}, ensure_ascii=False)}\n\n"

    try:
        for i, answer in enumerate(answers):
            if kind == "chat.completion":
                yield event({"choices": [delta(kind, i, "", None, first=True)], **extra})
            async for piece in answer.pieces():
                values = answer.logprobs(kind, piece.start, piece.end)
                yield event({"choices": [delta(kind, i, piece.text, None, values)], **extra})
            yield event({"choices": [delta(kind, i, "", answer.reason, last=True)], **extra})
        if wants_usage:
            yield event({"choices": [], "usage": usage(answers)})
        yield "data: [DONE]\n\n"
    except (ValueError, Failed, Stopping) as error:  # with the type that a whole answer's error has
        status = 503 if isinstance(error, Stopping) else 400 if isinstance(error, ValueError) else 500
        yield f"data: {bytes(problem(status, first_line(error)).body).decode()}\n\n"


def choice(kind: str, index: int, text: str, reason: str, logprobs: Logprobs) -> dict[str, object]:
    """One choice of a whole answer."""
    said = {"message": {"role": "assistant", "content": text}} if kind == "chat.completion" else {"text": text}
    return {"index": index, **said, "finish_reason": reason, "logprobs": logprobs}


def delta(
    kind: str, index: int, text: str, reason: str | None, logprobs: Logprobs = None, *,
    first: bool = False, last: bool = False,
) -> dict[str, object]:  # fmt: skip
    """One choice of an event."""
    end: dict[str, object] = {"finish_reason": reason, "logprobs": logprobs}
    if kind != "chat.completion":
        return {"index": index, "text": text, **end}
    said: dict[str, str] = {} if last else {"content": text}
    return {"index": index, "delta": {"role": "assistant", **said} if first else said, **end}


def usage(answers: Sequence[AnswerStream]) -> dict[str, object]:
    """Tokens of a request; ``locret`` has the cache's own figures."""
    requests = [answer.request for answer in answers]
    new = sum(len(one.sequence.tokens) for one in requests if one.sequence is not None)
    prompt = len(requests[0].ids)
    return {
        "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": requests[0].cached_tokens},
        "locret": {"evictions": max(one.evictions for one in requests), "kept_rows": max(one.kept_rows for one in requests)},
    }  # fmt: skip
