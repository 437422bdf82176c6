"""The files of a run: its folder, the lock on it, atomic writes."""
