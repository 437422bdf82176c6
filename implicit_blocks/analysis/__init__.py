"""Analysis of models: contraction of the map, and the Jacobian from state to state."""

from implicit_blocks.analysis.jacobian import StateJacobian, state_jacobian
from implicit_blocks.analysis.spectrum import Spectrum, spectral_radius

__all__ = ["Spectrum", "StateJacobian", "spectral_radius", "state_jacobian"]
