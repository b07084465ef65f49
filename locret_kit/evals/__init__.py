"""Evaluation: tasks, metrics, the runner that writes rows, and summaries of them."""
