"""Cases of Ouro: all layers looped a fixed number of times, with an exit gate after each loop.

Shape legend: B batch, L tokens, D model width, N loops, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

import implicit_blocks as ib
from golden_cases.case import Case, published_rotations
from golden_cases.looped import logits_of
from implicit_blocks.exits import exit_distribution, first_exit


@dataclass(frozen=True)
class Loops:
    """The states (N, B, L, D), gate logits (N, B, L) and logits (N, B, L, V) of all loops."""

    states: Tensor
    gates: Tensor
    logits: Tensor

    @classmethod
    def of(cls, model: ib.ImplicitLM, tokens: Tensor, loops: int) -> Loops:
        """Return those of one forward pass."""
        out = model(tokens, loops=loops, trajectory=range(1, loops + 1))
        assert model.exit_gate is not None
        iterates = [out.trajectory[t] for t in range(1, loops + 1)]
        states = torch.stack([iterate.z_BLC for iterate in iterates])
        gates = model.exit_gate(states).squeeze(-1)
        return cls(states, gates, torch.stack([model.predict(each.hidden_BLD) for each in iterates]))

    @property
    def distribution(self) -> Tensor:
        """Probabilities of the exits, (B, L, N)."""
        return exit_distribution(self.gates)

    @property
    def expected_logits(self) -> Tensor:
        """The mixture of the logits, (B, L, V)."""
        return torch.einsum("nblv,bln->blv", self.logits, self.distribution)

    def at(self, exits_BL: Tensor) -> Tensor:
        """Return each token's logits of its own loop, numbered from 0."""
        index = exits_BL[None, :, :, None].expand(1, -1, -1, self.logits.shape[-1])
        return self.logits.gather(0, index)[0]


def compute(case: Case) -> None:
    """Compute and compare all tensors."""
    model = case.model()
    loops = int(case.details.get("eval_loops", case.published.get("total_ut_steps", 4)))
    with torch.no_grad():
        case.value("prelude", model.embedding(case.tokens))
        _loops(case, model, loops)
        _cached(case, model, loops)
    _training(case, model)
    with published_rotations(angles=torch.float64):
        precise = case.model(dtype=torch.float64)
        with torch.no_grad():
            found = Loops.of(precise, case.tokens, loops)
            case.value("f64/logits", found.logits[-1])
            case.value("f64/state_final", found.states[-1])
            case.value("f64/exit_pdf", lambda: found.distribution)
            case.value("f64/logits_expected", lambda: found.expected_logits)
        precise.train()
        case.value("f64/loss", lambda: _loss(case, precise))


def _loops(case: Case, model: ib.ImplicitLM, loops: int) -> None:
    """Compare states, gates and logits of each loop, and every way to choose an exit."""
    found = Loops.of(model, case.tokens, loops)
    threshold, step = (case.published.get(f"early_exit_{name}") for name in ("threshold", "step"))
    if threshold is None or step is not None:
        case.value("logits", logits_of(model(case.tokens)))
    else:
        case.value("logits", found.at(first_exit(found.distribution, threshold)))
    case.value("state_final", found.states[-1])
    for t in range(1, loops + 1):
        case.value(f"state_loop{t}", found.states[t - 1])
        case.value(f"loop{t}/gate_logit", found.gates[t - 1])
        case.value(f"logits_loops{t}", found.logits[t - 1])
        case.value(f"ce_loop{t}", _cross_entropy(found.logits[t - 1], case.labels))
        case.value(f"loop{t}/hidden_before_norm", partial(_before_norm, case, model, found, t))
    case.value("exit_pdf", found.distribution)
    case.value("logits_expected", found.expected_logits)
    for match in case.names(r"exit_step_([\d.]+)"):
        exits = first_exit(found.distribution, float(match[1]))
        case.value(match[0], exits)
        case.value(f"logits_threshold_{match[1]}", found.at(exits))


def _before_norm(case: Case, model: ib.ImplicitLM, found: Loops, t: int) -> Tensor:
    """Return the stream after the layers of loop t: the input of the core's norm in that call."""
    before: list[Tensor] = []
    norm = model.backbone.norm
    assert norm is not None

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # The norm is given the stream, and the last branch that is to be added to it.
        before.append(torch.stack(inputs).sum(0))

    handle = norm.register_forward_pre_hook(record)
    try:
        start = None if t == 1 else found.states[t - 2]
        model(case.tokens, loops=1, **({} if start is None else {"start": start}))
    finally:
        handle.remove()
    return before[0]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _cached(case: Case, model: ib.ImplicitLM, loops: int) -> None:
    """Compare cached decoding: a prefill, then token by token, with one state per loop."""
    if "logits_cached" not in case.expected:
        return
    prefill = int(case.details["cached_decode"]["prefill"])
    out = model(case.tokens[:, :prefill], return_state=True)
    parts, state = [logits_of(out)], out.state
    for t in range(prefill, case.tokens.shape[1]):
        out = model(case.tokens[:, t : t + 1], state=state, return_state=True)
        parts.append(logits_of(out))
        state = out.state
    case.value("logits_cached", torch.cat(parts, dim=1))
    assert state is not None
    assert len(state.layers) == loops * model.spec.n_layers
    case.value("cache/slots", lambda: torch.tensor(len(state.layers)))


def _training(case: Case, model: ib.ImplicitLM) -> None:
    """Compare the loss of the mixture of logits, and its gradients."""
    case.inputs.add("labels_unshifted")  # the labels before the shift of the published loss
    model.train()
    loss = _loss(case, model)
    case.value("loss", loss)
    loss.backward()
    case.gradients("grad/", model)


def _loss(case: Case, model: ib.ImplicitLM) -> Tensor:
    out = model(case.tokens, labels=case.labels)
    assert out.loss is not None
    loss: Tensor = out.loss
    return loss
