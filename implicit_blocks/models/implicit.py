"""Implicit language models and their explicit twins, in the order of the paper's equations.

M. Schöne et al., "Implicit Language Models are RNNs: Balancing Parallelization and Expressivity", ICML 2025.
What they share, embedding, layers, head, windows, is ``LanguageModel``'s.

Shape legend: B batch, L tokens, D model width, U injection width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.fixed_point import solve_fixed_point
from implicit_blocks.interfaces import GradientEstimator, Solver
from implicit_blocks.models.backbone import BoundMap
from implicit_blocks.models.injection import Injection
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.registry import build
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, Stopping
from implicit_blocks.weights.cache import WeightCache

__all__ = ["Encoded", "ExplicitLM", "ImplicitLM", "LMOutput", "LanguageModel"]


class ImplicitLM(LanguageModel):
    """A language model whose layers are iterated to a fixed point (M. Schöne et al., ICML 2025).

    ``x = embed(tokens)``; ``u = W rms(x) + b``; ``z* = f(z*, u)``; ``logits = E z*``. In training
    (``model.train()``) the spec's solver, stopping and gradient are used; in evaluation those of
    ``at_evaluation``, and one more call of ``f`` gives the output and the state to commit.

    Args:
        spec: every choice there is.

    """

    spec: ImplicitLMSpec  # narrower than the base class says
    solver: Solver
    gradient: GradientEstimator
    stopping: Stopping
    evaluation_solver: Solver
    evaluation_stopping: Stopping

    def __init__(self, spec: ImplicitLMSpec) -> None:
        super().__init__(spec)
        self.injection = Injection(spec, self.backbone.injection_width)
        self._configure(spec)
        self.reset_parameters()

    def _configure(self, spec: ImplicitLMSpec) -> None:
        self.spec = spec
        self.solver, self.gradient, self.stopping = build(spec.solver), build(spec.gradient), spec.stopping
        self.evaluation_solver = build(spec.at_evaluation.solver)
        self.evaluation_stopping = spec.evaluation_stopping

    def reconfigure(self, spec: ImplicitLMSpec) -> None:
        """Take another solver, gradient and stopping, in training and evaluation, with the same weights.

        Raises:
            ValueError: if anything else differs from the model's spec.

        """
        free = spec.changeable
        old, new = self.spec.model_dump(exclude=set(free)), spec.model_dump(exclude=set(free))
        changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        if changed:
            raise ValueError(
                f"{', '.join(changed)} cannot change in a model that is built; "
                f"only {', '.join(sorted(free))} can"
            )
        self._configure(spec)

    def inject(self, x_BLD: Tensor, weights: WeightCache) -> tuple[Tensor | None, Tensor]:
        """Return ``u`` and the start."""
        with weights.activate():
            u: Tensor = self.injection(x_BLD)
        stream = x_BLD.to(self.stream_dtype)
        return u, stream if self.spec.z_init == "embedding" else torch.zeros_like(stream)

    def search_config(self, options: SearchOptions) -> tuple[Solver, Stopping] | None:
        """Return those of training, or of evaluation."""
        solver = self.solver if self.training else self.evaluation_solver
        of_spec = self.spec.solver if self.training else self.spec.at_evaluation.solver
        if (changed := options.solver(of_spec)) is not of_spec:
            solver = build(changed)
        return solver, options.stopping(self.stopping if self.training else self.evaluation_stopping)

    def solve_window(
        self, f: BoundMap, start_BLD: Tensor, *, search: SearchOptions, trace: bool
    ) -> tuple[Tensor, Solution | None]:
        """Find the fixed point."""
        rules = self.search_config(search)
        assert rules is not None
        solver, stopping = rules
        windows = self.spec if self.training else self.spec.at_evaluation
        solution = solve_fixed_point(
            f,
            start_BLD,
            solver=solver,
            gradient=self.gradient,
            stopping=stopping,
            window_length=windows.window_length,
            commit_prefix=None if self.training else self.spec.at_evaluation.commit_prefix,
            valid=f.window.valid_BL,
            moving_average=search.moving_average,
            trace=trace,
            agree=self.agree,
        )
        return solution.z, solution

    def needs_final_call(self) -> bool:
        """Whether the value that ``solve_window`` returns must be mapped once more."""
        return not torch.is_grad_enabled()


class ExplicitLM(LanguageModel):
    """The explicit twin: the same layers applied once, to the embedding, without injection.

    Args:
        spec: every choice there is.

    """

    def __init__(self, spec: ExplicitLMSpec) -> None:
        super().__init__(spec)
        self.reset_parameters()

    def inject(self, x_BLD: Tensor, weights: WeightCache) -> tuple[Tensor | None, Tensor]:
        """Return no injection, and the embedded tokens."""
        return None, x_BLD.to(self.stream_dtype)

    def search_config(self, options: SearchOptions) -> tuple[Solver, Stopping] | None:
        """There is no search."""
        return None

    def solve_window(
        self, f: BoundMap, start_BLD: Tensor, *, search: SearchOptions, trace: bool
    ) -> tuple[Tensor, Solution | None]:
        """There is nothing to solve: the one call is still to come."""
        return start_BLD, None

    def needs_final_call(self) -> bool:
        """Whether the value that ``solve_window`` returns must be mapped once more."""
        return True
