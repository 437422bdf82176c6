"""Puzzles as training data: boards whose every cell is a token. Imports no torch except in `sources`."""
