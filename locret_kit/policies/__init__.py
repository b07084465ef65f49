"""Eviction policies: score, scope, allocation and selection, each a small part, and the grammar that composes them."""
