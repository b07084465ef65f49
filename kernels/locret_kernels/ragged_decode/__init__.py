"""Attention of one new token over heads that hold different numbers of rows."""
