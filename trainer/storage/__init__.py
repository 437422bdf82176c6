"""The run folder, its lock, and atomic files."""
