"""Fused operations belong here, one folder each, beside their reference in torch. This version holds none yet."""
