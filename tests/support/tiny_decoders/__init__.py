"""Tiny random models of every causal language model of transformers, and checks of their answers. The tests and
``scripts/decoders.py`` share them."""
