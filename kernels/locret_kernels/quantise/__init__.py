"""Rows of one layer brought into few bits and read back, in one call on a CPU. Their definition with tensors is the cache's own
(``locret_kit/cache/storage``)."""

__all__: list[str] = []
