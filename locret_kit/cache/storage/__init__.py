"""Rows of a layer: a layout (where they lie) and a codec (how they are stored), and what was evicted."""
