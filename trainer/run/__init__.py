"""A training run: building it, the loop, a step, resuming."""
