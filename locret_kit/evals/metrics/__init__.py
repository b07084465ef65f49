"""Scores of answers, as the benchmarks' own scripts compute them."""
