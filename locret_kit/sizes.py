"""Bytes, as people write and read them."""

from __future__ import annotations

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str, field: str) -> int:
    """``24GiB``, ``24GB`` (decimal) or plain bytes, as an integer.

    Raises:
        ValueError: not a positive number with a known unit; names the ``field``.
    """
    number = text.strip().rstrip("KMGTiB")
    unit = text.strip()[len(number) :]
    try:
        size = float(number) * UNITS[unit]
    except (KeyError, ValueError):
        raise ValueError(
            f"{field}={text} is not a size such as 24GiB or 24GB; units: {', '.join(filter(None, UNITS))}"
        ) from None
    if unit == "" and 0 < size < 2**20:
        raise ValueError(f"{field}={text} is {text.strip()} bytes; with a unit: {field}={text.strip()}GiB?")
    if not 0 < size < float("inf"):
        raise ValueError(f"{field}={text} must be above 0")
    return int(size)


def show(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
