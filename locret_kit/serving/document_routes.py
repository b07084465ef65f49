"""Documents: uploaded, read once among other requests, listed, shown and deleted."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from array import array
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from fastapi import FastAPI, File, Form, HTTPException, Query, Request, UploadFile
from fastapi.responses import JSONResponse, Response
from transformers import PreTrainedModel

from ..documents.document import Document, Progress
from ..documents.document_text import DocumentText
from ..documents.kept import kept_of
from ..engine import BoundedCache
from ..naming import first_line, prefixed_errors
from ..settings import INT32_MAX, too_few
from ..text.reader import Unwanted
from ..text.tokens import TooManyTokens
from .engine_thread import EngineThread
from .messages import Refused
from .request import LOG
from .state import Server, UploadedDocument

FAILED = 16
"""Uploads of an owner that failed and are still listed, at most."""
SAVED = (".locret", ".safetensors")
"""Ends of the names of saved caches."""
STRETCHES = 200
"""Parts of a text in its overview, at most."""


def add_documents(app: FastAPI, server: Server) -> None:
    """Serve ``/v1/documents``."""

    @app.post("/v1/documents")
    async def create(
        files: Annotated[list[UploadFile], File(alias="file", max_length=1)], request: Request,
        budget: Annotated[int | None, Form(ge=1)] = None,
    ) -> Response:  # fmt: skip
        (file,) = files
        owner, engine = server.owner(request), server.ready()
        saved = (file.filename or "").lower().endswith(SAVED)
        if budget is not None and (saved or budget > engine.document_budget):
            most = f"must be at most {engine.document_budget}, the slots of a document here"
            said = "has no effect on a saved cache, which was read with its own" if saved else most
            raise Refused(400, f"budget={budget} {said}", "budget")
        try:
            data: bytes | BinaryIO = await asyncio.to_thread(on_disk, file) if saved else await file.read()
        except OSError as error:
            raise HTTPException(507) from error
        if server.places >= server.limits.documents:  # after the last await: two uploads cannot both pass
            mine = next((one["title"] for one in server.listed(owner) if "error" not in one), None)
            others = "all of other API keys, or deleted while they are read"
            said = f"delete one first, such as {mine!r}" if mine else others
            said = f"{server.places} documents are held already, documents={server.limits.documents} at most: {said}"
            said = said if server.limits.documents else "documents=0: the server takes none"
            raise Refused(429, said, headers={"x-should-retry": "false"})  # none leaves by itself
        # Its end tells the format. A form may name a charset that gives halves of surrogate pairs.
        title = (file.filename or "document")[-200:].encode("utf-8", "replace").decode()
        upload = UploadedDocument(f"doc_{secrets.token_hex(16)}", owner, title, int(time.time()))
        server.documents[upload.id] = upload
        failed = [one.id for one in server.documents.values() if one.owner == owner and one.error is not None]
        for old in failed[:-FAILED]:  # they hold no place, and no memory for good either
            server.documents.pop(old, None)
        task = asyncio.create_task(read_document(server, engine, upload, data, budget))
        server.tasks.add(task)
        task.add_done_callback(server.tasks.discard)
        return JSONResponse(upload.shown(), 202)

    @app.get("/v1/documents")
    async def documents(request: Request) -> dict[str, object]:
        return {"object": "list", "data": server.listed(server.owner(request))}

    @app.get("/v1/documents/{name}")
    async def document(name: str, request: Request) -> dict[str, object]:
        return server.document(server.owner(request), name).shown()

    @app.get("/v1/documents/{name}/kept")
    def kept(
        name: str, request: Request, start: Annotated[int, Query(ge=0, le=INT32_MAX)] = 0,
        limit: Annotated[int, Query(ge=1, le=4000)] = 1000,
    ) -> dict[str, object]:  # fmt: skip
        page = kept_page(server.ready_document(server.owner(request), name), start, limit)
        return {"id": name, "object": "document.kept", **page}

    @app.delete("/v1/documents/{name}")
    async def delete(name: str, request: Request) -> dict[str, object]:
        engine, upload = server.ready(), server.document(server.owner(request), name)
        upload.deleted = True
        if upload.document is not None or upload.error is not None:
            server.documents.pop(upload.id, None)  # another thread may have seen first that its file is gone
        engine.forget(upload.id)
        return {"id": upload.id, "object": "document", "deleted": True}


def on_disk(upload: UploadFile) -> BinaryIO:
    """An upload as a file of its own that has no name, so that it is gone when nobody has it open, whatever ends the process.

    Raises:
        OSError: the disk has no room.
    """
    number = upload.file.fileno()  # a small one goes to disk now
    upload.file.flush()
    file = os.fdopen(os.dup(number), "rb")
    file.seek(0)
    return file


async def read_document(
    server: Server, engine: EngineThread, upload: UploadedDocument, data: bytes | BinaryIO, budget: int | None
) -> None:
    """Convert an upload and read it, among other requests, or load it as the saved cache that it is; a document that is
    deleted meanwhile ends here. ``budget``: its slots; None for those of a session."""
    settings = engine.settings if budget is None else engine.settings_for(budget)

    def progress(done: int, total: int) -> None:
        if upload.deleted:
            raise Unwanted
        upload.read, upload.total = done, total

    def reader(model: PreTrainedModel, ids: array[int], cache: BoundedCache, progress: Progress | None) -> None:
        finds_again = cache.policy.keeps_everything or cache.policy.recall or cache.policy.reread
        if not finds_again and (few := too_few(cache.settings.budget, len(ids))):
            most = f"; documents have up to {engine.document_budget:,} here"
            upload.lost.append(few.replace("--budget", "a budget of") + most)
        engine.read(model, ids, cache, progress)

    def read(text: str) -> Document:
        with prefixed_errors(upload.title, TooManyTokens):
            whole = DocumentText.of(engine.tokenizer, text, True, server.limits.prompt_tokens)
        return Document.read(
            engine.model, engine.tokenizer, whole, settings, engine.policy, engine.policy.heads_for(engine.heads),
            title=upload.title, progress=progress, reader=reader, ahead=True,
        )  # fmt: skip

    name = "" if isinstance(data, bytes) else f"/dev/fd/{data.fileno()}"
    try:
        if not isinstance(data, bytes):
            upload.document = await server.in_turn("short", upload.owner, lambda: engine.load_document(Path(name)))
        else:
            text = await server.text_of(data, upload)
            upload.document = await asyncio.get_running_loop().run_in_executor(server.readers, read, text)
    except ImportError as error:  # its words name files of this machine
        upload.error = f"{upload.title}: the server lacks a library that this format needs, which its log names"
        LOG.warning("document %s failed: %s", upload.id, first_line(error).encode("unicode_escape").decode())
    except Exception as error:
        upload.error = first_line(error).replace(name, upload.title) if name else first_line(error)
        LOG.info("document %s failed: %s", upload.id, type(error).__name__)
    else:
        if not upload.deleted:
            engine.save_document(upload.id, upload.owner, upload.document)
    finally:
        if not isinstance(data, bytes):
            data.close()
    if upload.deleted:
        server.documents.pop(upload.id, None)
        engine.forget(upload.id)


def kept_page(document: Document, start: int, limit: int) -> dict[str, object]:
    """Up to ``limit`` tokens of a document from ``start`` on, and the share of heads that keep each.

    ``shares`` are of the key/value heads that hold a token, None if the token is read with each question. ``overview`` has the
    average share in each of up to 200 equal stretches of the read tokens.

    Raises:
        ValueError: the document was loaded from a file without its text.
    """
    kept = kept_of(document)
    counts, heads = kept.heads()
    heads = heads if kept.seen else 0  # of a short text nothing is read ahead
    share_T = counts / max(1, heads)
    end = min(start + limit, len(kept.ids))
    shares: list[float | None] = [*share_T[start:end].tolist()]
    return {
        "total_tokens": len(kept.ids), "seen": kept.seen, "heads": heads, "held": int((counts > 0).sum()), "start": start,
        "texts": kept.texts(document.tokenizer, start, end), "shares": shares + [None] * (end - start - len(shares)),
        "overview": [float(part.mean()) for part in np.array_split(share_T, min(STRETCHES, kept.seen))] if heads else [],
    }  # fmt: skip
