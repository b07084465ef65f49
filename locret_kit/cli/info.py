"""``locret-info book.locret``: what a file says of itself. No model, no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ..config.infer_options import INFO, InfoOptions
from ..planning.reading import too_few
from .command import entry
from .terminal import plain

Fields = dict[str, object]


def run(args: InfoOptions) -> int:
    """Raises ValueError or OSError with a one-line message."""
    from ..cache.file import read_record

    path = Path(args.file)
    record = read_record(path)
    if args.json:
        print(json.dumps({**record, "bytes": path.stat().st_size}, indent=2))
        return 0
    lines = [(name, value) for name, value in rows(record, path.stat().st_size) if value not in ("", None)]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {plain(value)}")
    return 0


def rows(record: Fields, size: int) -> Iterator[tuple[str, object]]:
    """Lines of the table: a name and a value. Nothing of the file is trusted to be there, or to be what it should be."""
    text, model, settings = (part(record, name) for name in ("document", "model", "settings"))
    names, config = part(text, "names"), part(model, "config")
    layers = record.get("layers")
    states = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    rows = [count for layer in states if type(count := layer.get("rows")) is int]
    yield "title", text.get("title")
    seen = number(states[0].get("seen") if states else None)
    yield "tokens", f"{number(text.get('tokens'))}, {seen} of them in the cache"
    yield "text", "stored" if text.get("text") else "not stored" if text else "a cache without a document"
    yield "questions", "through the chat template" if text.get("chat") else "as they are"
    shape = f"{number(config.get('num_hidden_layers'))} layers"
    bits = model.get("weight_bits")
    weights = f", weights in {bits}{' bits' if type(bits) is int else ''}" if bits else ""
    yield "model", f"{names.get('model') or model.get('name')} ({shape}{weights})"
    yield "model's revision", model.get("revision")
    yield "model's weights", model.get("weights")
    yield "adapter", names.get("adapter")
    heads = record.get("heads")
    yield "heads", f"{names.get('heads', 'not named')} ({heads})" if heads else "none"
    yield "policy", record.get("policy")
    for name, value in part(record, "parts").items():
        yield f"  {name}", value
    yield "settings", "of this text"
    for name, value in settings.items():
        if name != "backend":
            yield f"  {name}", value
    low, high = min(rows, default=0), max(rows, default=0)
    slots = f"{number(high)} a head and layer" if low == high else f"{number(low)} to {number(high)} a head, by layer"
    yield "slots", slots
    tokens, brings_back = text.get("tokens"), "recall" in part(record, "parts")
    yield "note", too_few(high, tokens) if type(tokens) is int and high > 0 and not brings_back else None
    yield "precision", record.get("dtype")
    yield "bytes", f"{number(size)} ({size / 2**20:.1f} MiB)"
    yield "written", f"{record.get('created')} by locret_kit {record.get('kit')}, format {record.get('version')}"
    yield "SHA-256 of the token ids", text.get("sha256")
    yield "SHA-256 of the content", record.get("digest")


def part(record: Fields, name: str) -> Fields:
    """A section of the record; an empty one where there is none."""
    section = record.get(name)
    return section if isinstance(section, dict) else {}


def number(value: object) -> str:
    """A count with thousands apart."""
    return f"{value:,}" if type(value) is int else "?"


main = entry(INFO, run)


if __name__ == "__main__":
    sys.exit(main())
