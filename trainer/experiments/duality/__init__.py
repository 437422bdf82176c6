"""Duality: sequential against simultaneous evaluation."""
