"""Duality: solving the tokens of a sequence together or one at a time gives the same results.

Simultaneous mode searches for the fixed point of all tokens together; sequential mode solves one token,
commits its state, and continues with the next. They differ by at most what the tolerance allows.

Shape legend: B sequences, L tokens, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_blocks._utils.devices import choose_device
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.specs import ImplicitLMSpec
from implicit_blocks.specs.base import require_share
from trainer.data.source import IGNORED, Batch
from trainer.experiments.common.checks import require_counts, require_tolerances
from trainer.experiments.common.runs import evaluation_batch, find_trained_run, load_trained_model
from trainer.experiments.common.search import by_token, disable_windows
from trainer.experiments.duality.plot import draw
from trainer.reporting.pictures import write_results
from trainer.specs.run import RunSpec
from trainer.storage.files import read_json

MODES = ("simultaneous", "sequential")


@dataclass(frozen=True)
class Mode:
    """Results of one evaluation mode: logits (B, L, V), iterations and convergence (B, L)."""

    logits: Tensor
    iterations: Tensor
    converged: Tensor
    seconds: float


def run(
    folder: Path,
    checkpoint: Path,
    *,
    tolerances: Sequence[float],
    sequences: int = 16,
    length: int | None = None,
    max_iterations: int | None = None,
    damping: float | None = None,
    scope: str | None = None,
    tokenizer: Path | None = None,
    double: bool = False,
    device: str = "auto",
) -> str:
    """Compare both modes at each tolerance, write ``duality.json`` and ``duality.png``, return a summary.

    Args:
        folder: output directory, created if missing.
        checkpoint: a run directory, or one of its checkpoints.
        tolerances: relative residuals at which a token's search stops.
        sequences: number of evaluation sequences.
        length: tokens per sequence; None: the training length.
        max_iterations: maximum iterations per search; None: that of the evaluation.
        damping: damping of the solver in both modes, in (0, 1]; None: that of the evaluation. If a few tokens
            oscillate, a lower value makes them converge.
        scope: residual that stops a token's search in simultaneous mode: ``prefix``, its own and those of the
            tokens before it, or ``sequence``, that of its whole row, as in the published implementation;
            None: that of the evaluation. In sequential mode it is always the token's own.
        tokenizer: a tokenizer.json with the names of the tokens; None: the one beside the data, if any.
        double: compute in float64, where 1e-5 is far above rounding errors.
        device: name of the device.

    Raises:
        ValueError: there is no trained implicit model, or a setting is invalid.

    """
    require_tolerances(tolerances)
    require_counts(sequences=sequences, length=length, max_iterations=max_iterations)
    if damping is not None:
        require_share("damping", damping)
    place = choose_device(device)
    name, spec, weights = find_trained_run(checkpoint)
    names = _names(spec, tokenizer)
    batch = evaluation_batch(spec, sequences=sequences, length=length).to(place)
    model, _ = load_trained_model(spec, weights)
    disable_windows(model)
    model.to(place, torch.float64 if double else torch.float32)
    rows: list[dict[str, Any]] = []
    tightest: dict[str, Mode] = {}
    for tolerance in sorted(tolerances):  # the tightest first: it is the reference for the others
        modes = {
            mode: evaluate(
                model,
                batch,
                mode=mode,
                tolerance=tolerance,
                max_iterations=max_iterations,
                damping=damping,
                scope=scope,
            )
            for mode in MODES
        }
        tightest = tightest or modes
        rows.insert(0, compare(modes, batch.labels, tolerance=tolerance, tightest=tightest["simultaneous"]))
    settings = {
        "checkpoint": str(weights),
        "sequences": len(batch),
        "length": batch.inputs.shape[1],
        "max_iterations": max_iterations or model.evaluation_stopping.max_iterations,
        "damping": damping,
        "scope": scope or model.evaluation_stopping.scope,
        "dtype": "float64" if double else "float32",
        "solver": model.spec.at_evaluation.solver.model_dump(mode="json"),
    }
    # From sequential mode, because in simultaneous mode a token also waits for all tokens before it.
    kinds = iterations_by_token_id(batch.inputs.cpu(), tightest["sequential"].iterations, names)
    written = {
        "experiment": "duality",
        "run": name,
        "settings": settings,
        "tolerances": rows,
        "by_token": kinds,
    }
    message = write_results(folder, "duality", written, lambda _: draw(rows, kinds, title=name))
    return f"{table(rows)}\n{message}"


@torch.no_grad()
def evaluate(
    model: ImplicitLM,
    batch: Batch,
    *,
    mode: str,
    tolerance: float,
    max_iterations: int | None,
    damping: float | None = None,
    scope: str | None = None,
) -> Mode:
    """Evaluate the batch in one mode; each token stops on its own, or with its row, depending on scope."""
    began = time.perf_counter()
    whole = model.spec
    if mode == "sequential":  # per-token results require prefix scope
        scope = None if whole.at_evaluation.solver.couples_tokens else "prefix"
    if scope is not None:
        model.reconfigure(_with_scope(whole, scope))
    output = model(
        batch.inputs,
        window_length=1 if mode == "sequential" else None,
        tolerance=tolerance,
        max_iterations=max_iterations,
        damping=damping,
        **batch.context(),
    )
    model.reconfigure(whole)
    assert output.solution is not None
    iterations, converged = by_token(output.solution, batch.inputs.shape[1])
    return Mode(
        logits=output.logits.cpu(),
        iterations=iterations,
        converged=converged,
        seconds=time.perf_counter() - began,
    )


def _with_scope(spec: ImplicitLMSpec, scope: str) -> ImplicitLMSpec:
    """Return the spec with this scope in evaluation, dropping settings that require another."""
    tree = spec.model_dump()
    tree["at_evaluation"]["stopping"]["scope"] = scope
    if scope != "prefix":
        tree["at_evaluation"]["commit_prefix"] = None
    return type(spec).model_validate(tree)


def compare(
    modes: dict[str, Mode], labels_BL: Tensor, *, tolerance: float, tightest: Mode | None = None
) -> dict[str, Any]:
    """Return the results of one tolerance: equal tokens, logit distances, iterations of both modes.

    A token is *clear* if its two highest logits in simultaneous mode differ by more than twice the largest
    distance of any logit of any token: the modes must agree on it. With ``tightest``, the results at a tight
    tolerance, each mode is also compared with those. The standard error of equal tokens is over sequences,
    because the tokens of a sequence are not independent; None for a single sequence.
    """
    together, in_turn = (modes[mode].logits for mode in MODES)
    distance_BL = (together - in_turn).abs().amax(2)
    equal_BL = together.argmax(2) == in_turn.argmax(2)
    best = together.topk(2, dim=2).values
    clear_BL = best[:, :, 0] - best[:, :, 1] > 2 * distance_BL.max()
    scored_BL = labels_BL.cpu() != IGNORED
    row: dict[str, Any] = {
        "tolerance": tolerance,
        "tokens": equal_BL.numel(),
        "equal_tokens": float(equal_BL.double().mean()),
        "equal_tokens_error": _standard_error(equal_BL),
        "logit_distance_mean": float(distance_BL.mean()),
        "logit_distance_p99": float(torch.quantile(distance_BL.flatten().double(), 0.99)),
        "logit_distance_max": float(distance_BL.max()),
        "clear_tokens": float(clear_BL.double().mean()),
        "equal_clear_tokens": float(equal_BL[clear_BL].double().mean()) if bool(clear_BL.any()) else None,
    }
    for name, mode in modes.items():
        correct_BL = (mode.logits.argmax(2) == labels_BL.cpu()) & scored_BL
        row[name] = {
            "accuracy": float(correct_BL.sum() / scored_BL.sum().clamp(min=1)),
            "converged": float(mode.converged.double().mean()),
            "iterations_mean": float(mode.iterations.double().mean()),
            "iterations_max": int(mode.iterations.max()),
            "iterations_histogram": torch.bincount(mode.iterations.flatten()).tolist(),
            "iterations_by_position": mode.iterations.double().mean(0).tolist(),
            "seconds": round(mode.seconds, 3),
        }
        if tightest is not None:
            apart_BL = (mode.logits - tightest.logits).abs().amax(2)
            same_BL = mode.logits.argmax(2) == tightest.logits.argmax(2)
            row[name]["equal_to_tightest"] = float(same_BL.double().mean())
            row[name]["distance_to_tightest_mean"] = float(apart_BL.mean())
    return row


def _standard_error(equal_BL: Tensor) -> float | None:
    """Return the standard error of the mean over sequences."""
    rows = equal_BL.shape[0]
    return float(equal_BL.double().mean(1).std() / math.sqrt(rows)) if rows > 1 else None


def iterations_by_token_id(
    inputs_BL: Tensor, iterations_BL: Tensor, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Return the mean iterations of each token ID that occurs at least 4 times, highest first."""
    ids, counts = inputs_BL.flatten(), torch.bincount(inputs_BL.flatten())
    sums = torch.bincount(ids, weights=iterations_BL.flatten().double())
    often = (counts >= 4).nonzero().flatten().tolist()
    found = [
        {
            "token": number,
            "text": names.get(number),
            "count": int(counts[number]),
            "iterations_mean": float(sums[number] / counts[number]),
        }
        for number in often
    ]
    return sorted(found, key=lambda one: -one["iterations_mean"])


def _names(spec: RunSpec, tokenizer: Path | None) -> dict[int, str]:
    """Return the texts of the tokens; empty if they are unknown."""
    path = tokenizer
    if path is None:
        data = getattr(spec.data, "path", None)
        beside = Path(data) / "tokenizer.json" if data is not None else None
        if beside is None or not beside.is_file():
            return {}
        path = beside
    try:
        vocabulary = read_json(path)["model"]["vocab"]
        names = {int(number): _readable(str(text)) for text, number in vocabulary.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a tokenizer.json with a vocabulary ({error!r})") from error
    size = getattr(spec.model, "vocab_size", None)
    if size is not None and max(names, default=0) >= size:
        raise ValueError(
            f"{path} has token {max(names)}, but the model's vocabulary is {size}; use the tokenizer of its "
            "data"
        )
    return names


def _readable(text: str) -> str:
    """Return a byte-level token as text with visible white space; partial characters are unchanged."""
    try:
        from tokenizers.decoders import ByteLevel

        plain = ByteLevel().decode([text])
    except ImportError:  # optional dependency
        plain = text.replace("\u0120", " ")
    if "\ufffd" in plain:
        plain = text
    return plain.replace(" ", "\u2423").replace("\n", "\u21b5")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as an aligned text table."""
    lines = [
        "tolerance   equal tokens  logits: mean      max  clear  equal  iterations: simult.  sequent."
        "  as the tightest: simult.  sequent."
    ]
    for row in rows:
        clear = row["equal_clear_tokens"]
        together, in_turn = (row[mode]["iterations_mean"] for mode in MODES)
        error = row["equal_tokens_error"]
        equal = f"{row['equal_tokens']:.2%}" + ("" if error is None else f" ±{100 * error:.2f}")
        near = [format(row[mode].get("equal_to_tightest", math.nan), ".2%") for mode in MODES]
        lines.append(
            f"{row['tolerance']:9.0e}  {equal:>13}  {row['logit_distance_mean']:12.1e}  "
            f"{row['logit_distance_max']:7.1e}  {row['clear_tokens']:5.0%}  "
            f"{'-' if clear is None else format(clear, '.0%'):>5}  {together:19.1f}  {in_turn:8.1f}"
            f"  {near[0]:>24}  {near[1]:>8}"
        )
    for row in rows:
        together, in_turn = (row[mode]["converged"] for mode in MODES)
        if min(together, in_turn) < 1.0:
            lines.append(
                f"WARNING: at tolerance {row['tolerance']:.0e}, {together:.2%} of the tokens converged in "
                f"simultaneous and {in_turn:.2%} in sequential mode; raise --max-iterations to compare "
                "fixed points"
            )
    return "\n".join(lines)
