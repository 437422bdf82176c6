"""What a run costs, from its spec alone: FLOPs, memory, a dry run. Imports no torch."""
