"""Prefill and decoding over a bounded cache."""
