"""The whole training step of a small model as one CUDA graph: forward, backward, clipping, optimizer.

A model of a few million parameters is bound by launches: the device computes its kernels faster than the host
launches them. A captured step is one launch, so that several models can train side by side on streams of one
process (`trainer.run.side_by_side`). Without a GPU the same step runs eagerly.

Shape legend: K steps that are loaded at a time, B sequences of a step, L tokens.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from implicit_blocks.cuda.capture import capture
from implicit_blocks.depths import RandomDepth, RandomDepthSpec
from implicit_blocks.gradients import LastLoops, LastLoopsSpec
from implicit_blocks.search.agreement import fixed_budget
from implicit_blocks.specs import ModelSpec
from trainer.data.source import Batch
from trainer.optim.capturable import capturable_step, make_capturable, undo_capturable
from trainer.optim.ema import WeightAverage
from trainer.run.step import Tally, autocast, set_learning_rate
from trainer.run.trainable_model import AgreesOnStopping, TrainingOutput
from trainer.specs.data import DataSpec
from trainer.specs.run import Phase, RunSpec

_LOG = logging.getLogger(__name__)

WARM_UP = 3
"""Steps that run eagerly before the capture: kernels are compiled and the optimizer's state is allocated."""
MOST_GRAPHS = 16
"""Numbers of loops that have a graph each where the depth is random; steps with others run eagerly."""


def refuse_unsupported(spec: RunSpec) -> None:
    """Reject runs whose steps are not all alike: one batch of whole rows, one optimizer, no callbacks.

    Raises:
        ValueError: names the field, and what to do.

    """
    training = spec.training
    wrong = {
        "training.micro_batch_size": training.micro_batch_size is not None,
        "training.init_from": training.init_from is not None,
        "data.documents": _separates_documents(spec.data),
        "callbacks": bool(spec.callbacks),
        "phases": any(own[1:] != (training, spec.data) for own in spec.changed_sections()),
    }
    found = [name for name, unsupported in wrong.items() if unsupported]
    if found:
        raise ValueError(
            f"{', '.join(found)}: not supported for models that train side by side, whose phases may change "
            "only the model; remove it, or train with python -m trainer"
        )


def why_phase_not_captured(spec: RunSpec, phase: Phase, device: torch.device) -> str | None:
    """Return why steps of a phase of a run cannot be captured; None: they can."""
    size = phase.training.micro_batch_size
    if size is not None and size < phase.training.batch_size:
        return f"training.micro_batch_size is {size}, and only steps of one batch can be captured"
    if _separates_documents(phase.data):
        return "data.documents keeps the documents of a batch apart, and only whole rows can be captured"
    return why_not_captured(spec, phase.model, device)


def _separates_documents(data: DataSpec) -> bool:
    sources = [data, *(source.data for source in getattr(data, "sources", ()))]
    return any(getattr(each, "documents", "ignore") != "ignore" for each in sources)


def why_not_captured(spec: RunSpec, model: ModelSpec, device: torch.device) -> str | None:
    """Return why the step of this model cannot be captured; None: it can.

    The host must know the number of loops: a stopping rule reads the device.
    """
    if device.type != "cuda":
        return f"the device is {device.type}"
    if spec.training.optimizer.kind not in ("adamw", "muon"):
        return f"the optimizer is {spec.training.optimizer.kind}, and only adamw and muon can be captured"
    start = getattr(model, "start", None)
    is_noisy = start is not None and (start.kind == "normal" or start.noise_std > 0)
    if getattr(model, "dropout", 0.0) > 0 or is_noisy:
        what = "the noise of z_init" if is_noisy else "dropout"
        return f"{what} draws random numbers, which models on several streams would share"
    depth, gradient = getattr(model, "depth", None), getattr(model, "gradient", None)
    if isinstance(depth, RandomDepthSpec):
        if not takes_loops(depth, gradient):
            return f"depth {depth.kind!r} can be captured per batch and with gradient last_loops alone"
    elif depth is not None and depth.kind != "fixed":
        return f"depth {depth.kind!r} has no fixed number of loops"
    if gradient is not None and gradient.kind not in ("last_loops", "unrolled"):
        return f"gradient {gradient.kind!r} searches until a tolerance"
    return None


def takes_loops(depth: RandomDepthSpec, gradient: object) -> bool:
    """Return whether steps with this depth and gradient (or its spec) can be given the number of loops."""
    return depth.per == "batch" and isinstance(gradient, LastLoops | LastLoopsSpec)


class CapturedStep:
    """Makes training steps of one model from batches that are loaded some at a time.

    Everything that a step reads or writes is on the device: batches, learning rates, losses and the number of
    the step. The host only replays the graph. With a random depth each number of loops that it draws has a
    graph, captured at the second step with this number. A step whose loss or gradient norm is not finite
    changes nothing, as in ``trainer.run.step``; its loss is recorded.

    Args:
        model: on the device, in training mode; with a fixed number of loops if it is captured.
        optimizer: of the model; AdamW, or Muon with AdamW, if the step is captured.
        rates: the learning rate of each step of the run.
        batch_size: B.
        length: L.
        precision: ``float32``, or ``bfloat16`` for autocast.
        max_grad_norm: the norm to which gradients are clipped; None: not clipped.
        device: of the model.
        at_once: K, the number of steps whose batches are loaded together.
        averages: factors of exponential moving averages of the weights, per step.
        not_captured: why the step cannot be captured (``why_not_captured``); None: it can.
        first: number of steps of the run that are made already.
        last_tokens: tokens at the end of a sequence that ``accuracy_last`` covers, to measure the steps
            (:meth:`measurements`); None: only losses are recorded.
        average: of the weights, updated by each step.
        own_stream: whether the steps have a stream of their own; False: the current one.

    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        rates: Sequence[float],
        batch_size: int,
        length: int,
        precision: str,
        max_grad_norm: float | None,
        device: torch.device,
        at_once: int = 32,
        averages: Sequence[float] = (),
        not_captured: str | None = None,
        first: int = 0,
        last_tokens: int | None = None,
        average: WeightAverage | None = None,
        own_stream: bool = True,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.precision, self.at_once = precision, at_once
        self.limit = math.inf if max_grad_norm is None else max_grad_norm
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            current = torch.cuda.current_stream(device)
            self.stream = torch.cuda.Stream(device) if own_stream else current
            self.stream.wait_stream(current)
        self.graphs: dict[int | None, torch.cuda.CUDAGraph] = {}
        """By number of loops; None: that of the model."""
        self.not_captured = not_captured
        """Why the step runs eagerly; None: it is captured."""
        self.done = first
        """Number of steps made so far, on the host."""
        self.first_adjoint = 0
        """First index of the adjoint solves in the measurements of a step."""
        self._last_tokens, self._average = last_tokens, average
        self._measured: Tensor | None = None
        self._host_rates = tuple(rates)
        self._eager_left, self._seen = WARM_UP, set[int | None]()
        self._parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        with self.in_stream():
            self._batches_KBL = torch.zeros(2, at_once, batch_size, length, dtype=torch.int64, device=device)
            self._slot = torch.zeros(1, dtype=torch.int64, device=device)
            self._step = torch.full((1,), first, dtype=torch.int64, device=device)
            self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
            self._rate = torch.zeros((), dtype=torch.float32, device=device)
            self._skip = torch.zeros((), dtype=torch.float32, device=device)
            self._losses = torch.full((len(rates),), math.nan, dtype=torch.float32, device=device)
            self._averages = {decay: [p.detach().clone() for p in self._parameters] for decay in averages}
            updates = 0 if average is None else average.updates
            self._updates = torch.full((), float(updates), device=device)
        self._choose_agreement()
        self._on_device = device.type == "cuda" and make_capturable(optimizer, self._rate, self._skip)

    def recapture(self, not_captured: str | None = None) -> None:
        """Forget the graphs, as after a change of the model's number of loops.

        ``not_captured`` says why the steps that follow run eagerly; None: they are captured.
        """
        self._eager_left, self.not_captured = WARM_UP, not_captured
        self.graphs.clear()
        self._seen.clear()
        self._choose_agreement()

    def load(self, batch: Batch) -> None:
        """Load the batches of the next steps, up to K; rows are in the order of the steps."""
        count = len(batch) // self._batches_KBL.shape[2]
        both = torch.stack((batch.inputs, batch.labels)).view(2, count, *self._batches_KBL.shape[2:])
        if self.device.type == "cuda":
            both = both.pin_memory()
        with self.in_stream():
            self._batches_KBL[:, :count].copy_(both, non_blocking=True)
            self._slot.zero_()

    def run(self, count: int) -> None:
        """Make ``count`` steps on the batches loaded last; on a GPU the host does not wait for them."""
        self._choose_agreement()
        with self.in_stream():
            for _ in range(count):
                loops = self._draw_loops()
                if loops not in self.graphs and self._may_capture(loops):
                    self._capture(loops)
                if loops in self.graphs:
                    self.graphs[loops].replay()
                else:
                    self._eager_left = max(0, self._eager_left - 1)
                    self._seen.add(loops)
                    self._body(loops)
                self.done += 1

    def losses(self) -> Tensor:
        """Return the losses of the steps so far, float32 on the host; waits for the device."""
        self.synchronize()
        return self._losses[: self.done].cpu()

    def measurements(self, count: int) -> Tensor:
        """Return the values (`Tally.values`) of the first steps on the batches loaded last, (count, N)."""
        assert self._measured is not None, "a step was made, with `last_tokens`"
        return self._measured[:count]

    def release(self) -> None:
        """Return model and optimizer to ordinary steps, after the last step."""
        self.synchronize()
        self.graphs.clear()
        if isinstance(self.model, AgreesOnStopping):
            self.model.agree = None
        if self._on_device:
            undo_capturable(self.optimizer)

    def last_loss(self) -> Tensor:
        """Return the loss of the latest step in page-locked memory, which the stream fills in its order."""
        at = slice(max(0, self.done - 1), max(1, self.done))
        if self.stream is None:
            return self._losses[at].clone()
        value = torch.empty(1, pin_memory=True)
        with self.in_stream():
            value.copy_(self._losses[at], non_blocking=True)
        return value

    def synchronize(self) -> None:
        """Wait for the steps of this model."""
        if self.stream is not None:
            self.stream.synchronize()

    @contextmanager
    def averaged(self, decay: float) -> Iterator[None]:
        """Give the model the weights averaged with this factor in the ``with`` block.

        Raises:
            ValueError: there is no such average.

        """
        if decay not in self._averages:
            raise ValueError(f"the weights were not averaged with {decay}; give it in `averages`")
        with self.in_stream(), torch.no_grad():
            kept = [p.detach().clone() for p in self._parameters]
            torch._foreach_copy_(self._parameters, self._averages[decay])
        try:
            yield
        finally:
            with self.in_stream(), torch.no_grad():
                torch._foreach_copy_(self._parameters, kept)

    def in_stream(self) -> AbstractContextManager[Any]:
        """Return the context of this model's stream, in which all its work must be launched."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _choose_agreement(self) -> None:
        if isinstance(self.model, AgreesOnStopping):
            # With a fixed budget no call asks the device whether a row has diverged.
            self.model.agree = fixed_budget if self.not_captured is None else None

    def _draw_loops(self) -> int | None:
        """Return the number of loops of the next step where it is random; None: the model chooses it."""
        depth, gradient = getattr(self.model, "depth", None), getattr(self.model, "gradient", None)
        if not isinstance(depth, RandomDepth) or not takes_loops(depth.spec, gradient):
            return None
        loops = depth.sample(self._batches_KBL.shape[2], self.device)
        assert isinstance(loops, int)
        return loops

    def _may_capture(self, loops: int | None) -> bool:
        """Return whether the kernels of a step with these loops are compiled, and a graph is allowed."""
        is_ready = loops in self._seen and not self._eager_left and len(self.graphs) < MOST_GRAPHS
        return is_ready and self.not_captured is None

    def _capture(self, loops: int | None) -> None:
        """Capture the step; one that cannot be captured runs eagerly from now on, with a line in the log."""
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with capture(graph, next(iter(self.graphs.values())).pool() if self.graphs else None):
                self._body(loops)
        except Exception as error:  # torch reports failed captures with errors of several kinds
            self.not_captured = f"{type(error).__name__}: {error}".splitlines()[0]
            _LOG.warning("the training step cannot be captured, so it runs eagerly: %s", self.not_captured)
            self.optimizer.zero_grad(set_to_none=True)
            return
        self.graphs[loops] = graph

    def _body(self, loops: int | None) -> None:
        """One step, without reading the device where it may be captured."""
        self.optimizer.zero_grad(set_to_none=True)
        inputs_BL, labels_BL = self._batches_KBL.index_select(1, self._slot).squeeze(1).unbind(0)
        with autocast(self.device, self.precision):
            chosen = {} if loops is None else {"loops": loops}
            output = self.model(inputs_BL, labels=labels_BL, return_logits=False, **chosen)
        loss = output.loss
        penalty = None if output.solution is None else output.solution.penalty
        (loss if penalty is None else loss + penalty.mean()).backward()
        gradients = [p for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(gradients, self.limit)
        with torch.no_grad():
            self._losses.index_copy_(0, self._step, loss.detach().float().view(1))
            if self._last_tokens is not None:
                self._measure(output, labels_BL, norm, self._last_tokens)
            finite = loss.detach().isfinite() & norm.detach().isfinite()
            if self._on_device:
                self._rate.copy_(self._rates.index_select(0, self._step).squeeze(0))
                self._skip.copy_((~finite).float())
                capturable_step(self.optimizer, self._rate, self._skip)
            elif bool(finite):
                set_learning_rate(self.optimizer, self._host_rates[self.done])
                self.optimizer.step()
            for decay, average in self._averages.items():
                torch._foreach_lerp_(average, self._parameters, 1 - decay)
            self._slot += 1
            self._step += 1
            if self._average is not None:
                self._average.capturable_update(self._step[0], (~finite).float(), self._updates)

    def _measure(self, output: TrainingOutput, labels_BL: Tensor, norm: Tensor, last_tokens: int) -> None:
        """Write what a step measures, in the row of its batch."""
        assert output.loss is not None
        tally = Tally(self.device)
        tally.add(output.loss.detach(), output, labels_BL, last_tokens)
        values, self.first_adjoint = tally.values(norm.detach())
        if self._measured is None:  # in the first step, which is not captured
            self._measured = values.new_zeros(self.at_once, len(values))
        self._measured.index_copy_(0, self._slot, values[None])
