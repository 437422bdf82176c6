"""Executed floating-point operations of a run, from its spec: iterations without gradient are counted too.

So are the matrix products of Muon. Imports torch only for those.
"""

from __future__ import annotations

from functools import lru_cache

from implicit_blocks.models.counting import training_flops_per_token
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, ModelSpec
from trainer.specs.optimizers import MuonSpec
from trainer.specs.run import RunSpec


def flops_per_token(model: ModelSpec, *, length: int, bound: bool = False) -> float:
    """Return the FLOPs of a training step per token: forward, and backward of what is differentiated.

    A search is rejected or, if ``bound``, counts with its maximum of iterations.

    Raises:
        ValueError: it is no language model of this library, or the number of loops or the cost of a component
            is not known in advance.

    """
    if not isinstance(model, ExplicitLMSpec | ImplicitLMSpec):
        raise ValueError(
            f"models of kind {model.kind!r} have no count of FLOPs; use explicit_lm or implicit_lm"
        )
    if not bound and isinstance(model, ImplicitLMSpec):
        searches = model.depth.expected_loops() is None and model.stopping.tolerance > 0  # else all execute
        if searches or getattr(model.depth, "per", "batch") == "sequence":  # the largest number of a batch
            raise ValueError(
                f"with depth {model.depth.kind!r} it is not known how many FLOPs a step executes, so that a "
                "budget cannot be kept; choose depth: {kind: fixed, loops: N}, per: batch, or "
                "stopping.tolerance: 0"
            )
    found = training_flops_per_token(model, length=length)
    if found is None:
        raise ValueError("the model has a component whose FLOPs are not known (flops_per_token)")
    return found


def optimizer_flops_per_step(spec: RunSpec) -> float:
    """Return the FLOPs of the matrix products of a step of the optimizer: those of Muon, 0 for others.

    Elementwise operations, such as all of AdamW's, are not counted, as nowhere else.
    """
    optimizer = spec.training.optimizer
    return _muon_flops(spec.model, optimizer.newton_schulz_steps) if isinstance(optimizer, MuonSpec) else 0.0


@lru_cache(maxsize=64)
def _muon_flops(model: ModelSpec, steps: int) -> float:
    import torch

    from implicit_blocks import registry
    from trainer.optim.capturable import newton_schulz_flops
    from trainer.optim.muon import matrices_of

    with torch.device("meta"):
        matrices = matrices_of(registry.build(model))
    return newton_schulz_flops([(p.shape[0], p.shape[1]) for p in matrices.values()], steps=steps)


def run_flops(spec: RunSpec, *, bound: bool = False) -> float:
    """Return the executed training FLOPs of a run, over all its phases.

    ``bound`` and the errors are those of `flops_per_token`.

    """
    of_optimizer = optimizer_flops_per_step(spec)
    return sum(
        (phase.last_step - phase.first_step)
        * (
            phase.training.batch_size
            * phase.data.seq_len
            * flops_per_token(phase.model, length=phase.data.seq_len, bound=bound)
            + of_optimizer
        )
        for phase in spec.phase_specs()
    )
