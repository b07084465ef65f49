"""Container of saved caches: one ``.safetensors`` file with a JSON record in its header. Nothing of it is ever executed.

Version 1. The record is the metadata ``locret_kit``; ``digest`` in it is the SHA-256 of the record without itself and of all
tensors in the order of their names. A digest tells damage, not deceit: readers check the record, dtypes and shapes, and what
indexes. Other numbers are the file's own.

A field more or less is another version. A later kit reads every version from 1 on; an unknown version is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from safetensors import SafetensorError, safe_open

from ..files import LaterVersion, as_object, parse_json, pointer_note, write_beside
from ..naming import first_line
from ..validation import display

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
RECORD = "locret_kit"
"""Metadata of the safetensors header that holds the record."""
LARGEST = 1 << 20
"""Bytes of a header, at most: a hundred layers take a fifth of it. JSON takes some 25 times its bytes when it is read."""
SUFFIX = ".locret"
"""Extension of files whose user names none."""
Record = dict[str, object]


def holds_tensors(first: bytes) -> bool:
    """Whether a file begins as safetensors: the header's size in eight bytes, and a brace."""
    return first[4:9] == b"\0\0\0\0{"


def is_saved(path: Path) -> bool:
    """Whether a file is a saved cache, by its name or its beginning. A pipe is not looked at."""
    if path.suffix == SUFFIX or not path.is_file():
        return path.suffix == SUFFIX
    with path.open("rb") as file:
        return holds_tensors(file.read(9))


def write(path: Path, record: Record, tensors: Mapping[str, Tensor], check: Callable[[], object] | None = None) -> str:
    """Write a file as ``files.write_beside`` does, with tensors of any shape; returns its digest.

    Args:
        check: called when all is written but the new file's name; if it raises, the old file stays.

    Raises:
        OSError: it cannot be written; the file that was there is whole. ValueError: the record is too large for a header.
    """
    from safetensors.torch import save

    body = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    record = {**record, "digest": digest(record, body)}
    # Our own reader would refuse it.
    if (size := header_bytes(record, len(body))) > LARGEST:
        raise ValueError(f"cannot write {path}: its header would take {size} bytes, of at most {LARGEST}")
    # Its save_file has a temporary file of its own, which a kill would leave.
    data = save(body, metadata={RECORD: json.dumps(record, ensure_ascii=False)})

    def whole(beside: Path) -> None:
        beside.write_bytes(data)
        if check is not None:
            check()

    write_beside(path, whole)
    return str(record["digest"])


def header_bytes(record: Record, tensors: int) -> int:
    """Bytes of a header with ``tensors`` tensors, about."""
    text = json.dumps(record, ensure_ascii=False)
    return len(json.dumps(text, ensure_ascii=False).encode()) + 200 * tensors  # 200: name, dtype, shape and place


def read_record(path: Path) -> Record:
    """The record alone, as ``locret-info`` shows it; no torch. Its digest is not checked.

    Raises:
        OSError: there is no such file. ValueError: it is no saved cache, or of a version that this kit does not read
            (``LaterVersion``).
    """
    with _opened(path) as file:
        return _record(path, _header(path, file))


def read(path: Path) -> tuple[Record, dict[str, Tensor], str]:
    """Record, tensors of their stored shape, and their digest, which was checked. Tensors take as much memory as the
    file has bytes.

    Raises:
        OSError: there is no such file. ValueError: it is no saved cache, of a later version, or damaged.
    """
    while True:
        with _opened(path) as opened:
            record = _record(path, _header(path, opened))
            try:
                with safe_open(path, framework="pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            except (SafetensorError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path} is damaged: {first_line(error)}") from error
            if os.path.samestat(os.fstat(opened.fileno()), path.stat()):  # no other file took its name meanwhile
                break
    # A flipped bit in a key would load and answer wrongly; the digest covers record and tensors alike.
    said = record.pop("digest", None)
    if said != digest(record, tensors):
        raise ValueError(f"{path} is damaged: its content does not have the digest that it states")
    return record, tensors, str(said)


def check_there(path: Path, expected: str | None, replace: bool) -> None:
    """Raise OSError where a file is there that may not be replaced, or that has another digest than the ``expected`` one."""
    if path.exists() and not replace:
        raise OSError(f"cannot write {path}: it is there already")
    if path.exists() and expected is not None and read_record(path).get("digest") != expected:
        raise OSError(f"cannot write {path}: somebody else has written it since it was loaded: load it again")


def _opened(path: Path) -> BinaryIO:
    """A file, open. Raises ValueError for a pipe, which would be waited for, and its likes."""
    path.stat()
    if not path.is_file():
        raise ValueError(f"{path} is no regular file, so no saved cache")
    return path.open("rb")


def _header(path: Path, file: BinaryIO) -> dict[str, object]:
    """The safetensors header, read by itself. It is checked before anything of the size that it states is read."""
    held, size = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if size > LARGEST:  # eight letters of a text are more
        raise ValueError(f"{path} is no saved cache: locret-read makes one of a text{pointer_note(path)}")
    if not 2 <= size <= held - 8:
        raise ValueError(f"{path} is no saved cache, or is truncated: {held} bytes, of which {size} are its header")
    return _object(file.read(size), f"{path}: its header")


def _record(path: Path, header: dict[str, object]) -> Record:
    metadata = header.get("__metadata__")
    text = metadata.get(RECORD) if isinstance(metadata, dict) and len(metadata) == 1 else None
    if not isinstance(text, str):
        raise ValueError(f"{path} is no saved cache: the metadata of its header is not {RECORD!r} alone")
    record = _object(text, f"{path}: its record")
    version = record.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        kind = LaterVersion if type(version) is int and version > VERSION else ValueError
        raise kind(f"{path} has version={display(version)}; this locret_kit reads versions 1 to {VERSION}")
    return record


def _object(text: str | bytes, where: str) -> Record:
    """A JSON object as it is written here: names once, numbers finite, texts Unicode.

    Raises:
        ValueError: it is none; one line that begins with ``where``.
    """
    return as_object(parse_json(text, where, strict=True), where)


def digest(record: Mapping[str, object], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hexadecimal) of a record and its tensors, with their names, dtypes and shapes: one of another shape
    has another digest."""
    import torch

    made = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
    # Names, dtypes and shapes too: the same bytes under another name are another file.
    for name in sorted(tensors):
        tensor = tensors[name]
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            made.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return made.hexdigest()
