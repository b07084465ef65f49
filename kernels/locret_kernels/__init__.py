"""Fused operations for a bounded cache, one folder each.

``reference.py`` is the definition, in torch; ``triton.py`` has the same functions with the same signatures.
``locret_kernels.backend.function(name, backend)`` picks one and never falls back silently.
"""
