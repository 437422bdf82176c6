"""Weights between the optimizer and the layers: weight norm and the per-pass cache."""
