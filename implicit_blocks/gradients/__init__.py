"""Gradient estimators, one per file: how the solution of a search is differentiated."""

from implicit_blocks.gradients.implicit_function import ImplicitFunction
from implicit_blocks.gradients.jacobian_penalty import JacobianPenalty
from implicit_blocks.gradients.phantom import Phantom, jacobian_free
from implicit_blocks.gradients.unrolled import Unrolled

__all__ = ["ImplicitFunction", "JacobianPenalty", "Phantom", "Unrolled", "jacobian_free"]
