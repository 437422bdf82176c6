"""Sweeps: a grid of runs, trained side by side, resumable, with a table and a plot of the results."""
