"""Puzzles: solved share against iterations and restarts, and an animation of a solution."""
