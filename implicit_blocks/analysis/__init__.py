"""Looking into a model: how its map contracts, and how its state depends on the state before."""

from implicit_blocks.analysis.jacobian import StateJacobian, state_jacobian
from implicit_blocks.analysis.spectrum import Spectrum, spectral_radius

__all__ = ["Spectrum", "StateJacobian", "spectral_radius", "state_jacobian"]
