"""Many processes as one run: who this process is, what the others say, how the model is laid out."""

from trainer.distributed.agreement import require_same_data, require_same_spec
from trainer.distributed.layout import Layout, alone, lay_out
from trainer.distributed.ranks import Ranks, join, leave

__all__ = ["Layout", "Ranks", "alone", "join", "lay_out", "leave", "require_same_data", "require_same_spec"]
