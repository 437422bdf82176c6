"""The conformance kit: contracts for components, to be called from the tests of their authors.

``check_mixer``, ``check_solver`` and ``check_gradient`` run all contracts of a family; the dictionaries
``…_CONTRACTS`` name them, to write one test per contract. ``check_backend`` compares a mixer's kernels with
its plain operators, ``check_walk`` checks a mixer for any padding and packed documents, and ``check_plugin``
checks what a distribution registers. ``relative_error`` and ``testing.mixer_runs`` help with further tests.
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
