"""The page at ``/``: three files that ask for nothing but this server; and what it shows of a document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..documents.document import Document
from ..documents.kept_positions import kept_of

FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
STRETCHES = 200
"""Parts of a text in its overview, at most."""


def add_page(app: FastAPI) -> None:
    """Serve the page. It needs no key: what it shows, it asks for with one."""
    for path, (name, kind) in FILES.items():
        body = files(__package__).joinpath(name).read_bytes()
        app.add_route(path, _always(Response(body, headers=HEADERS, media_type=kind)))


def _always(response: Response) -> Callable[[Request], Awaitable[Response]]:
    """A route with one answer."""

    async def answer(request: Request) -> Response:
        return response

    return answer


def kept_page(document: Document, start: int, limit: int) -> dict[str, object]:
    """Up to ``limit`` tokens of a document from ``start`` on, and what is kept of them.

    ``shares`` are of the key/value heads that hold a token, None where it is read with each question; ``overview`` has the
    average share of each of up to 200 equal stretches of what was read.

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
