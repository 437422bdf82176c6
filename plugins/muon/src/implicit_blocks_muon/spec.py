"""What a YAML file says of the optimizer. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from trainer.specs.run import OptimizerSpec

Fraction = Annotated[float, Field(ge=0, lt=1)]


class MuonSpec(OptimizerSpec):
    """Muon on matrices, AdamW on everything else: K. Jordan et al., 2024; J. Liu et al., 2025."""

    kind: Literal["muon"] = "muon"
    momentum: Fraction = 0.95
    """Decay rate of the momentum that is orthogonalized."""
    nesterov: bool = True
    """Look one gradient ahead."""
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Steps of the iteration that orthogonalizes."""
    shape_scaling: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """`match_rms_adamw`: times 0.2 √max(rows, columns), so that AdamW's learning rate fits. `original`: times
    √max(1, rows / columns), for learning rates near 0.02, which AdamW's share would then get too."""
    weight_decay: NonNegativeFloat = 0.1
    """Share of a weight removed a step, in units of the learning rate; vectors and gains do not decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
