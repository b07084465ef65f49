"""What the server is, and texts as tokens."""

from __future__ import annotations

import asyncio
from array import array
from typing import Annotated

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from ..text.tokens import IdStream, TooManyTokens, token_texts
from .bodies import ChatBody
from .errors import checked
from .messages import Part
from .state import Server

MAX_TOKENS = 1 << 20
"""Tokens of a text, at most; where each comes with its piece, as many as a prompt may have."""


class Tokenize(Part):
    """``POST /tokenize``: of a text, or of the prompt that messages make, with fields of a chat completion."""

    model_config = ConfigDict(extra="allow")
    text: Annotated[str | None, Field(validation_alias=AliasChoices("content", "prompt"))] = None
    messages: list[dict[str, object]] | None = None
    special: Annotated[bool, Field(validation_alias=AliasChoices("add_special_tokens", "add_special"))] = False
    with_pieces: bool = False


class Detokenize(BaseModel):
    """``POST /detokenize``."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKENS)]


def add_information(app: FastAPI, server: Server) -> None:
    """Serve ``/v1/models``, ``/tokenize`` and ``/detokenize``, as vLLM and llama.cpp have them."""

    def model() -> dict[str, object]:
        length = server.limits.prompt_tokens
        return {
            "id": server.name, "object": "model", "created": server.started, "owned_by": "locret_kit", "root": server.name,
            "max_model_len": length, "context_length": length, "meta": {"n_ctx": length},
        }  # fmt: skip

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, object]:
        server.owner(request)
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one(name: str, request: Request) -> dict[str, object]:
        server.owner(request)
        if name != server.name:
            raise HTTPException(404, f"model {name[:64]!r} is not here: {server.name} is")
        return model()

    def tokenized(body: Tokenize) -> Response:
        tokenizer, length = server.ready().tokenizer, server.limits.prompt_tokens
        max_tokens = length if body.with_pieces else MAX_TOKENS
        try:
            if body.messages is not None:
                chat = checked(ChatBody, {**(body.model_extra or {}), "messages": body.messages})
                (ids,) = chat.ids(tokenizer, None, max_tokens)
            else:
                if body.text is None:
                    raise HTTPException(400, "content (or prompt, or messages) is missing")
                ids = IdStream(tokenizer, special=body.special, max_tokens=max_tokens).finish(body.text)
        except TooManyTokens:
            raise HTTPException(400, f"the text has more than {max_tokens} tokens, the most that are listed") from None
        tokens: list[object] = list(ids)
        if body.with_pieces:
            pieces = token_texts(tokenizer, list(ids))
            tokens = [{"id": token, "piece": piece} for token, piece in zip(ids, pieces, strict=True)]
        return JSONResponse({"tokens": tokens, "count": len(ids), "max_model_len": length})

    async def tokenize(body: Tokenize, request: Request) -> Response:
        server.owner(request)
        return await asyncio.to_thread(tokenized, body)

    async def detokenize(body: Detokenize, request: Request) -> dict[str, object]:
        server.owner(request)
        tokenizer = server.ready().tokenizer
        if wrong := next((token for token in body.tokens if token >= len(tokenizer)), None):
            raise HTTPException(400, f"tokens holds {wrong}, which is no token from 0 to {len(tokenizer) - 1}")
        text = str(await asyncio.to_thread(tokenizer.decode, list(array("q", body.tokens))))
        return {"content": text, "prompt": text}

    for base in ("", "/v1"):
        app.post(f"{base}/tokenize")(tokenize)
        app.post(f"{base}/detokenize")(detokenize)
