"""``output_hidden_states`` of the transformers classes: the embedded tokens, iterates, the output.

Shape legend: B batch, L tokens of this call, D model width, C core width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.outputs import Encoded
from implicit_blocks.specs import ImplicitLMSpec


def chosen_iterates(
    lm: LanguageModel, *, loops: int | None, trajectory: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the iterates of a call, by their number of loops: those given, or all of a fixed number.

    Without either the result is empty, because the iterations of a search are not known in advance.
    """
    if trajectory is not None:
        return tuple(trajectory)
    if loops is None and not lm.training and isinstance(lm.spec, ImplicitLMSpec):
        loops = lm.spec.at_evaluation.fixed_loops
    return tuple(range(1, (loops or 0) + 1))


def hidden_states(
    lm: LanguageModel, x_BLD: Tensor, encoded: Encoded, chosen: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return embedded tokens (B, L, D), the chosen iterates (B, L, C), and the head's input (B, L, D).

    Iterates that the call did not reach are left out.
    """
    iterates = encoded.iterates
    embedded = x_BLD if lm.spec.embedding_scale == 1 else x_BLD * lm.spec.embedding_scale
    found = (iterates[t].z_BLC for t in sorted(set(chosen)) if t in iterates)
    return embedded, *found, encoded.hidden_BLD
