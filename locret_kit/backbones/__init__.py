"""Architectures: dimensions, windows and RoPE of a model, and where its attention is met."""
