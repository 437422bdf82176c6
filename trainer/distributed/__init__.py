"""Many processes as one run: who this process is, what the others say, how the model is laid out."""

from trainer.distributed.ranks import Ranks, join, leave

__all__ = ["Ranks", "join", "leave"]
