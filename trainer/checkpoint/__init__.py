"""Training checkpoints: saving, loading, exporting."""
