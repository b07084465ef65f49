"""Fused operations for a bounded cache, one folder each, and a refusal that all share.

A folder's ``__init__.py`` is the definition, in torch; ``triton.py`` has the same functions with the same signatures.
``locret_kernels.backend.function(name, backend)`` picks one and never falls back silently.
"""


def check_some(name: str, count: int, what: str) -> None:
    """Raise ValueError, naming the argument, where there are no ``what``."""
    if count < 1:
        raise ValueError(f"{name}: {count} {what} must be at least 1")
