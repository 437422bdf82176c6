"""Language modeling at small scale: implicit models and their explicit twins."""
