"""The implicit language model, in the order of the paper's equations.

M. Schöne et al., "Implicit Language Models are RNNs: Balancing Parallelization and Expressivity", ICML 2025.

Shape legend: B batch, L tokens, D model width, U injection width, V vocabulary (padded).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from implicit_blocks.fixed_point import solve_fixed_point
from implicit_blocks.interfaces import GradientEstimator, Solver
from implicit_blocks.models.backbone import BoundMap
from implicit_blocks.models.injection import Injection, pays_by_token
from implicit_blocks.models.inputs import check_forward, check_inputs
from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.models.parts import ModelParts, read_out
from implicit_blocks.models.sequence_state import SequenceState
from implicit_blocks.registry import build
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.specs import ImplicitLMSpec, Stopping
from implicit_blocks.weights.cache import WeightCache


class ImplicitLM(ModelParts):
    """A language model whose layers are iterated to a fixed point (M. Schöne et al., ICML 2025).

    ``x = embed(tokens)``; ``u = W rms(x) + b``; ``z* = f(z*, u)``; ``logits = E z*``. In training mode
    (``model.train()``) the spec's solver, stopping and gradient apply; in evaluation mode those of
    ``at_evaluation``. Without gradients one more call of ``f`` gives the output and the state to commit.

    Args:
        spec: the configuration of the model.

    """

    spec: ImplicitLMSpec
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

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        state: SequenceState | None = None,
        return_state: bool = False,
        window_length: int | None = None,
        trace: bool = False,
        return_logits: bool = True,
        **search: Unpack[SearchKwargs],
    ) -> LMOutput:
        """Predict from tokens (B, L).

        Args:
            input_ids: (B, L) int64, L at least 1.
            labels: (B, L) int64, aligned with the inputs position by position; −100 is ignored. The loss is
                the mean cross-entropy over the other positions, in nats.
            attention_mask: (B, L), 0 or False at padding, at any position.
            documents: (B, L) int64, non-decreasing: a token does not see tokens of another document.
            state: the state after the preceding tokens, from an earlier output; None: there are none.
            return_state: commit the tokens and return the state after them.
            window_length: solve this many tokens at a time, committing them before the next; None solves all
                tokens together. 1 is the paper's sequential mode, None its simultaneous mode; they agree
                within the tolerance. Gradients of a window reach earlier windows through the committed
                states.
            trace: keep the residual of every iteration (with a single window).
            return_logits: False computes the loss in chunks of tokens, so that (B, L, V) is never allocated;
                requires labels.
            search: ``tolerance``, ``max_iterations``, ``damping``, ``warm_start`` and ``moving_average`` of
                this call's search, instead of the spec's (``SearchOptions``).

        Raises:
            ValueError: where shapes do not fit, the window is shorter than a token, tokens or labels are
                outside the vocabulary, or document numbers decrease (values are checked on a CPU only).

        """
        check_forward(input_ids, labels, vocab_size=len(self.embedding.weight), return_logits=return_logits)
        x_BLD = self.embedding(input_ids)  # x = embed(tokens)
        encoded = self.encode(  # z* = f(z*, u) with u = W rms(x) + b
            x_BLD,
            ids_BL=input_ids,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            return_state=return_state,
            window_length=window_length,
            search=SearchOptions(**search) if search else None,
            trace=trace,
        )
        return read_out(self, encoded, labels=labels, return_logits=return_logits)  # logits = E z*

    def encode(
        self,
        x_BLD: Tensor,
        *,
        ids_BL: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        state: SequenceState | None = None,
        return_state: bool = False,
        window_length: int | None = None,
        search: SearchOptions | None = None,
        trace: bool = False,
        weights: WeightCache | None = None,
    ) -> Encoded:
        """Return the fixed points of embedded tokens (B, L, D); arguments as for ``forward``.

        ``ids_BL``: the tokens, where ``x`` is their plain embedding; a small vocabulary then needs one
        injection per word instead of one per token. ``weights``, from ``cache_weights``, are reused by
        consecutive calls, as in decoding.

        Raises:
            ValueError: where shapes or state do not fit, or the window is shorter than a token.

        """
        inputs = check_inputs(
            x_BLD,
            ids_BL=ids_BL,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            window_length=window_length,
        )
        batch, length = x_BLD.shape[:2]
        state = state if state is not None else self.initial_state(batch)
        weights = weights if weights is not None else self.cache_weights()
        step = length if window_length is None else min(window_length, length)
        commit = return_state or step < length
        outputs, solutions = [], []
        for window in inputs.windows(step):
            f, start_BLD = self.bind(  # f(z) = f(z, u) with u = W rms(x) + b
                window.x_BLD,
                state,
                weights=weights,
                ids_BL=window.ids_BL,
                warm_start=search is not None and search.warm_start,
                valid_BL=window.valid_BL,
                documents_BL=window.documents_BL,
                gaps=window.gaps,
            )
            solution = self.solve(f, start_BLD, search=search, trace=trace)  # z* = f(z*)
            z_BLD, state = _finish(f, solution.z, state, commit=commit)
            outputs.append(z_BLD)
            solutions.append(solution.with_value(z_BLD))
        return Encoded(
            outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1),
            Solution.concatenate(solutions),
            state if return_state else None,
        )

    def bind(
        self,
        x_BLD: Tensor,
        state: SequenceState,
        *,
        weights: WeightCache,
        ids_BL: Tensor | None = None,
        warm_start: bool = False,
        valid_BL: Tensor | None = None,
        documents_BL: Tensor | None = None,
        gaps: bool = True,
    ) -> tuple[BoundMap, Tensor]:
        """Return the map ``z → f(z, u)`` of the next window and the start of its search, (B, L, D)."""
        window = state.window(
            x_BLD.shape[1], valid_BL=valid_BL, documents_BL=documents_BL, gaps=gaps, dtype=self.stream_dtype
        )
        by_token = ids_BL is not None and self.backbone.supports_injection_table(window)
        if ids_BL is not None and by_token and pays_by_token(self.embedding, ids_BL.numel()):
            window = replace(window, u_rows_BL=ids_BL.contiguous())
            u = self.inject(self.embedding.weight, weights)  # (V, U): one row per word
        else:
            u = self.inject(x_BLD, weights)
        start_BLD = self.start(x_BLD)
        if warm_start:
            start_BLD = state.warm_start(window, start_BLD)
        f = self.backbone.bind(window, u_BLU=u, states=state.layers, start_BLD=start_BLD, weights=weights)
        return f, start_BLD

    def inject(self, x_BLD: Tensor, weights: WeightCache) -> Tensor:
        """Return the injection ``u = W rms(x) + b``, (…, U), of embedded tokens (…, D)."""
        with weights.activate():
            u: Tensor = self.injection(x_BLD)
        return u

    def start(self, x_BLD: Tensor) -> Tensor:
        """Return the start of the search for embedded tokens: these, or zeros, as ``z_init`` says."""
        stream = x_BLD.to(self.stream_dtype)
        return stream if self.spec.z_init == "embedding" else torch.zeros_like(stream)

    def solve(
        self, f: BoundMap, start_BLD: Tensor, *, search: SearchOptions | None = None, trace: bool = False
    ) -> Solution:
        """Find ``z* = f(z*)``, with the gradient estimator's gradient while gradients are recorded."""
        solver, stopping = self.search_config(search)
        at_evaluation = self.spec.at_evaluation
        return solve_fixed_point(
            f,
            start_BLD,
            solver=solver,
            gradient=self.gradient,
            stopping=stopping,
            window_length=(self.spec if self.training else at_evaluation).window_length,
            commit_prefix=None if self.training else at_evaluation.commit_prefix,
            valid=f.window.valid_BL,
            moving_average=None if search is None else search.moving_average,
            trace=trace,
            agree=self.agree,
        )

    def search_config(self, options: SearchOptions | None = None) -> tuple[Solver, Stopping]:
        """Return the solver and stopping rule of the current mode, changed by ``options``."""
        if self.training:
            spec, solver, stopping = self.spec.solver, self.solver, self.stopping
        else:
            spec = self.spec.at_evaluation.solver
            solver, stopping = self.evaluation_solver, self.evaluation_stopping
        if options is None:
            return solver, stopping
        changed = options.solver(spec)
        return solver if changed is spec else build(changed), options.stopping(stopping)

    def reconfigure(self, spec: ImplicitLMSpec) -> None:
        """Replace solver, gradient and stopping, in training and evaluation, and keep the weights.

        Raises:
            ValueError: if any other field differs from the model's spec.

        """
        free = spec.changeable
        old, new = self.spec.model_dump(exclude=set(free)), spec.model_dump(exclude=set(free))
        changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        if changed:
            raise ValueError(
                f"{', '.join(changed)} cannot change after a model is built; "
                f"only {', '.join(sorted(free))} can"
            )
        self._configure(spec)

    def _configure(self, spec: ImplicitLMSpec) -> None:
        self.spec = spec
        self.solver, self.gradient, self.stopping = build(spec.solver), build(spec.gradient), spec.stopping
        self.evaluation_solver = build(spec.at_evaluation.solver)
        self.evaluation_stopping = spec.evaluation_stopping


def _finish(
    f: BoundMap, z_BLD: Tensor, state: SequenceState, *, commit: bool
) -> tuple[Tensor, SequenceState]:
    """Return the output at a solution, and with ``commit`` the state after the window.

    With gradients the output is the gradient estimator's value. Without, it is ``f(z*)``, the last call of an
    evaluation; a token whose value overflows there keeps ``z*``.
    """
    if torch.is_grad_enabled() and not commit:
        return z_BLD, state
    mapped_BLD, layers = f.commit(z_BLD) if commit else (f(z_BLD), None)
    if not torch.is_grad_enabled():
        z_BLD = torch.where(mapped_BLD.sum(-1, keepdim=True).isfinite(), mapped_BLD, z_BLD)
    return z_BLD, state if layers is None else state.after(f.window, layers, z_BLD)
