"""Cases of Parcae: numbers of loops for the batch, each sequence or each token, from given initial states.

Shape legend: B batch, L tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

import implicit_blocks as ib
from golden_cases.case import Case, published_rotations
from golden_cases.looped import logits_of, prelude_output
from implicit_blocks.search.loops import LoopCounts

SEED = 514229  # of the published sampler, to which the number of the step is added


def compute(case: Case) -> None:
    """Compute and compare all tensors."""
    model = case.model()
    start = case.input("state_init") if "state_init" in case.expected else _zeros(case, model)
    loops = int(case.details.get("eval_loops", case.published.get("mean_recurrence", 32)))
    with torch.no_grad():
        case.value("prelude", prelude_output(model, case.tokens))
        _loops(case, model, start, loops)
    model.train()
    _training(case, model, start)
    _sampler(case)
    with published_rotations(then_norm=bool(case.published.get("qk_norm"))):
        precise = case.model(dtype=torch.float64)
        with torch.no_grad():
            case.value("f64/prelude", lambda: prelude_output(precise, case.tokens))
            out = precise(case.tokens, loops=loops, start=start.double())
            case.value("f64/logits", logits_of(out))
            assert out.solution is not None
            case.value("f64/state_final", out.solution.z)
        precise.train()
        if "f64/loss" in case.expected or "f64/logits_per_sequence" in case.expected:
            out = _step(case, precise, start.double(), counts(case, "depth"))
            assert out.loss is not None
            case.value("f64/loss", out.loss)
            case.value("f64/logits_per_sequence", logits_of(out))


def _zeros(case: Case, model: ib.ImplicitLM) -> Tensor:
    return torch.zeros(*case.tokens.shape, model.spec.core_width)


def counts(case: Case, name: str) -> LoopCounts:
    """Return the published numbers of loops, which were drawn by their sampler."""
    without, differentiated = case.input(f"{name}/n_no_grad"), case.input(f"{name}/k_grad")
    if without.numel() == 1:  # one number for the batch
        return LoopCounts(int(without) + int(differentiated), int(differentiated))
    return LoopCounts(without + differentiated, differentiated)


def _loops(case: Case, model: ib.ImplicitLM, start: Tensor, loops: int) -> None:
    """Compare states and logits after fixed numbers of loops."""
    states = [int(match[1]) for match in case.names(r"state_loop(\d+)")]
    out = model(case.tokens, loops=loops, start=start, trajectory=states)
    case.value("logits", logits_of(out))
    assert out.solution is not None
    case.value("state_final", out.solution.z)
    if "coda_input" in case.expected:
        assert model.core_projection is not None
        case.value("coda_input", model.core_projection(out.solution.z))
    for t in states:
        case.value(f"state_loop{t}", out.trajectory[t].z_BLC)
    for match in case.names(r"logits_loops(\d+)"):
        case.value(match[0], logits_of(model(case.tokens, loops=int(match[1]), start=start)))


def _training(case: Case, model: ib.ImplicitLM, start: Tensor) -> None:
    """Compare losses and gradients with depths per sequence, per token, and alike for the batch."""
    if "depth/n_no_grad" in case.expected:
        out = _step(case, model, start, counts(case, "depth"))
        case.value("logits_per_sequence", logits_of(out))
        _compare(case, model, out, "loss", "grad/")
    if "depth_tok/n_no_grad" in case.expected:
        per_token = _step(case, model, start, counts(case, "depth_tok"))
        _compare(case, model, per_token, "loss_per_token", "grad_per_token/")
    for match in case.names(r"loss_pair_(\d+)_(\d+)"):
        without, differentiated = int(match[1]), int(match[2])
        pair = LoopCounts(without + differentiated, differentiated)
        out = _step(case, model, start, pair)
        _compare(case, model, out, match[0], f"grad_pair_{without}_{differentiated}/")


def _compare(case: Case, model: ib.ImplicitLM, out: ib.LMOutput, loss: str, gradients: str) -> None:
    assert out.loss is not None
    case.value(loss, out.loss)
    model.zero_grad(set_to_none=True)
    out.loss.backward()
    case.gradients(gradients, model)


def _step(case: Case, model: ib.ImplicitLM, start: Tensor, loops: LoopCounts) -> ib.LMOutput:
    out: ib.LMOutput = model(case.tokens, labels=case.labels, loops=loops, start=start)
    return out


def _sampler(case: Case) -> None:
    """Compare the published draws, divided into loops without and with gradients by our rule.

    The random numbers are the published ones: torch's Poisson numbers from a seed that counts the steps.
    """
    published = case.published
    mean, last = int(published["mean_recurrence"]), int(published["mean_backprop_depth"])
    for match in case.names(r"sampler/step(\d+)/n"):
        step, size = int(match[1]), case.expected[match[0]].shape
        generator = torch.Generator().manual_seed((SEED + step) % (2**31 - 1))
        scheme = str(published.get("sampling_scheme", "poisson-truncated-full"))
        without, differentiated = _draw(scheme, mean, last, size, generator)
        case.value(f"sampler/step{step}/n", without)
        case.value(f"sampler/step{step}/k", differentiated)


def _draw(
    scheme: str, mean: int, last: int, size: torch.Size, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the numbers of loops without and with gradients of a batch, by a published scheme."""
    if scheme == "fixed":
        without, differentiated = LoopCounts(max(mean, last)).split(last)
        return torch.full(size, int(without)), torch.full(size, int(differentiated))
    if scheme in ("poisson-truncated-full", "poisson-full"):
        total = torch.poisson(torch.full(size, float(mean)), generator=generator).clamp(min=1).long()
        split = LoopCounts(total).split(last if scheme == "poisson-truncated-full" else None)
        without, differentiated = (torch.as_tensor(part) for part in split)
        return without, differentiated
    rest = torch.poisson(torch.full(size, float(max(mean - last, 0))), generator=generator).long()
    return rest, torch.full(size, last)
