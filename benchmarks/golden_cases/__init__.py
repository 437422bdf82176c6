"""How the tensors of each architecture's golden cases are computed with this library."""

from __future__ import annotations

from golden_cases import attractor, huginn, implicit, ouro, parcae
from golden_cases.case import Case

_COMPUTE = {
    "implicit": implicit.compute,
    "attractor": attractor.compute,
    "parcae": parcae.compute,
    "huginn": huginn.compute,
    "ouro": ouro.compute,
}


def compute(case: Case) -> None:
    """Compute and compare all tensors of a case.

    Raises:
        ValueError: the architecture is unknown, or the configuration cannot be read.

    """
    if case.architecture not in _COMPUTE:
        raise ValueError(f"unknown architecture {case.architecture!r}; known: {', '.join(_COMPUTE)}")
    _COMPUTE[case.architecture](case)
