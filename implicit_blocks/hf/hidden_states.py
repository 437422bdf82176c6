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
    lm: LanguageModel, *, loops: int | None, trajectory: Sequence[int] | None, commits: bool
) -> tuple[int, ...]:
    """Return the iterates of a call, by their number of loops: those given, or all of a fixed number.

    Without either the result is empty, because the iterations of a search are not known in advance.

    Raises:
        ValueError: the model keeps one state per loop and the call commits tokens, where no iterates are
            collected.

    """
    fixed = fixed_loops(lm, loops)
    chosen = tuple(trajectory) if trajectory is not None else tuple(range(1, (fixed or 0) + 1))
    if chosen and commits and lm.core_loops > 1:
        raise ValueError(
            "a model with one state per loop collects no iterates while it commits tokens to a cache; pass "
            "use_cache=False, or omit output_hidden_states"
        )
    return chosen


def fixed_loops(lm: LanguageModel, loops: int | None) -> int | None:
    """Return the number of loops of a call: that given, or that of the spec's exit criterion ``fixed``."""
    if loops is not None or lm.training or not isinstance(lm.spec, ImplicitLMSpec):
        return loops
    return lm.spec.at_evaluation.fixed_loops


def hidden_states(
    lm: LanguageModel, x_BLD: Tensor, encoded: Encoded, chosen: Sequence[int], loops: int | None
) -> tuple[Tensor, ...]:
    """Return embedded tokens (B, L, D), the chosen iterates (B, L, C), and the head's input (B, L, D).

    Iterates that the call did not reach are left out.
    """
    iterates = {t: iterate.z_BLC for t, iterate in encoded.iterates.items()}
    last = fixed_loops(lm, loops)
    if last is not None and encoded.solution is not None:
        iterates.setdefault(last, encoded.solution.z)  # the call that commits is the last loop
    embedded = x_BLD if lm.spec.embedding_scale == 1 else x_BLD * lm.spec.embedding_scale
    return (embedded, *(iterates[t] for t in sorted(set(chosen)) if t in iterates), encoded.hidden_BLD)
