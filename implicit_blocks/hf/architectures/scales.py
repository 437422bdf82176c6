"""Constants that the published codes of Attractor and Parcae derive from the name of an initialization.

The name fixes the standard deviation of new embeddings and two factors that are part of the model: of the
embedded tokens, and of the logits (https://github.com/seal-rg/recurrent-pretraining, recpre/init.py, of which
both codes are descendants). d is the model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Scales:
    """The constants that a named initialization implies.

    Args:
        embedding_std: standard deviation of new embeddings.
        embedding_scale: factor of the embedded tokens.
        logit_scale: factor of the logits.

    """

    embedding_std: float
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


def _small(d: int) -> float:
    return sqrt(2 / (5 * d))


_STRATEGIES: dict[str, Callable[[int], Scales]] = {
    "mitchell": lambda d: Scales(1 / sqrt(d)),
    "normal": lambda d: Scales(1 / sqrt(d)),
    "llama": lambda d: Scales(1.0),
    "llama-by-dim": lambda d: Scales(1.0),
    "llama-by-dim-ls": lambda d: Scales(1.0, logit_scale=1 / sqrt(d)),
    "kaiming": lambda d: Scales(sqrt(2 / d)),
    "bert": lambda d: Scales(0.02),
    "megatron": lambda d: Scales(0.02),
    "megatron2": lambda d: Scales(sqrt(1 / (3 * d))),
    "small": lambda d: Scales(_small(d)),
    "scaled": lambda d: Scales(_small(d)),
    "scaled-geiping": lambda d: Scales(_small(d)),
    "scaled-zero": lambda d: Scales(_small(d)),
    "scaled-stuck": lambda d: Scales(_small(d)),
    "takase": lambda d: Scales(_small(d), embedding_scale=sqrt(d)),
    "takase-scaled": lambda d: Scales(_small(d), embedding_scale=sqrt(d), logit_scale=sqrt(2 / 5) / sqrt(d)),
    "deepnorm-straight": lambda d: Scales(0.02),
    "deepnorm-subln": lambda d: Scales(0.02),
    "noci-anagnostidis": lambda d: Scales(1.0, logit_scale=1 / sqrt(d)),
    "shaped": lambda d: Scales(1.0, logit_scale=1 / sqrt(d)),
    "deep-scale-simple": lambda d: Scales(sqrt(1 / 3), logit_scale=1 / sqrt(d)),
    "deep-scale-full": lambda d: Scales(sqrt(1 / 3), logit_scale=1 / sqrt(d)),
    "scaled-and-logit-scale": lambda d: Scales(1.0, logit_scale=1 / sqrt(d)),
    "bernstein": lambda d: Scales(1.0),
    "illiterate": lambda d: Scales(1.0),
    "scaled-large-embed": lambda d: Scales(1.0),
}
STRATEGIES = tuple(_STRATEGIES)
"""The known names; one of them, ``wang``, depends on the depth as well and is not supported."""


def scales_of(strategy: str, d_model: int) -> Scales:
    """Return the constants of a known name."""
    return _STRATEGIES[strategy](d_model)


def strategy_of(embedding_scale: float, logit_scale: float, d_model: int) -> str:
    """Return a name with these factors, ``scaled-zero`` for 1 and 1.

    Raises:
        ValueError: no known name has them.

    """
    for name in ("scaled-zero", "takase", "takase-scaled", *STRATEGIES):
        found = scales_of(name, d_model)
        if (found.embedding_scale, found.logit_scale) == (embedding_scale, logit_scale):
            return name
    raise ValueError(
        f"embedding_scale {embedding_scale} and logit_scale {logit_scale} cannot be written: the format has "
        "only the factors that belong to one of its initializations"
    )
