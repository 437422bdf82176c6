"""Objectives: the loss of a training step, given the iterates of the core.

Losses at several iterates and learned exits: R. Zhu et al., "Scaling Latent Reasoning via Looped Language
Models" (Ouro), 2025.

Shape legend: B batch, L tokens, N loops, V vocabulary (padded).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.exits import exit_distribution
from implicit_blocks.models.objective_specs import (
    ExitExpectationSpec,
    ExitMixtureSpec,
    IteratesObjectiveSpec,
    LastObjectiveSpec,
    UntilErrorSpec,
)
from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.models.parts import mean_cross_entropy, read_out
from implicit_blocks.specs.base import Component
from implicit_blocks.specs.families import ObjectiveSpec

if TYPE_CHECKING:
    from implicit_blocks.models.implicit import ImplicitLM


class Objective(Component):
    """Computes the loss of a training step, given the iterates of the core."""

    @classmethod
    def from_spec(cls, spec: ObjectiveSpec) -> Objective:  # type: ignore[override]  # each takes its spec whole
        """Build the objective of a spec."""
        return cls(spec)

    def __init__(self, spec: ObjectiveSpec) -> None:
        self.spec = spec

    def iterates(self, loops: int) -> tuple[int, ...]:
        """Return the iterates that the loss reads, of a step with up to ``loops`` loops."""
        return ()

    @abstractmethod
    def loss(self, model: ImplicitLM, encoded: Encoded, output: LMOutput, labels_BL: Tensor) -> Tensor:
        """Return the loss, given the output for the last iterate; ``labels`` as in ``ImplicitLM.forward``."""


class LastObjective(Objective):
    """The cross-entropy of the last iterate's predictions."""

    spec: LastObjectiveSpec

    def loss(self, model: ImplicitLM, encoded: Encoded, output: LMOutput, labels_BL: Tensor) -> Tensor:
        """Return the loss of the output."""
        assert output.loss is not None
        return output.loss


class UntilError(Objective):
    """The cross-entropy of each sequence's tokens up to its first wrong prediction.

    In a task that tracks a state an error changes the state of the model. Every later label then names the
    state that another sequence would have led to: its gradient undoes what the model has learned about the
    following tokens, and says nothing about the error.
    """

    spec: UntilErrorSpec

    def loss(self, model: ImplicitLM, encoded: Encoded, output: LMOutput, labels_BL: Tensor) -> Tensor:
        """Return the mean over the tokens that have a label and no error before them."""
        predictions = output.predictions if output.logits is None else output.logits.argmax(-1)
        wrong = (predictions != labels_BL) & (labels_BL != -100)
        after_error = wrong.cumsum(dim=1) - wrong.long() > 0
        kept = labels_BL.masked_fill(after_error, -100)
        value = read_out(model, encoded, labels=kept, return_logits=False).loss
        assert value is not None
        return value


class IteratesObjective(Objective):
    """The weighted mean of the cross-entropies of several iterates' predictions.

    Iterates that a step with fewer loops does not reach are left out, and so are their weights.
    """

    spec: IteratesObjectiveSpec

    def iterates(self, loops: int) -> tuple[int, ...]:
        """Return the iterates that the step reaches."""
        return tuple(t for t in self.spec.at if t != "last" and t <= loops)

    def loss(self, model: ImplicitLM, encoded: Encoded, output: LMOutput, labels_BL: Tensor) -> Tensor:
        """Return the mean of the losses."""
        weights = self.spec.weights or (1.0,) * len(self.spec.at)
        assert output.loss is not None
        found: list[tuple[float, Tensor]] = []
        for t, weight in zip(self.spec.at, weights, strict=True):
            if t == "last":
                found.append((weight, output.loss))
            elif t in encoded.iterates:
                part = replace(encoded, hidden_BLD=encoded.iterates[t].hidden_BLD)
                value = read_out(model, part, labels=labels_BL, return_logits=False).loss
                assert value is not None
                found.append((weight, value))
        if not found:
            return output.loss
        return torch.stack([weight * value for weight, value in found]).sum() / sum(w for w, _ in found)


class _ExitObjective(Objective):
    def iterates(self, loops: int) -> tuple[int, ...]:
        """Return all iterates."""
        return tuple(range(1, loops + 1))

    @staticmethod
    def read(model: ImplicitLM, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Return the logits of all loops, (N, B, L, V), and the exit distribution, (B, L, N)."""
        assert model.exit_gate is not None
        assert encoded.solution is not None
        steps = [encoded.iterates[t] for t in sorted(encoded.iterates)]
        logits = torch.stack([model.predict(step.hidden_BLD) for step in steps])
        gates = torch.stack([model.exit_gate(step.z_BLC).squeeze(-1) for step in steps])
        # The last loop of a row takes the mass that remains; the iterates after it only repeat its value.
        each = encoded.solution.token_iterations
        taken = encoded.solution.iterations[:, None] if each is None else each
        loops = torch.arange(1, len(steps) + 1, device=taken.device)[:, None, None]
        return logits, exit_distribution(gates.masked_fill(loops >= taken, torch.inf))


class ExitMixture(_ExitObjective):
    """The cross-entropy of ``Σ_t p_t logits_t``, where p is the exit distribution of each token."""

    spec: ExitMixtureSpec

    def loss(self, model: ImplicitLM, encoded: Encoded, output: LMOutput, labels_BL: Tensor) -> Tensor:
        """Return the loss of the mixture."""
        logits, probability = self.read(model, encoded)
        mixed = torch.einsum("nblv,bln->blv", logits, probability.to(logits.dtype))
        return mean_cross_entropy(mixed, labels_BL)


class ExitExpectation(_ExitObjective):
    """``Σ_t p_t CE_t − β H(p)``, averaged over the tokens with a label."""

    spec: ExitExpectationSpec

    def loss(self, model: ImplicitLM, encoded: Encoded, output: LMOutput, labels_BL: Tensor) -> Tensor:
        """Return the expected loss less the weighted entropy."""
        logits, probability = self.read(model, encoded)
        each = torch.stack(
            [
                F.cross_entropy(
                    one.flatten(0, 1), labels_BL.flatten(), ignore_index=-100, reduction="none"
                ).view_as(labels_BL)
                for one in logits
            ],
            dim=-1,
        )
        # The derivative of p log p at p = 0, where a gate is saturated, must be finite.
        entropy = -(probability * probability.clamp(min=torch.finfo(probability.dtype).tiny).log()).sum(-1)
        value = (probability * each).sum(-1) - self.spec.entropy_weight * entropy
        labelled = labels_BL != -100
        return torch.where(labelled, value, 0.0).sum() / labelled.sum().clamp(min=1)
