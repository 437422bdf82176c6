"""Which searches oscillate while a word problem is learned: eigenvalues, norms and tokens along training.

    python benchmarks/oscillations.py [--spec word_problem_a5_long] [--seeds 30] [--stop-at 1900] [--every 20]
        [--sequences 256] [--device auto] [--output oscillations] [path.to.key=value …]

The run of the spec is trained as by ``python -m trainer`` up to the step ``--stop-at``. Its weights are
examined in float32 after every ``--every`` steps, and after every fourth step of a burst, in which more than
a tenth of the searches do not converge:

- Sequences of one token, and of two of which the first is the identity or a random element: eigenvalues of
  the map's Jacobian at the last token's fixed point, and the norm of the fixed point.
- A fixed batch of sequences of the last phase's length, with the solver of the training: which token is the
  first one that does not converge.

Damping d stops oscillations along a real eigenvalue above ``1 − 2/d``.

Shape legend: B sequences, L tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from report import machine, write
from torch import Tensor

from implicit_blocks import registry
from implicit_blocks.analysis import spectral_radius
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.specs import AtEvaluation, PicardSpec, StoppingOverrides
from trainer.callbacks import Callback, CallbackContext
from trainer.cli.exit_codes import refuse
from trainer.experiments.common.runs import run_spec
from trainer.experiments.common.search import by_token
from trainer.run.build import build
from trainer.specs.run import CallbackSpec, RunSpec

BURST = 0.1
"""Share of the searches of a step from which on it belongs to a burst."""
BURST_EVERY = 4
"""Of the steps of a burst at full length, every fourth is examined."""


class ExamineSpec(CallbackSpec):
    """Examine the searches of the weights along a run."""

    kind: str = "examine_searches"
    every: int = 20
    sequences: int = 256


class Examine(Callback):
    """Keeps a copy of the model, without captured graphs, and a row of figures per examined step."""

    rows: list[dict[str, Any]] = []  # noqa: RUF012  # of the run that is trained last

    def __init__(self, spec: ExamineSpec) -> None:
        self._spec = spec
        Examine.rows = []

    def on_start(self, run: CallbackContext, *, step: int, checkpoint: Path | None) -> None:
        """Build the copy and draw the fixed sequences."""
        model: ImplicitLM = registry.build(run.spec.model)
        self._model = model.to(run.device).eval()
        generator = torch.Generator().manual_seed(0)
        self._size = run.spec.model.vocab_size  # type: ignore[attr-defined]  # of a language model
        length = run.spec.data.seq_len
        identity = torch.rand(self._spec.sequences, length, generator=generator) < 0.5
        tokens = torch.randint(1, self._size, (self._spec.sequences, length), generator=generator)
        self._tokens = torch.where(identity, 0, tokens).to(run.device)
        self._before = torch.randint(1, self._size, (self._size,), generator=generator).to(run.device)

    def on_step(self, run: CallbackContext, *, row: Mapping[str, Any]) -> None:
        """Examine the weights, if it is their turn."""
        step, failed = row["step"], row["non_converged"]
        phase = next(p for p in run.spec.phase_specs() if p.name == row["phase"])
        in_burst = failed > BURST and phase.data.seq_len == run.spec.data.seq_len
        if step % (BURST_EVERY if in_burst else self._spec.every):
            return
        self._model.load_state_dict(run.model.state_dict())
        solver = phase.model.solver  # type: ignore[attr-defined]  # of an implicit model
        tokens = torch.arange(self._size, device=run.device)[:, None]
        before, identity = self._before[:, None], torch.zeros_like(tokens)
        found = {"step": step, "phase": row["phase"], "not_converged": failed, "damping": solver.damping}
        found["first"] = self._last_token(tokens)
        found["after_identity"] = self._last_token(torch.cat((identity, tokens), dim=1))
        found["after_element"] = self._last_token(torch.cat((before, tokens), dim=1))
        found["batch"] = self._batch(solver.damping)
        Examine.rows.append(found)

    def _search(self, ids: Tensor, damping: float, tolerance: float, most: int) -> Any:
        own = AtEvaluation(
            solver=PicardSpec(damping=damping),
            stopping=StoppingOverrides(
                tolerance=tolerance, max_iterations=most, norm="relative", scope="prefix"
            ),
        )
        self._model.reconfigure(self._model.spec.model_copy(update={"at_evaluation": own}))
        with torch.no_grad():
            return self._model(ids).solution

    def _last_token(self, ids: Tensor) -> dict[str, Any]:
        """Return eigenvalues and norms at the last token of each sequence; the identity is number 0."""
        solution = self._search(ids, 0.3, 1e-3, 300)
        _, converged = by_token(solution, ids.shape[1])
        model, place = self._model, ids.shape[1] - 1
        with torch.no_grad():
            f, _ = model.bind(
                model.embedding(ids), model.initial_state(len(ids)), weights=model.cache_weights()
            )
            one = f if place == 0 else f.after(solution.z[:, :place])
            z = solution.z[:, place:]
            local = spectral_radius(one, z, generator=torch.Generator(z.device).manual_seed(0))
        lowest, norm = local.eigenvalues.real.amin(1).cpu(), z.norm(dim=2)[:, 0].float().cpu()
        return {
            "converged": float(converged[:, place].double().mean()),
            "identity": _figures(lowest[:1], local.radius[:1].cpu(), norm[:1]),
            "others": _figures(lowest[1:], local.radius[1:].cpu(), norm[1:]),
        }

    def _batch(self, damping: float) -> dict[str, Any]:
        """Return the share of sequences that do not converge, and the kinds of their first such token."""
        solution = self._search(self._tokens, damping, 0.02, 128)
        _, converged = by_token(solution, self._tokens.shape[1])
        failed = ~converged.all(1)
        first = (~converged[failed]).int().argmax(1)
        identity = self._tokens.cpu()[failed].gather(1, first[:, None])[:, 0] == 0
        return {
            "not_converged": float(failed.double().mean()),
            "at_first_token": int((first == 0).sum()),
            "at_first_token_identity": int(((first == 0) & identity).sum()),
            "at_later_identity": int(((first > 0) & identity).sum()),
            "at_later_element": int(((first > 0) & ~identity).sum()),
        }


def _figures(lowest: Tensor, radius: Tensor, norm: Tensor) -> dict[str, float]:
    return {
        "lowest_eigenvalue": round(float(lowest.min()), 4),
        "largest_radius": round(float(radius.max()), 4),
        "norm": round(float(norm.mean()), 3),
    }


def main() -> int:
    """Train and examine each seed; write the figures after each; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spec", default="word_problem_a5_long")
    parser.add_argument("--seeds", type=int, nargs="+", default=[30])
    parser.add_argument("--stop-at", type=int, default=1900)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--runs", type=Path, default=Path("runs/oscillations"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", default="oscillations", help="name of the file in benchmarks/results")
    words = sys.argv[1:]
    changes = [word for word in words if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in words if word not in changes])
    registry.add("callback", ExamineSpec, Examine, owner="benchmarks")
    examine = f"{{kind: examine_searches, every: {options.every}, sequences: {options.sequences}}}"
    runs = []
    try:
        for seed in options.seeds:
            overrides = [*changes, f"training.seed={seed}", f"callbacks=[{examine}]"]
            spec: RunSpec = run_spec(options.spec, overrides)
            run = build(spec, name=f"seed {seed}", output=options.runs / f"seed{seed}", device=options.device)
            try:
                run.train(stop_at=options.stop_at)
            finally:
                runs.append({"seed": seed, "spec": options.spec, "changes": changes, "rows": Examine.rows})
                write(options.output, {"machine": machine(), "runs": runs})
    except ValueError as error:
        return refuse(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
