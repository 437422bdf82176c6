"""Language modeling at small scale: implicit models and their explicit twins on the same text.

Measures perplexity against tokens and executed FLOPs, at 1 to 8 times the training length, against the
iterations of the search (test-time compute), and for several shares of the curriculum's first phase. Twins
read the text in the same order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from implicit_blocks._utils.devices import choose_device, device_name
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.specs import spec_name, zoo_names
from trainer.evaluation.evaluate import evaluate
from trainer.experiments.common.checks import reject_option_conflicts
from trainer.experiments.common.runs import (
    Finished,
    data_of,
    evaluation_set,
    explicit_twin,
    is_finished,
    load_model,
    run_spec,
    train,
)
from trainer.experiments.equal_compute.compare import MARGIN
from trainer.experiments.equal_compute.flops import optimizer_flops_per_step, run_flops
from trainer.experiments.language.plot import draw
from trainer.reporting.display import magnitude
from trainer.reporting.metrics import json_value, rounded
from trainer.reporting.pictures import write_results
from trainer.specs.run import RunSpec
from trainer.storage.files import read_json, write_json

_SHORT = (
    "model.d_model=64",
    "model.n_layers=2",
    "data.seq_len=64",
    "training.max_tokens=200e3",
    "training.batch_size=16",
    "training.precision=float32",
    "training.optimizer.learning_rate=5e-3",
    "model.stopping.max_iterations=12",
)
LAPTOP = {
    "mamba2": (*_SHORT, "model.mixer.d_state=16", "model.mixer.head_dim=16"),
    "attention": (*_SHORT, "model.mixer.n_heads=4", "model.mlp.d_ff=128"),
}
"""Overrides of the laptop setting by mixer; it demonstrates the experiment but does not reproduce its
figures."""
SET_BY_OPTIONS = {"data.path": "--data", "training.seed": "--seeds"}
BUDGET = {f"training.{name}": "--petaflops" for name in ("max_tokens", "max_steps")}
"""Spec fields that command-line options set."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Training and evaluation settings besides the specs; see the command's options."""

    laptop: bool = False
    seeds: tuple[int, ...] = (0,)
    bounded: tuple[float, ...] = (0.7, 0.8, 0.9)
    self_iterations: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    sequences: int | None = None
    evaluations: int = 10
    petaflops: float | None = None
    """Executed training FLOPs of every run, / 1e15; None: those of the spec."""
    changes: tuple[str, ...] = ()
    explicit_changes: tuple[str, ...] = ()
    only_finished: bool = False

    def __post_init__(self) -> None:
        for name in ("self_iterations", "multiples", "evaluations", "sequences"):
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and number < 1:
                    raise ValueError(f"{name.replace('_', '-')} must be at least 1, got {number}")
        if self.petaflops is not None and self.petaflops <= 0:
            raise ValueError(f"petaflops must be positive, got {self.petaflops:g}")
        for share in self.bounded:
            if not 0 < share < 1:
                raise ValueError(f"the share of the first phase must be above 0 and below 1, got {share:g}")


def run(folder: Path, data: Path, *, specs: Sequence[str], settings: Settings, device: str = "auto") -> str:
    """Train missing runs, evaluate them, write ``language.json`` and ``.png``, return a summary.

    Args:
        folder: output directory, created if missing; runs are stored in its ``runs``.
        data: tokens with a validation split.
        specs: runs of implicit models.
        settings: further settings.
        device: name of the device.

    Raises:
        ValueError: a spec is not that of an implicit model on tokens, or does not fit the data.

    """
    reject_option_conflicts(settings.changes, SET_BY_OPTIONS | (BUDGET if settings.petaflops else {}))
    place = choose_device(device)
    names = [spec_name(one) for one in specs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"several specs have the name {name}, so their runs would collide; rename one")
    plans = [plan for index, one in enumerate(specs) for plan in _plans(one, data, settings, index == 0)]
    if not settings.only_finished:
        _require_validation(plans[0][1], data)
    rows = []
    for label, spec in plans:
        if (finished := _finished(label["run"], spec, folder / "runs", settings, device)) is not None:
            made = {"run": finished.folder.name, "budget_share": _budget_share(finished, settings)}
            rows.append({**label, **made, **_measured(finished, settings, place)})
    if not rows:
        raise ValueError(f"{folder} contains none of these runs finished; omit --only-finished to train them")
    how = {"experiment": "language", "specs": names, "settings": asdict(settings)}
    written = json_value({**how, "device": device_name(place), "runs": rows})
    message = write_results(folder, "language", written, draw)
    return f"{table(rows)}\n{message}"


def _finished(name: str, spec: RunSpec, folder: Path, settings: Settings, device: str) -> Finished | None:
    """Return the finished run; None if it is not, and should not be trained.

    A search takes fewer iterations than its maximum. Until a run executes its budget of FLOPs to 3 %, it is
    trained anew, at most three times, with as many steps as would have, in a folder with their number.
    """
    place, finished = folder / name, None
    for _ in range(4):
        if settings.only_finished and not is_finished(place):
            break
        finished = train(spec, place, name=name, device=device)
        share = _budget_share(finished, settings)
        steps = round(spec.total_steps / share)
        if abs(share - 1) <= MARGIN or steps == spec.total_steps:  # or no other number of steps is closer
            break
        spec, place = _watched(spec, settings, steps), folder / f"{name}-{steps}"
        if not (settings.only_finished or is_finished(place)):
            print(
                f"{name} executed {share:.1%} of --petaflops; training it for {steps:,} steps",
                file=sys.stderr,
            )
    return finished


def _budget_share(finished: Finished, settings: Settings) -> float:
    """Return the executed FLOPs of a run divided by their budget; 1 without a budget."""
    return curve(finished)[-1]["flops"] / (settings.petaflops * 1e15) if settings.petaflops else 1.0


def _plans(
    source: str, data: Path, settings: Settings, with_shares: bool
) -> Iterable[tuple[dict[str, Any], RunSpec]]:
    """Yield the runs of a spec for each seed: the implicit model, its explicit twin, and other curricula."""
    name = spec_name(source)  # not its path, which could lead outside the directory of the runs
    _check(source, run_spec(source))
    changes = [f"data.path={data}", *_laptop(source, settings), *settings.changes]
    own = run_spec(source, changes)
    # Shares are those of the paper's first phase; a fixed number of loops has no such curriculum.
    staged = bool(own.phases) and own.model.model_dump()["depth"]["kind"] == "until_converged"
    share = own.phases[0].until if staged else None
    twin = f"{source}_explicit" if f"{source}_explicit" in zoo_names() else source  # with its own recipe
    for seed in settings.seeds:
        seeded = [*changes, f"training.seed={seed}"]
        label = {"spec": name, "seed": seed, "share": share}
        implicit = _watched(run_spec(source, seeded), settings)
        yield {**label, "kind": "implicit", "run": f"{name}-{seed}"}, implicit
        explicit = _watched(explicit_twin(twin, [*seeded, *settings.explicit_changes]), settings)
        yield {**label, "kind": "explicit", "share": None, "run": f"{name}-explicit-{seed}"}, explicit
    for seed, other in product(settings.seeds, settings.bounded if with_shares and staged else ()):
        if other != share:
            seeded = [*changes, f"training.seed={seed}", f"phases.0.until={other}"]
            label = {"spec": name, "seed": seed, "share": other, "kind": "curriculum"}
            yield {**label, "run": f"{name}-{other:g}-{seed}"}, _watched(run_spec(source, seeded), settings)


def _laptop(name: str, settings: Settings) -> tuple[str, ...]:
    if not settings.laptop:
        return ()
    kind = getattr(getattr(run_spec(name).model, "mixer", None), "kind", None)
    if kind not in LAPTOP:
        raise ValueError(f"there is no laptop setting for mixers of kind {kind!r}; reduce {name} by --set")
    return LAPTOP[kind]


def _check(name: str, spec: RunSpec) -> None:
    if spec.model.kind != "implicit_lm":
        raise ValueError(f"the model of {name} is of kind {spec.model.kind!r}; use runs of an implicit_lm")
    if spec.data.kind != "tokens":
        raise ValueError(f"the data of {name} are of kind {spec.data.kind!r}; use runs on tokens")


def _require_validation(spec: RunSpec, path: Path) -> None:
    """Reject tokens without a validation split, before any training."""
    if not data_of(spec).evaluation_sets(spec.evaluation.at(spec.data.seq_len)):
        raise ValueError(f"the tokens in {path} have no validation split; tokenize with --validation")


def _watched(spec: RunSpec, settings: Settings, steps: int | None = None) -> RunSpec:
    """Return the run with a number of steps, or its budget of FLOPs, and with regular evaluations."""
    if steps is None and settings.petaflops is not None:
        steps = int(spec.total_steps * settings.petaflops * 1e15 / run_flops(spec, bound=True))
    if steps is not None and steps < 2:
        raise ValueError(f"{settings.petaflops:g} PFLOP are below two steps; raise --petaflops")
    budget = {} if steps is None else {"max_steps": steps, "max_tokens": None}
    every = max(1, (steps or spec.total_steps) // settings.evaluations)
    evaluation = spec.evaluation.model_copy(update={"lengths": (spec.data.seq_len,), "length_multiples": ()})
    training = spec.training.model_copy(update={**budget, "evaluate_every": every})
    return spec.model_copy(update={"evaluation": evaluation, "training": training})


# ------------------------------------------------------------------------------------ what is measured


def _measured(finished: Finished, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Return the measurements of a run, cached in its directory."""
    path = finished.folder / "measured.json"
    how: dict[str, Any] = {name: list(getattr(settings, name)) for name in ("self_iterations", "multiples")}
    how |= {"sequences": settings.sequences, "steps": finished.summary["steps"]}
    if path.is_file() and (kept := read_json(path))["how"] == how:
        found: dict[str, Any] = kept["measured"]
        return found
    measured: dict[str, Any] = json_value(_measure(finished, settings, device))
    write_json(path, {"how": how, "measured": measured})
    return measured


def _measure(finished: Finished, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Return the measurements from a run's records and its last checkpoint on the validation text."""
    spec, summary = finished.spec, finished.summary
    data, model = data_of(spec), load_model(finished, device)

    def perplexity(length: int, sequences: int | None, **search: int) -> dict[str, Any]:
        (result,) = evaluate(
            model,
            [evaluation_set(spec, data, length, sequences or 10**9)],
            device=device,
            precision=spec.training.precision,
            batch_size=max(1, spec.evaluation.batch_size * spec.data.seq_len // length),
            last_tokens=spec.evaluation.last_tokens,
            search=search,
        )
        row = result.as_row(by_position=length == spec.data.seq_len and result.search is not None)
        keys = ("length", "sequences", "loss", "perplexity", "iterations", "iterations_max", "residual")
        kept = {key: row[key] for key in (*keys, "residual_max", "non_converged", "token_converged")}
        return {**kept, "iterations_by_position": row.get("iterations_by_position")}

    length, sequences = spec.data.seq_len, settings.sequences
    lengths = [
        {"multiple": multiple, **perplexity(multiple * length, sequences and max(1, sequences // multiple))}
        for multiple in settings.multiples
    ]
    compute = []
    if isinstance(model, ImplicitLM):
        limit = "loops" if model.spec.at_evaluation.exit.kind == "fixed" else "max_iterations"
        for most in settings.self_iterations:
            compute.append({"self_iterations": most, **perplexity(length, sequences, **{limit: most})})
    return {
        **{key: summary[key] for key in ("parameters", "steps", "tokens", "seconds")},
        "curve": curve(finished),
        "lengths": lengths,
        "test_time_compute": compute,
        "training": _training(finished.metrics),
    }


def curve(finished: Finished) -> list[dict[str, Any]]:
    """Return the perplexity during training, with tokens and cumulative executed FLOPs."""
    spent, tokens, flops, of_optimizer = {}, 0, 0.0, optimizer_flops_per_step(finished.spec)
    for row in finished.metrics:
        rate, speed = row["tflops_executed"], row["tokens_per_second"]
        # FLOPs per token: the ratio of two rates cancels the step time.
        each = math.nan if rate is None else 1e12 * rate / speed
        flops += each * (row["tokens"] - tokens) + of_optimizer
        tokens = row["tokens"]
        spent[row["step"]] = tokens, flops
    return [
        {
            "tokens": spent[row["step"]][0],
            "flops": rounded(spent[row["step"]][1], 5),
            "perplexity": row["perplexity"],
            "phase": row["phase"],
        }
        for row in finished.evaluations
    ]


def _training(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the training loss, averaged over fiftieths of the run; None if all batches were skipped."""
    size = max(1, len(metrics) // 50)
    found = []
    for first in range(0, len(metrics), size):
        part = metrics[first : first + size]
        losses = [row["loss"] for row in part if row["loss"] is not None]
        mean = rounded(sum(losses) / len(losses)) if losses else None
        found.append({"tokens": part[-1]["tokens"], "loss": mean})
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the results of the runs as an aligned text table."""
    names = [row["run"] + " *" * (abs(row["budget_share"] - 1) > MARGIN) for row in rows]
    width = max(map(len, names))
    multiples = "  ".join(f"ppl {entry['multiple']}x".rjust(8) for entry in rows[0]["lengths"])
    head = f"{'run':<{width}}  parameters    tokens     FLOPs  {multiples}"
    lines = [f"{head}  iterations  residual  converged"]
    for name, row in zip(names, rows, strict=True):
        first, spent = row["lengths"][0], row["curve"][-1]["flops"] or math.nan
        size = f"{magnitude(row['parameters']):>10}  {magnitude(row['tokens']):>8}  {spent:8.2e}"
        cells = "  ".join(f"{entry['perplexity']:8.2f}" for entry in row["lengths"])
        if first["iterations"] is not None:
            residual = math.nan if first["residual"] is None else first["residual"]
            share = "-" if first["token_converged"] is None else f"{first['token_converged']:.2%}"
            cells += f"  {first['iterations']:10.1f}  {residual:8.1e}  {share:>9}"
        lines.append(f"{name:<{width}}  {size}  {cells}")
    if any(name.endswith(" *") for name in names):
        lines.append(f"* The executed FLOPs differ from --petaflops by more than {MARGIN:.0%}.")
    return "\n".join(lines)
