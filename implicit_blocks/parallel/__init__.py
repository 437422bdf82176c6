"""Ranks that compute one sequence together: by heads and channels (tensor), or by tokens (context)."""
