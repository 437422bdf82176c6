"""Looking into a model: how its map contracts, and how its state depends on the state before."""

from implicit_blocks.analysis.spectrum import Spectrum, spectral_radius

__all__ = ["Spectrum", "spectral_radius"]
