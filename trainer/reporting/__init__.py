"""Metrics, progress display, summaries and pictures."""
