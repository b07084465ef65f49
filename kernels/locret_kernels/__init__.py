"""Fused operations, one folder each: ``reference.py`` (torch, float32 inside, the definition) beside ``triton.py``, same
signatures. ``locret_kernels.backend.function(name, backend)`` picks one; nothing here falls back silently."""
