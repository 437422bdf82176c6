"""The length of a run in epochs, converted to tokens. Imports no torch for text."""

from __future__ import annotations

import math

from pydantic import ValidationError

from implicit_blocks.specs.base import validate
from implicit_blocks.specs.errors import format_error
from trainer.specs.run import RunSpec


def resolve_epochs(spec: RunSpec) -> RunSpec:
    """Return the run with ``training.epochs`` converted to ``training.max_tokens``, by the size of its data.

    The number of steps follows from the tokens, as for any run, also if phases change the batch size: the run
    ends with the step that completes the epochs. A run without epochs is returned as it is.

    Raises:
        ValueError: the data cannot be read, or the schedule or the phases do not fit into the run.

    """
    epochs = spec.training.epochs
    if epochs is None:
        return spec
    # The tolerance keeps 0.1 epochs of 30 sequences at 3, in spite of the rounding of 0.1.
    sequences = max(1, math.ceil(epochs * spec.data.epoch_sequences() - 1e-6))
    tree = spec.model_dump()
    tree["training"] |= {"epochs": None, "max_tokens": sequences * spec.data.seq_len}
    try:
        return validate(RunSpec, tree)
    except ValidationError as error:
        raise format_error(error, tree, source=f"{epochs:g} epochs, {sequences:,} sequences") from None
