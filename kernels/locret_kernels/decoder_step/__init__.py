"""One decoded token of each of several texts through a whole decoder, in one call on a CPU. The operation has no form for other
devices: the decoder's own forward is its definition."""

__all__: list[str] = []
