"""Figure 3: training with rare hard tokens and few iterations, tests with frequent hard tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from implicit_blocks._utils.devices import choose_device, device_name
from implicit_blocks.models.implicit import ImplicitLM
from trainer.experiments.common.runs import data_of, find_trained_run, load_model, load_trained_model, train
from trainer.experiments.common.search import disable_windows
from trainer.experiments.word_problem.measure import MODES, measure
from trainer.experiments.word_problem.settings import Settings
from trainer.experiments.word_problem.specs import vary_spec
from trainer.reporting.pictures import BLUE, GREEN, GREY, ORANGE, finish, new_figure, write_results
from trainer.specs.run import EvaluationSpec, RunSpec, WordProblemSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = (BLUE, ORANGE, GREEN, GREY)


def run(folder: Path, settings: Settings, *, device: str, checkpoints: Sequence[Path] = ()) -> str:
    """Train with each number of iterations, test in both modes, write the results and the plot."""
    place = choose_device(device)
    if checkpoints:
        # Find all runs before the first test, which takes minutes.
        runs = [_trained_run(path, settings) for path in checkpoints]
        rows = [row for spec, weights in runs for row in _of_checkpoint(spec, weights, settings, place)]
    else:
        rows = _of_runs(folder, settings, place, device=device)
    written = {
        "experiment": "word-problem",
        "study": "hard-tokens",
        "settings": {**asdict(settings), "checkpoints": list(map(str, checkpoints))},
        "tests": rows,
    }
    message = write_results(folder, "word_problem", written, draw)
    return f"{table(rows)}\n{message}"


def _of_runs(folder: Path, settings: Settings, place: torch.device, *, device: str) -> list[dict[str, Any]]:
    """Train or read the runs of the settings and test them; all specs are built, and so validated, first."""
    plan = product(settings.groups, settings.lengths, sorted(settings.iterations), settings.seeds)
    specs = {
        f"{group}-L{length}-s{iterations}-seed{seed}": vary_spec(
            settings.spec,
            model="implicit-mamba2",
            group=group,
            length=length,
            identity_probability=settings.train_p,
            iterations=iterations,
            seed=seed,
            evaluation=settings.tests(length),
            overrides=settings.overrides,
        )
        for group, length, iterations, seed in plan
    }
    rows = []
    for name, spec in specs.items():
        finished = train(spec, folder / "runs" / name, name=name, device=device)
        more = {"steps": finished.summary["steps"], "training_seconds": finished.summary["seconds"]}
        rows += tests(spec, load_model(finished, place), settings, place, **more)
    return rows


def _trained_run(path: Path, settings: Settings) -> tuple[RunSpec, Path]:
    """Return the spec of an existing run with the tests of the settings, and its checkpoint."""
    _, spec, weights = find_trained_run(path, settings.overrides)
    if not isinstance(spec.data, WordProblemSpec):
        raise ValueError(
            f"{path} is a run on data of kind {spec.data.kind!r}; use one that was trained on a word_problem"
        )
    evaluation = EvaluationSpec.model_validate(
        {**spec.evaluation.model_dump(), "length_multiples": (), **settings.tests(spec.data.seq_len)}
    )
    return spec.model_copy(update={"evaluation": evaluation}), weights


def _of_checkpoint(
    spec: RunSpec, weights: Path, settings: Settings, place: torch.device
) -> list[dict[str, Any]]:
    """Test an existing run."""
    model, progress = load_trained_model(spec, weights)
    more = {"steps": progress.step, "training_seconds": progress.seconds}
    return tests(spec, model.to(place), settings, place, **more)


def tests(
    spec: RunSpec, model: nn.Module, settings: Settings, device: torch.device, **more: Any
) -> list[dict[str, Any]]:
    """Test a model in both modes on every evaluation set of its run."""
    assert isinstance(spec.data, WordProblemSpec)
    assert isinstance(model, ImplicitLM)
    disable_windows(model)
    last = spec.phase_specs()[-1]
    sets = data_of(spec).evaluation_sets(spec.evaluation.at(spec.data.seq_len))
    at_once = spec.evaluation.batch_size * min(one.length for one in sets.values())
    return [
        {
            "group": spec.data.group_name,
            "training_length": spec.data.seq_len,
            "training_p": spec.data.identity_probability,  # one, or several that alternate
            "training_iterations": last.model.stopping.max_iterations,  # type: ignore[attr-defined]  # of an implicit model
            "seed": spec.training.seed,
            "device": device_name(device),
            **more,
            **measure(
                model,
                tested,
                mode=mode,
                device=device,
                precision=spec.training.precision,
                batch_size=max(1, at_once // tested.length),
                last_tokens=spec.evaluation.last_tokens,
                max_iterations=settings.token_iterations if mode == "sequential" else None,
            ),
        }
        for tested in sets.values()
        for mode in MODES
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as an aligned text table."""
    lines = [
        "group  trained: p  iterations  seed  tested: p    at  mode          last tokens  iterations  "
        "of hard  of others  residual  converged"
    ]
    for row in rows:
        of_hard, of_others = (
            "-" if row[key] is None else f"{row[key]:.1f}"
            for key in ("iterations_of_hard_tokens", "iterations_of_identities")
        )
        lines.append(
            f"{row['group']:<5}  {format_p(row['training_p']):>10}  {row['training_iterations']:10d}  "
            f"{row['seed']:4d}  {row['identity_probability']:9g}  {row['length']:4d}  {row['mode']:<12}  "
            f"{row['accuracy_last']:11.2%}  {row['iterations']:10.1f}  {of_hard:>7}  {of_others:>9}  "
            f"{row['residual']:8.1e}  {row['converged']:9.1%}"
        )
    return "\n".join(lines)


def format_p(p: float | Sequence[float]) -> str:
    """Return identity probabilities as text."""
    return f"{p:g}" if isinstance(p, int | float) else ", ".join(f"{each:g}" for each in p)


def draw(written: dict[str, Any]) -> Figure:
    """Draw accuracy and convergence against training iterations, and the tests' iterations, per group."""
    settings, rows = written["settings"], written["tests"]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    compared = len({row["training_iterations"] for row in rows}) > 1  # a single value gives no curves
    figure = new_figure(
        width=11.6 if compared else 10.0,
        height=(8.0 if compared else 4.4) * len(groups),
        title=f"Trained on p = {format_p(rows[0]['training_p'])}: "
        f"{'accuracy at convergence, and iterations' if compared else 'iterations to convergence'}",
    )
    panels = figure.subplots((2 if compared else 1) * len(groups), 2, squeeze=False)
    # Four panels per group, two by two, because side by side they are too small.
    panels = panels.reshape(len(groups), -1)
    for (*against, position, hard), group in zip(panels, groups, strict=True):
        of_group = [row for row in rows if row["group"] == group]
        longest = max(row["length"] for row in of_group)
        for p, color in zip(settings["test_p"], cycle(COLORS), strict=False):
            for mode, style in zip(MODES, ("o-", "x--"), strict=True):
                here = [
                    row
                    for row in of_group
                    if (row["identity_probability"], row["mode"], row["length"]) == (p, mode, longest)
                ]
                if not here:
                    continue
                label = f"p = {p:g}, {mode}"
                for axes, key in zip(against, ("accuracy_last", "converged"), strict=False):
                    xs, means = _by_iterations(here, key)
                    axes.plot(xs, [100 * y for y in means], style, color=color, label=label)
                    every = [(row["training_iterations"], 100 * row[key]) for row in here]
                    axes.plot(*zip(*every, strict=True), ".", color=color, markersize=4, alpha=0.6)
                most = max(here, key=lambda row: row["training_iterations"])
                curve = most["iterations_by_position"]
                position.plot(range(1, len(curve) + 1), curve, style[1:], color=color, label=label)
                points = [(b["hard_tokens"], b["iterations"]) for b in most["iterations_by_hard_tokens"]]
                hard.plot([x for x, _ in points], [y for _, y in points], style[1:], color=color, label=label)
        most_iterations = max(row["training_iterations"] for row in of_group)
        mean = " (mean of the seeds)" if len({row["seed"] for row in of_group}) > 1 else ""
        titles = (
            (
                f"{group}: accuracy at length {longest}{mean}",
                "accuracy on the last tokens, at convergence (%)",
            ),
            ("Converged sequences", "sequences (%)"),
        )
        for axes, (title, y) in zip(against, titles, strict=False):
            ticks = sorted({row["training_iterations"] for row in of_group})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(n) for n in ticks])
            axes.minorticks_off()
            axes.set_ylim(-3, 103)
            axes.legend(frameon=False, fontsize=8)
            finish(axes, title=title, x="maximum iterations in training", y=y)
        for axes, title, x in (
            (position, "Iterations by position", "position (tokens)"),
            (hard, "Iterations by number of hard tokens so far", "hard tokens"),
        ):
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend(frameon=False, fontsize=8)
            finish(axes, title=f"{title} (trained with {most_iterations})", x=x, y="iterations per token")
    return figure


def _by_iterations(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the numbers of training iterations, and the mean over seeds at each."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["training_iterations"], []).append(row[key])
    return sorted(values), [sum(values[n]) / len(values[n]) for n in sorted(values)]
