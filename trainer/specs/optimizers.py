"""The `training.optimizer` section: optimizers by kind. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, create_model, model_validator

from implicit_blocks.specs import ComponentSpec, field_error

Beta = Annotated[float, Field(ge=0, lt=1)]
TORCH_PACKAGES = ("torch.optim", "torchao")
"""Packages whose optimizer classes `kind: torch` builds. Other classes are registered by plugins: importing a
module runs its code, and a spec of another person must not choose that."""


class OptimizerSpec(ComponentSpec):
    """Base class of all optimizer specs."""

    family: ClassVar[str] = "optimizer"
    builds: ClassVar[str | None] = "torch.optim:Optimizer"

    learning_rate: PositiveFloat
    """Peak learning rate."""


class AdamWSpec(OptimizerSpec):
    """AdamW (Loshchilov & Hutter, 2019).

    Weight decay applies to matrices, not to norms, biases, gains, or the A, dt and D of an SSM.
    """

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of the two moments."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay coefficient, multiplied by the learning rate."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator for numerical stability."""


class MuonSpec(OptimizerSpec):
    """Muon on matrices, AdamW on everything else: K. Jordan et al., 2024; J. Liu et al., 2025."""

    kind: Literal["muon"] = "muon"
    momentum: Beta = 0.95
    """Decay rate of the momentum that is orthogonalized."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Steps of the Newton-Schulz iteration."""
    shape_scaling: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """`match_rms_adamw`: scale by 0.2 √max(rows, columns), so that AdamW's learning rate fits. `original`:
    scale by √max(1, rows / columns), for learning rates near 0.02, which then also apply to AdamW."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay coefficient, multiplied by the learning rate; vectors and gains do not decay."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""


class TorchClassSpec(OptimizerSpec):
    """An optimizer class by its import path, such as `torch.optim.NAdam` or `torchao.optim.AdamW8bit`."""

    kind: Literal["torch"] = "torch"
    weight_decay: NonNegativeFloat = 0.0
    """The class's `weight_decay` for matrices, in place of the class's default; 0 for norms, biases and
    gains. Classes differ in whether it is decoupled from the gradient."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class by name, such as `{momentum: 0.9}`."""

    @property
    def path(self) -> str:
        """The import path of the class."""
        return str(getattr(self, "class"))

    @model_validator(mode="after")
    def _known_package(self) -> Self:
        if not self.path.startswith(tuple(f"{package}." for package in TORCH_PACKAGES)):
            message = (
                f"expected the import path of a class of {' or '.join(TORCH_PACKAGES)}, such as "
                f"torch.optim.NAdam, got {self.path!r}; register an optimizer of your own by a plugin"
            )
            raise field_error(message, "class", value=self.path)
        for name, field in (("lr", "learning_rate"), ("weight_decay", "weight_decay"), ("params", None)):
            if name in self.options:
                remedy = "remove it" if field is None else f"set training.optimizer.{field} instead"
                message = f"the trainer sets {name!r}, got {self.options[name]!r}; {remedy}"
                raise field_error(message, "options", name, value=self.options[name], of_key=True)
        return self


# `class` is a keyword of Python, so the field cannot be declared in a class body.
_FIELDS: Any = {"class": (str, Field(description="Import path of the class."))}
TorchOptimizerSpec: type[TorchClassSpec] = create_model(
    "TorchOptimizerSpec",
    __base__=TorchClassSpec,
    __module__=__name__,
    __doc__=TorchClassSpec.__doc__,
    **_FIELDS,
)
