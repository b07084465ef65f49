"""Zip archives of strangers, such as a .docx or an .epub."""

from __future__ import annotations

from io import BytesIO
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

from .losses import Refusal


def stored(data: bytes, name: str, limit: int) -> BytesIO:
    """The same zip archive with its entries stored, not packed.

    Entries are unpacked here in pieces, up to the sizes that they declare and no further. A converter that unpacks an entry at
    once would unpack what a header hides.
    """
    out, locked = BytesIO(), Refusal(f"{name} is encrypted: only a copy without protection can be read")
    with ZipFile(BytesIO(data)) as archive, ZipFile(out, "w", ZIP_STORED) as copy:
        entries = archive.infolist()
        if (total := sum(entry.file_size for entry in entries)) > limit:
            raise Refusal(f"{name} holds {total} bytes unpacked, more than limit={limit}")
        for entry in entries:
            if entry.flag_bits & 1:
                raise locked
            if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
                raise Refusal(f"{name} is packed by an unusual method ({entry.filename}): pack it anew")
            if entry.is_dir() or entry.filename.lower().startswith(
                "customxml/"
            ):  # no text; Word misspells some of them
                continue
            with archive.open(entry) as packed, copy.open(entry.filename, "w") as unpacked:
                while piece := packed.read(1 << 16):
                    if entry.filename == "META-INF/encryption.xml" and b"xmlenc#aes" in piece:  # text, not fonts
                        raise locked
                    unpacked.write(piece)
    out.seek(0)
    return out
