"""The implicit language model, in the order of the paper's equations.

M. Schöne et al., "Implicit Language Models are RNNs: Balancing Parallelization and Expressivity", ICML 2025.

Shape legend: B batch, L tokens, D model width, U injection width, V vocabulary (padded).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from implicit_blocks.depths.depth import following_depth
from implicit_blocks.exits import FixedExitSpec
from implicit_blocks.gradients import LastLoops
from implicit_blocks.injections.base import Injection
from implicit_blocks.injections.projection import pays_by_token
from implicit_blocks.interfaces import GradientEstimator, Solver
from implicit_blocks.layers import add_weight_norm
from implicit_blocks.models.implicit_spec import check_reconfigured
from implicit_blocks.models.objectives import Objective
from implicit_blocks.models.outputs import Encoded, Iterate, LMOutput
from implicit_blocks.models.parts import ModelParts, ModelWeights, Prepared, check_forward, read_out, scaled
from implicit_blocks.models.solving import SearchPlan, exit_spec, solve_window
from implicit_blocks.models.stack import BoundMap
from implicit_blocks.models.training import keep_saved_tensors
from implicit_blocks.registry import build
from implicit_blocks.search.loops import Count, LoopCounts
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.specs import ImplicitLMSpec, Stopping
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.windows import Inputs, SequenceState, Window, check_inputs, check_windows


class ImplicitLM(ModelParts):
    """A language model whose core is iterated to a fixed point (M. Schöne et al., ICML 2025), or looped.

    ``x = embed(tokens)``; ``c = prelude(x)``; ``e = source(c)``; ``z* = f(z*)`` with
    ``f(z) = leave(core(enter(z, e)), z, e)``; ``logits = E coda(z*)``. The paper's model has neither
    prelude nor coda, and its injection ``u = W rms(x) + b`` is added inside the core. In training mode
    (``model.train()``) the spec's solver, stopping, depth and gradient apply; in evaluation mode those of
    ``at_evaluation``. Without gradients one more call of ``f`` gives the output and the state to commit.

    Args:
        spec: the configuration of the model.

    """

    spec: ImplicitLMSpec
    objective: Objective | None
    solver: Solver
    gradient: GradientEstimator
    stopping: Stopping
    evaluation_solver: Solver
    evaluation_stopping: Stopping
    injection: Injection

    def __init__(self, spec: ImplicitLMSpec) -> None:
        super().__init__(spec)
        self.injection = build(
            spec.injection,
            d_model=spec.d_model,
            core_width=spec.core_width,
            projected=self.backbone.injection_width if spec.injection.adds_to_projections else None,
            norm_eps=spec.norm_eps,
        )
        if spec.weight_norm:
            add_weight_norm(self.injection)
        zeros = spec.start.kind == "zeros" and not spec.start.noise_std
        self.start = None if zeros else build(spec.start, width=spec.core_width)
        self.exit_gate = nn.Linear(spec.core_width, 1) if spec.exit_gate else None
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
            state: the state after the preceding tokens, from an earlier output; None: at the beginning.
            return_state: commit the tokens and return the state after them.
            window_length: solve this many tokens at a time, committing them before the next; None solves all
                tokens together. 1 is the paper's sequential mode, None its simultaneous mode; they agree
                within the tolerance. Gradients of a window reach earlier windows through the committed
                states.
            trace: keep the residual of every iteration (with a single window).
            return_logits: False computes the loss in chunks of tokens, so that (B, L, V) is never allocated;
                requires labels.
            search: options of this call's search, instead of the spec's: ``tolerance``, ``max_iterations``,
                ``damping``, ``warm_start``, ``moving_average``, ``loops``, ``start``, ``trajectory`` and
                ``exit``; `SearchOptions` describes each.

        Raises:
            ValueError: where shapes do not fit, the window is shorter than a token, tokens or labels are
                outside the vocabulary, or document numbers decrease (values are checked on a CPU only).

        """
        check_forward(input_ids, labels, vocab_size=len(self.embedding.weight), return_logits=return_logits)
        x_BLD = self.embedding(input_ids)  # x = embed(tokens)
        encoded = self.encode(  # coda(z*) with z* = f(z*)
            x_BLD,
            ids_BL=input_ids,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            return_state=return_state,
            window_length=window_length,
            search=SearchOptions.of_call(self.forward, search) if search else None,
            trace=trace,
            weights=self.cache_weights(),
        )
        output = read_out(self, encoded, labels=labels, return_logits=return_logits)  # logits = E coda(z*)
        if labels is None or self.objective is None or not self.training:
            return output
        return replace(output, loss=self.objective.loss(self, encoded, output, labels.long()))

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
        weights: ModelWeights | None = None,
    ) -> Encoded:
        """Return the head's input for embedded tokens (B, L, D); arguments as for ``forward``.

        ``ids_BL``: the tokens, where ``x`` is their plain embedding; a small vocabulary then needs one
        injection per word instead of one per token. ``weights``, from ``cache_weights``, are reused by
        consecutive calls, as in decoding.

        Raises:
            ValueError: where shapes or state do not fit, or the window is shorter than a token.

        """
        plan = search_plan(self, search, batch_size=len(x_BLD), trace=trace)
        inputs = check_inputs(
            x_BLD,
            ids_BL=ids_BL,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            window_length=window_length,
        )
        windows = inputs.windows(window_length)
        commit = return_state or len(windows) > 1
        check_windows(commit=commit, bidirectional=self.bidirectional)
        weights = weights if weights is not None else self.cache_weights()
        parts: list[Encoded] = []
        for window in windows:
            prepared = self.prepare(window, state, weights=weights, commit=commit)  # c = prelude(x)
            f, z0_BLC = self.bind_core(  # f(z) = leave(core(enter(z, e)), z, e)
                prepared,
                weights=weights,
                ids_BL=window.ids_BL,
                search=search and search.of_window(window.first, window.length, length=inputs.length),
            )
            with weights.activate():  # once for all calls of f
                solution, core = solve_window(  # z* = f(z*)
                    self, f, z0_BLC, prepared, weights=weights, plan=plan, commit=commit
                )
            output = self.output_map(prepared, weights)
            iterates: dict[int, Iterate] = {}  # before the commit: a state with room is written in place
            for t, z_BLC in (solution.trajectory or {}).items():
                iterates[t] = Iterate(z_BLC, output(z_BLC))
            if commit:
                hidden_BLD, coda = output.commit(solution.z)  # h = coda(z*)
                state = prepared.state.after(prepared.window, (*prepared.prelude, *core, *coda), solution.z)
                solution = _with_share(solution, inputs, window)
            else:
                hidden_BLD = output(solution.z)
            parts.append(Encoded(hidden_BLD, solution, iterates=iterates))
        whole = parts[0] if len(parts) == 1 else Encoded.concatenate(parts)
        return replace(whole, state=state if return_state else None)

    def bind_core(
        self,
        prepared: Prepared,
        *,
        weights: ModelWeights,
        ids_BL: Tensor | None = None,
        search: SearchOptions | None = None,
    ) -> tuple[BoundMap, Tensor]:
        """Return the map ``f`` of a prepared window and the start of its search, (B, L, C)."""
        window, c_BLD = prepared.window, prepared.c_BLD
        z0_BLC = self.initial_point(prepared.x_BLD, c_BLD, window.positions_BL)
        if search is not None and search.start is not None:
            z0_BLC = _check_start(search.start, z0_BLC)
        if search is not None and search.warm_start:
            z0_BLC = prepared.state.warm_start(window, z0_BLC)
        u, e_BLE = self.inject(c_BLD, weights, window=window, ids_BL=ids_BL)
        if u is not None and ids_BL is not None and u.ndim == 2:  # a table
            window = replace(window, u_rows_BL=ids_BL.contiguous())
        f = self.backbone.bind(
            window,
            states=prepared.core[: len(self.backbone.layers)],
            start_BLD=z0_BLC,
            weights=weights,
            u_BLU=u,
            injection=self.injection,
            e_BLD=e_BLE,
        )
        return f, z0_BLC

    def inject(
        self,
        c_BLD: Tensor,
        weights: WeightCache,
        *,
        window: Window | None = None,
        ids_BL: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the injection of the prelude's output (…, D): what mixers add (…, U), and ``e`` (…, E).

        Given the tokens of a window, what mixers add is a table with one row per word, (V, U), where the
        mixers support that and it costs less.
        """
        if window is not None and ids_BL is not None and self._injects_by_word(window, tokens=ids_BL.numel()):
            c_BLD = scaled(self.embedding.weight, self.spec.embedding_scale)
        with weights.activate():
            e, u = self.injection.source(c_BLD), self.injection.projected(c_BLD)
        return u, None if e is None else e.to(self.stream_dtype)

    def _injects_by_word(self, window: Window, *, tokens: int) -> bool:
        """Whether the mixers read the injection of this window from a table with one row per word."""
        plain = self.prelude is None and self.prelude_norm is None and self.spec.injection.adds_to_projections
        layers: list[Any] = [*self.backbone.layers]
        supported = plain and all(layer.mixer.supports_injection_table(window) for layer in layers)
        return supported and pays_by_token(self.embedding, tokens)

    def initial_point(self, x_BLD: Tensor, c_BLD: Tensor, positions_BL: Tensor) -> Tensor:
        """Return the start of the search, (B, L, C), given embedded tokens and the prelude's output."""
        width, dtype = self.backbone.width, self.stream_dtype
        if self.start is None:
            return torch.zeros(*x_BLD.shape[:2], width, dtype=dtype, device=x_BLD.device)
        start: Tensor = self.start(
            x_BLD=x_BLD, e_BLD=c_BLD, positions_BL=positions_BL, width=width, dtype=dtype
        )
        return start

    def search_config(self, options: SearchOptions | None = None) -> tuple[Solver, Stopping]:
        """Return the solver and stopping rule of the current mode, changed by ``options``."""
        if self.training:
            spec, solver, stopping = self.spec.solver, self.solver, self.stopping
        else:
            spec = self.spec.at_evaluation.solver
            solver, stopping = self.evaluation_solver, self.evaluation_stopping
        if options is None:
            return solver, stopping
        _check_warm_start(self.spec, options)
        changed = options.solver(spec)
        return solver if changed is spec else build(changed), options.stopping(stopping)

    def reconfigure(self, spec: ImplicitLMSpec) -> None:
        """Replace solver, gradient, stopping and depth, in training and evaluation, and keep the weights.

        The count of random depths is kept too, also while another depth is in force.

        Raises:
            ValueError: if any other field differs from the model's spec.

        """
        check_reconfigured(self.spec, spec)
        self._configure(spec)

    def _configure(self, spec: ImplicitLMSpec) -> None:
        self.spec = spec
        self.solver, self.gradient, self.stopping = build(spec.solver), build(spec.gradient), spec.stopping
        if self.gradient.retains_graph:
            keep_saved_tensors()
        self.evaluation_solver = build(spec.at_evaluation.solver)
        self.evaluation_stopping, self.core_loops = spec.evaluation_stopping, spec.state_loops
        if self.depth is not None or spec.depth.kind != "until_converged":
            device = self.embedding.weight.device
            self.depth = following_depth(self.depth, spec.depth, device=device, training=self.training)
        self.objective = None if spec.objective.kind == "last" else build(spec.objective)


def search_plan(
    model: ImplicitLM, search: SearchOptions | None, *, batch_size: int, trace: bool
) -> SearchPlan:
    """Return how a call of a model searches; draws the number of loops where it is random.

    Raises:
        ValueError: an option would have no effect in training, or drop the penalty of the gradient.

    """
    last_loops = model.training and isinstance(model.gradient, LastLoops)
    if model.training:
        steps = last_loops or (torch.is_grad_enabled() and not model.gradient.searches)
        names = ["exit", "moving_average"] if steps else ["exit"]
        if steps and not last_loops:
            names.append("max_iterations")
        if steps and not model.spec.gradient.differentiates_solver:
            names.append("damping")
        training = f"in training with gradient {model.spec.gradient.kind!r}; leave it out"
        _refuse(search, names, f"which has no effect {training}, or call model.eval() before")
        if model.spec.gradient.kind == "jacobian_penalty" and torch.is_grad_enabled():
            _refuse(search, ["loops"], f"which drops the penalty {training}, or set the depth of the spec")
    solver, stopping = model.search_config(search)
    loops, tolerance = loop_counts(model, batch_size, search), stopping.tolerance
    if loops is None and last_loops:
        loops = LoopCounts(stopping.max_iterations)
    looped = (search is not None and search.loops is not None) or last_loops
    if loops is not None and model.training and torch.is_grad_enabled() and not looped:
        # The gradient estimator searches, with as many iterations as the depth has loops.
        stopping = stopping.model_copy(update={"tolerance": 0.0, "max_iterations": loops.maximum})
        loops = None
    trajectory = () if search is None else tuple(search.trajectory)
    if model.training and model.objective is not None:
        most = stopping.max_iterations if loops is None else loops.maximum
        trajectory = tuple(sorted({*trajectory, *model.objective.iterates(most)}))
    return SearchPlan(solver, stopping, tolerance, search, loops, trajectory, trace)


def loop_counts(model: ImplicitLM, batch_size: int, search: SearchOptions | None = None) -> LoopCounts | None:
    """Return the number of loops of a call; None: the stopping rule ends them.

    Raises:
        ValueError: options of a search are given with a fixed number of loops.

    """
    asked: Count | tuple[int, int] | LoopCounts | None = None if search is None else search.loops
    if asked is None and model.training and model.depth is not None:
        asked = model.depth.sample(batch_size, device=model.embedding.weight.device)
    elif asked is None and not model.training:
        criterion = exit_spec(model, search)
        asked = criterion.loops if isinstance(criterion, FixedExitSpec) else None
    if asked is None:
        return None
    names = ["damping", "max_iterations", "moving_average"]
    _refuse(search, names, "but a fixed number of loops is no search; leave it out")
    return LoopCounts.of(asked)


def _refuse(search: SearchOptions | None, names: list[str], reason: str) -> None:
    """Raise ValueError where a call gives one of these options."""
    for name in names:
        if (given := getattr(search, name, None)) is not None:
            raise ValueError(f"{name} is {given}, {reason}")


def _with_share(solution: Solution, inputs: Inputs, window: Inputs) -> Solution:
    """Return a window's solution with its share of the row's penalty, which is a mean over real tokens."""
    if solution.penalty is None:
        return solution
    return replace(solution, penalty=solution.penalty * inputs.share(window))


def _check_warm_start(spec: ImplicitLMSpec, options: SearchOptions) -> None:
    """Raise ValueError where a warm start would replace the only place where the core reads the tokens."""
    if options.warm_start and spec.start.depends_on_tokens and not spec.injection.injects:
        raise ValueError(
            f"with injection {spec.injection.kind!r} the core reads a token only at the start, which "
            "warm_start replaces; leave warm_start out, or choose another injection"
        )


def _check_start(start: Tensor, like_BLC: Tensor) -> Tensor:
    """Return a given start of the search in the dtype of the stream.

    Raises:
        ValueError: for another shape or type.

    """
    if not isinstance(start, Tensor) or not start.is_floating_point():
        raise ValueError("start must be a floating-point tensor (batch, tokens, core width)")
    if start.shape != like_BLC.shape:
        raise ValueError(
            f"start has shape {tuple(start.shape)}; the state of the core has {tuple(like_BLC.shape)}"
        )
    return start.to(like_BLC)
