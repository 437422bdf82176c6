"""The conformance kit: contracts for components, to be called from the tests of their authors.

``check_mixer``, ``check_solver``, ``check_gradient``, ``check_injection``, ``check_start``, ``check_depth``,
``check_scaling`` and ``check_exit`` run all contracts of a family; the dictionaries ``…_CONTRACTS`` name
them, to write one test per contract. ``check_backend`` compares a mixer's kernels with its plain operators,
``check_walk`` checks a mixer for any padding and packed documents, and ``check_plugin`` checks what a
distribution registers. ``relative_error`` and ``testing.mixer_runs`` help with further tests.
"""

from implicit_blocks.registry.contracts import ContractError
from implicit_blocks.testing.backends import check_backend
from implicit_blocks.testing.contract import relative_error
from implicit_blocks.testing.depths import DEPTH_CONTRACTS, check_depth
from implicit_blocks.testing.exits import EXIT_CONTRACTS, check_exit
from implicit_blocks.testing.gradients import GRADIENT_CONTRACTS, check_gradient
from implicit_blocks.testing.injections import INJECTION_CONTRACTS, check_injection
from implicit_blocks.testing.mixer_walks import CUTS, PADDINGS, check_walk
from implicit_blocks.testing.mixers import MIXER_CONTRACTS, check_mixer
from implicit_blocks.testing.plugin import check_plugin
from implicit_blocks.testing.scalings import SCALING_CONTRACTS, check_scaling
from implicit_blocks.testing.solvers import SOLVER_CONTRACTS, check_solver
from implicit_blocks.testing.starts import START_CONTRACTS, check_start

__all__ = [
    "CUTS",
    "DEPTH_CONTRACTS",
    "EXIT_CONTRACTS",
    "GRADIENT_CONTRACTS",
    "INJECTION_CONTRACTS",
    "MIXER_CONTRACTS",
    "PADDINGS",
    "SCALING_CONTRACTS",
    "SOLVER_CONTRACTS",
    "START_CONTRACTS",
    "ContractError",
    "check_backend",
    "check_depth",
    "check_exit",
    "check_gradient",
    "check_injection",
    "check_mixer",
    "check_plugin",
    "check_scaling",
    "check_solver",
    "check_start",
    "check_walk",
    "relative_error",
]
