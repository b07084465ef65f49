"""Memory of a run before it is run: sizes, plans, and the largest setting that fits."""
