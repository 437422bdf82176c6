"""Contracts that a component must hold, for the tests of whoever writes one."""

from implicit_blocks.testing.contract import ContractError
from implicit_blocks.testing.mixers import MIXER_CONTRACTS, check_mixer
from implicit_blocks.testing.solvers import SOLVER_CONTRACTS, check_solver

__all__ = ["MIXER_CONTRACTS", "SOLVER_CONTRACTS", "ContractError", "check_mixer", "check_solver"]
