"""The search for a fixed point: the loop, its options, and what it returns."""
