"""Continuous decoding: a fixed number of slots, each with a text of its own."""
