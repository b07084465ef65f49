"""Fused operations for a bounded cache, one folder each, and refusals that they share.

A folder's ``__init__.py`` is the definition, in torch; ``triton.py`` has the same functions with the same signatures.
``locret_kernels.backend.function(name, backend)`` picks one and never falls back silently.
"""


def check_some(name: str, count: int, what: str) -> None:
    """Raise ValueError, naming the argument, where there are no ``what``."""
    if count < 1:
        raise ValueError(f"{name}: {count} {what} must be at least 1")


def check_keep(keep: int, rows: int) -> None:
    """Raise ValueError unless between one and all of the rows stay."""
    if not 1 <= keep <= rows:
        raise ValueError(f"index: {keep} rows must be at least 1 and at most the {rows} rows of a buffer")
