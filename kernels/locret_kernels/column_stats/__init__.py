"""Column statistics of attention: what each slot received, reduced over queries."""

from .reference import STATISTICS, ColumnStats, column_stats, log_sum_exp, window_attention

__all__ = ["STATISTICS", "ColumnStats", "column_stats", "log_sum_exp", "window_attention"]
