"""Solver study: iterations, work, time and error of every search configuration."""
