"""Cases of Huginn: prelude, looped core, coda; a fixed number of loops from given initial states.

Shape legend: B batch, L tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

import implicit_blocks as ib
from golden_cases.case import Case, published_rotations
from golden_cases.looped import logits_of, prelude_output


def compute(case: Case) -> None:
    """Compute and compare all tensors."""
    start = case.input("state_init")
    model = case.model()
    loops = int(case.details["eval_loops"])
    with torch.no_grad():
        case.value("prelude", prelude_output(model, case.tokens))
        _loops(case, model, start, loops)
        _cached(case, model, start)
    _training(case, model, start)
    with published_rotations():
        precise = case.model(dtype=torch.float64)
        with torch.no_grad():
            case.value("f64/prelude", lambda: prelude_output(precise, case.tokens))
            out = precise(case.tokens, loops=loops, start=start.double())
            case.value("f64/logits", logits_of(out))
            case.value("f64/state_final", _final(precise, out))
        precise.train()
        case.value("f64/loss", lambda: _loss(case, precise, start.double()))


def _final(model: ib.ImplicitLM, out: ib.LMOutput) -> Tensor:
    """Return the norm of the last state, which the published code calls the latent state."""
    assert out.solution is not None
    assert model.norm is not None
    normed: Tensor = model.norm(out.solution.z)
    return normed


def _loops(case: Case, model: ib.ImplicitLM, start: Tensor, loops: int) -> None:
    """Compare states and logits after fixed numbers of loops."""
    states = [int(match[1]) for match in case.names(r"state_loop(\d+)")]
    out = model(case.tokens, loops=loops, start=start, trajectory=states)
    case.value("logits", logits_of(out))
    assert out.solution is not None
    case.value("core_final", out.solution.z)
    case.value("state_final", _final(model, out))
    for t in states:
        case.value(f"state_loop{t}", out.trajectory[t].z_BLC)
    for match in case.names(r"logits_loops(\d+)"):
        case.value(match[0], logits_of(model(case.tokens, loops=int(match[1]), start=start)))


def _cached(case: Case, model: ib.ImplicitLM, start: Tensor) -> None:
    """Compare cached decoding: a prefill, then token by token, with one state per loop."""
    details = case.details.get("cached_decode")
    if details is None:
        return
    loops, prefill = int(details["loops"]), int(details["prefill"])
    decoder = case.model(at_evaluation={"exit": {"kind": "fixed", "loops": loops}})
    first = decoder(case.tokens[:, :prefill], start=start[:, :prefill], return_state=True)
    parts, state = [logits_of(first)], first.state
    for t in range(prefill, case.tokens.shape[1]):
        one = slice(t, t + 1)
        out = decoder(case.tokens[:, one], start=start[:, one], state=state, return_state=True)
        parts.append(logits_of(out))
        state = out.state
    case.value(f"logits_cached_loops{loops}", torch.cat(parts, dim=1))
    if "cache/slots" in case.expected:
        spec = decoder.spec
        before = 0 if spec.prelude is None else spec.prelude.n_layers
        after = 0 if spec.coda is None else spec.coda.n_layers
        assert state is not None
        count = len(state.layers) - after
        assert count == before + loops * spec.n_layers
        # Published: numbers from 0 for the prelude and the loops, and from −1 downwards for the coda.
        slots = [*range(count), *range(-after, 0)]
        found = torch.tensor(sorted(slots) if case.expected["cache/slots"][0] < 0 else slots)
        case.value("cache/slots", found)


def _training(case: Case, model: ib.ImplicitLM, start: Tensor) -> None:
    """Compare the loss and the gradients of n loops without and k with gradients."""
    model.train()
    loss = _loss(case, model, start)
    case.value("loss", loss)
    loss.backward()
    case.gradients("grad/", model)


def _loss(case: Case, model: ib.ImplicitLM, start: Tensor) -> Tensor:
    given = case.details.get("train_num_steps", (0, case.published["mean_recurrence"]))
    if "num_steps_train" in case.expected:
        given = case.input("num_steps_train").tolist()
    without, differentiated = map(int, given)
    out = model(
        case.tokens, labels=case.labels, loops=(without + differentiated, differentiated), start=start
    )
    assert out.loss is not None
    loss: Tensor = out.loss
    return loss
