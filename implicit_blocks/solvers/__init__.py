"""Solvers: update rules for ``z = f(z)``, one a file."""

from implicit_blocks.solvers.anderson import Anderson
from implicit_blocks.solvers.broyden import Broyden
from implicit_blocks.solvers.patient_picard import PatientPicard
from implicit_blocks.solvers.picard import Picard

__all__ = ["Anderson", "Broyden", "PatientPicard", "Picard"]
