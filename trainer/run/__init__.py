"""A run: building its parts, the training loop, a step, resuming."""
