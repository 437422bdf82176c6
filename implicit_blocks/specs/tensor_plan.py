"""How the parameters of a mixer or an MLP are divided among ranks that compute it together. Imports no torch.

M. Shoeybi et al., "Megatron-LM", 2019: each rank has a run of the heads, or of the hidden channels. The
matrices that produce them are divided by rows, the matrix that reads them by columns, and the ranks' outputs
are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Section(NamedTuple):
    """Consecutive entries of a parameter along one dimension, made of equal units such as heads.

    Each rank has a run of the units. A section of one unit is needed by all ranks: each has a copy.
    """

    size: int
    """Number of entries."""
    units: int
    """Number of units; divides the size."""
    name: str = ""
    """The field that determines the number of units, for errors."""

    @property
    def splits(self) -> bool:
        """Whether ranks have parts of the section instead of copies."""
        return self.units > 1

    def local_size(self, ranks: int) -> int:
        """Return the number of entries that a rank has."""
        return self.size // ranks if self.splits else self.size


class Divided(NamedTuple):
    """A parameter of which each rank has a part, along one dimension.

    Every rank's gradient of a copied section is a part of the whole: the ranks add them up.
    """

    dim: int
    sections: tuple[Section, ...]

    def local_size(self, ranks: int) -> int:
        """Return the entries that a rank has along the dimension."""
        return sum(section.local_size(ranks) for section in self.sections)


class TensorPlan(NamedTuple):
    """How a component is divided among ranks.

    Every rank has the whole of parameters that are not listed, with their whole gradients.
    """

    parameters: Mapping[str, Divided]
    """By name, such as ``in_proj.weight``."""
    reads: tuple[str, ...]
    """The modules whose input is the same on all ranks; "" is the component itself."""
    writes: tuple[str, ...]
    """The linear layers whose outputs the ranks add up; their biases are added after that."""
    norms: Mapping[str, int] = {}
    """RMS norms over a divided width, with their numbers of groups."""
    injected: tuple[Section, ...] = ()
    """Of a mixer: the sections of the injection that it adds to its input projection."""
    sizes: Mapping[str, tuple[Section, ...]] = {}
    """Attributes of the component, such as ``n_heads``, that become the number of entries that a rank has."""

    def units(self) -> dict[str, int]:
        """Return the numbers of units that the ranks must divide, by the fields that determine them."""
        found = {
            section.name: section.units
            for divided in self.parameters.values()
            for section in divided.sections
            if section.splits
        }
        groups = max(self.norms.values(), default=1)
        return found | ({"norm_groups": groups} if groups > 1 else {})


def rows(name: str, *sections: Section, bias: bool) -> dict[str, Divided]:
    """Return the division of a linear layer or a convolution by output rows."""
    divided = Divided(0, sections)
    return {f"{name}.weight": divided} | ({f"{name}.bias": divided} if bias else {})


def columns(name: str, *sections: Section) -> dict[str, Divided]:
    """Return the division of a linear layer's weight by input columns; every rank has the whole bias."""
    return {f"{name}.weight": Divided(1, sections)}


def injection_plan(sections: tuple[Section, ...]) -> TensorPlan:
    """Return the plan of the projection of an injection into mixers that divide it in these sections."""
    return TensorPlan(rows("proj", *sections, bias=True), reads=("proj",), writes=())


def joined(plans: Mapping[str, TensorPlan]) -> TensorPlan:
    """Return the plan of a component whose parts have these plans, by the prefixes of their names."""

    def named(field: str) -> dict[str, Any]:
        return {
            prefix + name: value
            for prefix, plan in plans.items()
            for name, value in getattr(plan, field).items()
        }

    return TensorPlan(
        parameters=named("parameters"),
        reads=tuple(prefix + name for prefix, plan in plans.items() for name in plan.reads),
        writes=tuple(prefix + name for prefix, plan in plans.items() for name in plan.writes),
        norms=named("norms"),
        injected=tuple(section for plan in plans.values() for section in plan.injected),
        sizes=named("sizes"),
    )
