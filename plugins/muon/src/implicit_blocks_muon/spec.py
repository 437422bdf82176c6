"""The spec of the optimizer. Imports no torch."""

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
    """Use Nesterov momentum."""
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Steps of the Newton-Schulz iteration."""
    shape_scaling: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """`match_rms_adamw`: scale by 0.2 √max(rows, columns), so that AdamW's learning rate fits. `original`:
    scale by √max(1, rows / columns), for learning rates near 0.02, which then also apply to AdamW."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay per step, in units of the learning rate; vectors and gains do not decay."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
