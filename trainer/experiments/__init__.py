"""The paper's experiments, each one command: ``python -m trainer.experiments NAME``."""
