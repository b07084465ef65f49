"""Keys of requests that belong together, so that one replica answers them. Knows no Ray."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping


def affinity_key(path: str, headers: Mapping[str, str], body: bytes) -> str:
    """The name of what a request goes on from: a document's id, the client's own name of a session (``x-session-id``, Open
    WebUI's chat id), else a hash of how the conversation begins, which every turn sends again. '' for none of them.
    """
    if path.startswith("/v1/documents/"):
        return path.split("/")[3]
    if not path.endswith(("/completions", "/responses", "/messages")):
        return ""
    try:
        asked = json.loads(body)
        if asked.get("document_id"):
            return str(asked["document_id"])[:100]
        given = asked.get("messages") or asked.get("input") or []
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), len(messages))
        begins = json.dumps(messages[: first + 1]) if messages else str(asked.get("prompt"))[:256]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # the server says what is wrong
        return ""
    said = headers.get("x-session-id") or headers.get("x-openwebui-chat-id") or begins
    key = headers.get("authorization") or headers.get("x-api-key", "")
    return hashlib.sha256(f"{key}\n{said}".encode("utf-8", "replace")).hexdigest()[:32]
