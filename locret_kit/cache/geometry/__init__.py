"""Integers of a run: positions, rotation tables and the schedule of evictions."""
