"""Cost estimates of a run from its spec alone: FLOPs, memory, a dry run. Imports no torch."""
