"""A third party's solver and mixer, and a kind whose code is missing."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

import implicit_blocks as ib


class RelaxedSpec(ib.SolverSpec):
    """Damped steps with adaptive damping per element."""

    kind: Literal["acme.relaxed"] = "acme.relaxed"
    first: PositiveFloat = 0.8
    """Damping of the first step."""
    least: PositiveFloat = 0.1
    """Minimum damping."""
    most: PositiveFloat = 2.0
    """Maximum damping."""


class ShiftSpec(ib.MixerSpec):
    """Pass each token to the token `distance` later."""

    kind: Literal["acme.shift"] = "acme.shift"
    distance: PositiveInt = 1
    """Distance in tokens."""


class MissingSpec(ib.MixerSpec):
    """A registered kind whose builder does not exist."""

    kind: Literal["acme.missing"] = "acme.missing"


@ib.hookimpl
def register_components(add):
    add("solver", RelaxedSpec, "acme_blocks.relaxed:Relaxed.from_spec")
    add("mixer", ShiftSpec, "acme_blocks.shift:Shift")
    add("mixer", MissingSpec, "acme_blocks.nowhere:Missing")
