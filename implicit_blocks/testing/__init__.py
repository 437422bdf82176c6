"""Contracts that a component must hold, for the tests of whoever writes one.

``check_mixer``, ``check_solver`` and ``check_gradient`` run all contracts of a family; the dictionaries name
them, for a test each. ``check_backend`` holds a mixer's kernels to its plain operators, ``check_walk`` a
mixer that says so to padding and documents anywhere, ``check_plugin`` a distribution to what it registers.
"""

from implicit_blocks.registry.contracts import ContractError
from implicit_blocks.testing.backends import check_backend
from implicit_blocks.testing.contract import relative_error
from implicit_blocks.testing.gradients import GRADIENT_CONTRACTS, check_gradient
from implicit_blocks.testing.mixer_walks import CUTS, PADDINGS, check_walk
from implicit_blocks.testing.mixers import MIXER_CONTRACTS, check_mixer
from implicit_blocks.testing.plugin import check_plugin
from implicit_blocks.testing.solvers import SOLVER_CONTRACTS, check_solver

__all__ = [
    "CUTS",
    "GRADIENT_CONTRACTS",
    "MIXER_CONTRACTS",
    "PADDINGS",
    "SOLVER_CONTRACTS",
    "ContractError",
    "check_backend",
    "check_gradient",
    "check_mixer",
    "check_plugin",
    "check_solver",
    "check_walk",
    "relative_error",
]
