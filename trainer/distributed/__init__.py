"""A run of several processes: ranks, agreement on spec and data, layout of the model."""

from trainer.distributed.agreement import require_same_data, require_same_spec
from trainer.distributed.layout import Layout, alone, lay_out
from trainer.distributed.ranks import Ranks, join, leave

__all__ = ["Layout", "Ranks", "alone", "join", "lay_out", "leave", "require_same_data", "require_same_spec"]
