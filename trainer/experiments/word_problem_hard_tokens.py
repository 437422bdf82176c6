"""Figure 3: trained where hard tokens are rare and by few iterations, tested where they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from implicit_blocks import registry
from trainer.data.source import DataSource
from trainer.devices import choose_device
from trainer.experiments.drawing import BLUE, GREEN, GREY, ORANGE, finish, new_figure, write_picture
from trainer.experiments.runs import Finished, load_model, train
from trainer.experiments.word_problem import Settings
from trainer.experiments.word_problem_measure import MODES, measure
from trainer.experiments.word_problem_specs import varied
from trainer.files import write_json

COLORS = (BLUE, ORANGE, GREEN, GREY)


def carry_out(folder: Path, settings: Settings, *, device: str, overrides: Sequence[str] = ()) -> str:
    """Train with each number of iterations, test in both modes, write the figures and the picture."""
    rows: list[dict[str, Any]] = []
    place = choose_device(device)
    for group in settings.groups:
        for length in settings.lengths:
            for iterations in sorted(settings.iterations):
                for seed in settings.seeds:
                    spec = varied(
                        settings.spec,
                        model="implicit-mamba2",
                        group=group,
                        length=length,
                        identity_probability=settings.train_p,
                        iterations=iterations,
                        seed=seed,
                        evaluation={
                            "lengths": [times * length for times in settings.test_lengths],
                            "identity_probabilities": list(settings.test_p),
                            "sequences": settings.sequences,
                            "last_tokens": min(10, length),
                        },
                        overrides=overrides,
                    )
                    name = f"{group}-L{length}-s{iterations}-seed{seed}"
                    finished = train(spec, folder / "runs" / name, name=name, device=device)
                    rows += tests(finished, place, group=group, iterations=iterations)
    written = {
        "experiment": "word-problem",
        "study": "hard-tokens",
        "settings": {**asdict(settings), "overrides": list(overrides)},
        "tests": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "word_problem.json", written)
    draw(written, folder / "word_problem.png")
    return "\n".join([table(rows), f"written: {folder / 'word_problem.json'}, {folder / 'word_problem.png'}"])


def tests(finished: Finished, device: Any, *, group: str, iterations: int) -> list[dict[str, Any]]:
    """Test one run in both modes on every set of its evaluation."""
    spec = finished.spec
    data: DataSource = registry.build(spec.data, seed=spec.training.seed, vocab_size=spec.model.vocab_size)  # type: ignore[attr-defined]  # of every language model
    model = load_model(finished, device)
    sets = data.evaluation_sets(spec.evaluation.at(spec.data.length))
    at_once = spec.evaluation.batch_size * min(one.length for one in sets.values())
    summary = finished.summary
    return [
        {
            "group": group,
            "training_length": spec.data.length,
            "training_p": spec.data.identity_probability,  # type: ignore[attr-defined]  # of word problems
            "training_iterations": iterations,
            "seed": summary["seed"],
            "steps": summary["steps"],
            "training_seconds": summary["seconds"],
            "device": summary["device"],
            **measure(
                model,
                tested,
                mode=mode,
                device=device,
                precision=spec.training.precision,
                batch_size=max(1, at_once // tested.length),
                last_tokens=spec.evaluation.last_tokens,
            ),
        }
        for tested in sets.values()
        for mode in MODES
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures as aligned text."""
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
            f"{row['group']:<5}  {row['training_p']:10g}  {row['training_iterations']:10d}  "
            f"{row['seed']:4d}  {row['identity_probability']:9g}  {row['length']:4d}  {row['mode']:<12}  "
            f"{row['accuracy_last']:11.2%}  {row['iterations']:10.1f}  {of_hard:>7}  {of_others:>9}  "
            f"{row['residual']:8.1e}  {row['converged']:9.1%}"
        )
    return "\n".join(lines)


def draw(written: dict[str, Any], path: Path) -> None:
    """Draw accuracy and convergence against training iterations, and the tests' iterations, a row a group."""
    settings, rows = written["settings"], written["tests"]
    groups = settings["groups"]
    figure = new_figure(
        width=17.5,
        height=4.4 * len(groups),
        title=f"Trained on p = {rows[0]['training_p']:g}: accuracy at convergence, and iterations it takes",
    )
    panels = figure.subplots(len(groups), 4, squeeze=False)
    for (accuracy, convergence, position, hard), group in zip(panels, groups, strict=True):
        of_group = [row for row in rows if row["group"] == group]
        longest = max(row["length"] for row in of_group)
        for p, color in zip(settings["test_p"], COLORS, strict=False):
            for mode, style in zip(MODES, ("o-", "x--"), strict=True):
                here = [
                    row
                    for row in of_group
                    if (row["identity_probability"], row["mode"], row["length"]) == (p, mode, longest)
                ]
                if not here:
                    continue
                xs, means = _by_iterations(here, "accuracy_last")
                label = f"p {p:g}, {mode}"
                accuracy.plot(xs, [100 * y for y in means], style, color=color, label=label)
                xs, means = _by_iterations(here, "converged")
                convergence.plot(xs, [100 * y for y in means], style, color=color, label=label)
                most = max(here, key=lambda row: row["training_iterations"])
                curve = most["iterations_by_position"]
                position.plot(range(1, len(curve) + 1), curve, style[1:], color=color, label=label)
                points = [(b["hard_tokens"], b["iterations"]) for b in most["iterations_by_hard_tokens"]]
                hard.plot([x for x, _ in points], [y for _, y in points], style[1:], color=color, label=label)
        most_iterations = max(row["training_iterations"] for row in of_group)
        for axes, title in (
            (accuracy, f"{group}: accuracy at length {longest}"),
            (convergence, "Sequences that converged"),
        ):
            ticks = sorted({row["training_iterations"] for row in of_group})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(n) for n in ticks])
            axes.minorticks_off()
            axes.set_ylim(-3, 103)
            axes.legend(frameon=False, fontsize=8)
            finish(axes, title=title, x="iterations of the search in training, at most", y="%")
        for axes, title, x in (
            (position, "Iterations of a token", "position"),
            (hard, "The same by hard tokens up to it", "hard tokens"),
        ):
            axes.legend(frameon=False, fontsize=8)
            finish(axes, title=f"{title} (trained with {most_iterations})", x=x, y="iterations")
    write_picture(figure, path)


def _by_iterations(rows: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the numbers of training iterations, and the mean over seeds at each."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row["training_iterations"], []).append(row[key])
    return sorted(values), [sum(values[n]) / len(values[n]) for n in sorted(values)]
