"""``locret-info``: the record of a document. It imports no torch and loads no model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..cache.file import read_record
from ..config.infer_options import INFO, InfoOptions
from ..naming import prefixed_errors
from ..settings import too_few
from ..validation import display
from .command import entry


def run_info(args: InfoOptions) -> int:
    """Show a file's record. Raises ValueError or OSError with a one-line message."""
    path = Path(args.file)
    record, size = read_record(path), path.stat().st_size
    if args.json:
        print(json.dumps({**record, "bytes": size}, indent=2))
        return 0
    with prefixed_errors(f"{path} has a damaged record", TypeError, KeyError, AttributeError, IndexError):
        lines = [(name, value) for name, value in rows(record, size) if value not in ("", None)]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {display(value)}")
    return 0


def rows(record: dict[str, Any], size: int) -> Iterator[tuple[str, object]]:
    """Lines of the table: name and value."""
    text, model, states = record.get("document") or {}, record["model"], record["layers"]
    names, tokens, seen = text.get("names") or {}, text.get("tokens"), states[0]["seen"]
    yield "title", text.get("title")
    yield "tokens", f"{tokens:,}, {seen:,} of them in the cache" if text else f"{seen:,} in the cache"
    yield "text", "stored" if text.get("text") else "not stored" if text else "a cache without a document"
    yield "questions", "through the chat template" if text.get("chat") else "as they are"
    bits = model.get("weight_bits")
    weights = f", weights in {bits}{' bits' if type(bits) is int else ''}" if bits else ""
    layers = f"{model['config'].get('num_hidden_layers', '?')} layers"
    yield "model", f"{names.get('model') or model.get('name')} ({layers}{weights})"
    yield "model's revision", model.get("revision")
    yield "model's weights", model.get("weights")
    yield "adapter", names.get("adapter")
    heads = record.get("heads")
    yield "heads", f"{names.get('heads', 'not named')} ({heads})" if heads else "none"
    yield "policy", record.get("policy")
    for name, value in record["parts"].items():
        yield f"  {name}", value
    yield "settings", "of this text"
    for name, value in record["settings"].items():
        yield f"  {name}", value if name != "backend" else None
    counts = [state["rows"] for state in states if "rows" in state] or [0]
    low, high = min(counts), max(counts)
    yield "slots", f"{high:,} a head and layer" if low == high else f"{low:,} to {high:,} a head, by layer"
    found_again = record["parts"].keys() & {"recall", "reread"}
    yield "note", too_few(high, tokens) if tokens and high and not found_again else None
    yield "precision", record.get("dtype")
    yield "bytes", f"{size:,} ({size / 2**20:.1f} MiB)"
    yield "written", f"{record.get('created')} by locret_kit {record.get('kit')}, format {record.get('version')}"
    yield "SHA-256 of the token ids", text.get("sha256")
    yield "SHA-256 of the content", record.get("digest")


info = entry(INFO, run_info)
