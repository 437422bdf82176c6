"""Parts of the computation that all looped architectures share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import implicit_blocks as ib
from implicit_blocks.models.parts import Prepared
from implicit_blocks.windows import Inputs


def prepared(model: ib.ImplicitLM, tokens: Tensor) -> Prepared:
    """Return a window of all tokens: embedded, and after the prelude."""
    x_BLD = model.embedding(tokens)
    state = model.initial_state(len(tokens))
    inputs = Inputs(x_BLD, tokens, None, None, False)
    window: Prepared = model.prepare(inputs, state, weights=model.cache_weights())
    return window


def prelude_output(model: ib.ImplicitLM, tokens: Tensor) -> Tensor:
    """Return the prelude's output, after its norm if it has one, (B, L, D)."""
    return prepared(model, tokens).c_BLD


def bound_map(model: ib.ImplicitLM, tokens: Tensor) -> tuple[Any, Tensor]:
    """Return the map ``z → f(z)`` of a window of all tokens, and the start of its search."""
    weights = model.cache_weights()
    return model.bind(
        model.embedding(tokens), model.initial_state(len(tokens)), weights=weights, ids_BL=tokens
    )


def logits_of(out: ib.LMOutput) -> Tensor:
    """Return the logits, which every call here asks for."""
    assert out.logits is not None
    logits: Tensor = out.logits
    return logits
