"""Finding, verifying and reading trained weights."""
