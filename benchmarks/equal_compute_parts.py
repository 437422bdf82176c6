"""The parts of the comparison at equal compute: their result files, and which of them belong together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.experiments.equal_compute.compare import recipe_of
from trainer.experiments.equal_compute.recipes import Recipe

RESULTS = Path(__file__).resolve().parent / "results"
LONG = "twice the FLOPs"
MORE = "four times the FLOPs"
"""Ends of the names of parts whose runs have more FLOPs than their size and text would get."""
OTHER, THIRD = "other text", "third text"
"""In the names of parts that repeat another one on other text."""
ATTRACTOR, RANDOM = "attractor", "random depth"
"""In the names of parts with another injection, and with a random number of loops."""
GATES, STAGES, END = "gates", "stages", "8 loops at the end"
"""In the names of parts with bounded gates on the branches, with a number of loops that grows in stages, and
with 3 loops, 8 in the last fifth of the steps."""
FOUR_LAYERS, DAMPED = "4 layers", "damping"
"""In the names of parts of Mamba2 with half as many layers, and of those with a damped injection."""
NORMED = f"Llama, {OTHER}, weight norm, {LONG}"
MAMBA2_NORMED = f"Mamba2, 10 M, weight norm, {LONG}"
STAGED = f"Llama, {GATES}, {STAGES}, {OTHER}"
STAGED_THIRD = f"Llama, {GATES}, {STAGES}, {THIRD}"
STAGED_2M = f"Llama, 2 M, {GATES}, {STAGES}"
STAGED_10M = f"Llama, 10 M, {GATES}, {STAGES}"
STAGED_30M = f"Llama, 30 M, {GATES}, {STAGES}"
GATED = f"Llama, {GATES}, {END}, {OTHER}"
GATED_THIRD = f"Llama, {GATES}, {END}, {THIRD}"
GATED_2M = f"Llama, 2 M, {GATES}, {END}"
GATED_10M = f"Llama, 10 M, {GATES}, {END}"
GATED_30M = f"Llama, 30 M, {GATES}, {END}"
GATED_MUON = f"Llama, Muon, {GATES}, {OTHER}"
PENALIZED = f"Llama, {ATTRACTOR} with penalty, {OTHER}, {MORE}"
MAMBA2_FOUR = f"Mamba2, {FOUR_LAYERS}, weight norm, {OTHER}"
MAMBA2_STAGES = f"Mamba2, {FOUR_LAYERS}, {GATES}, {STAGES}, {OTHER}"
MAMBA2_STAGES_THIRD = f"Mamba2, {FOUR_LAYERS}, {GATES}, {STAGES}, {THIRD}"
MAMBA2_STAGES_10M = f"Mamba2, 10 M, {FOUR_LAYERS}, {GATES}, {STAGES}"
MAMBA2_STAGES_LONG = f"{MAMBA2_STAGES}, {LONG}"
MAMBA2_FOUR_LONG = f"{MAMBA2_FOUR}, {LONG}"
MAMBA2_FOUR_10M = f"Mamba2, 10 M, {FOUR_LAYERS}, weight norm, {LONG}"
ONCE, ONCE_GATED, ONCE_DAMPED = "once", f"once, {GATES}", f"once, {GATES}, {DAMPED}"
ONCE_MAMBA2 = f"Mamba2, {ONCE_DAMPED}"
PER_PARAMETER = {
    f"Llama, 2 M, {GATES}, {END}, 2.7 tokens per parameter": "equal_compute_averaged_2m_gates_more_text",
    f"Llama, 2 M, {GATES}, {END}, 7.4 tokens per parameter": "equal_compute_averaged_2m_gates_most_text",
    f"Llama, 0.7 M, {GATES}, {END}, 19 tokens per parameter": "equal_compute_averaged_700k_gates_most_text",
}
"""Result files of the parts with more text than half a token per parameter."""
ABLATED = f"Llama, {OTHER}"
"""The part whose file also has single seeds of many other recipes, `equal_compute_ablations`."""
FILES = {
    "Llama, 0.7 M": "equal_compute_averaged_700k",
    "Llama, 2 M": "equal_compute_averaged_2m",
    "Llama": "equal_compute_averaged",
    "Llama, penalty": "equal_compute_averaged_penalty",
    f"Llama, {LONG}": "equal_compute_averaged_longer",
    ABLATED: "equal_compute_ablations",
    GATED: "equal_compute_averaged_gates",
    GATED_THIRD: "equal_compute_averaged_third_text_gates",
    GATED_2M: "equal_compute_averaged_2m_gates",
    GATED_10M: "equal_compute_averaged_10m_gates",
    GATED_30M: "equal_compute_averaged_30m_gates",
    STAGED: "equal_compute_averaged_stages",
    STAGED_THIRD: "equal_compute_averaged_third_text",
    STAGED_2M: "equal_compute_averaged_2m_stages",
    STAGED_10M: "equal_compute_averaged_10m_stages",
    STAGED_30M: "equal_compute_averaged_30m_stages",
    f"Llama, {OTHER}, {LONG}": "equal_compute_averaged_other_text",
    NORMED: "equal_compute_averaged_weight_norm",
    f"Llama, {OTHER}, {MORE}": "equal_compute_averaged_longest",
    f"Llama, {ATTRACTOR}, {OTHER}, {LONG}": "equal_compute_averaged_attractor",
    f"Llama, {ATTRACTOR}, {OTHER}, {MORE}": "equal_compute_averaged_attractor_longest",
    PENALIZED: "equal_compute_averaged_attractor_penalty",
    f"Llama, {RANDOM}, {OTHER}, {LONG}": "equal_compute_averaged_random_depth",
    "Llama, 10 M": "equal_compute_averaged_10m",
    f"Llama, 10 M, {LONG}": "equal_compute_averaged_10m_longer",
    "Llama, 30 M": "equal_compute_averaged_30m",
    "Llama, Muon": "equal_compute_averaged_muon",
    f"Llama, Muon, {LONG}": "equal_compute_averaged_muon_longer",
    GATED_MUON: "equal_compute_averaged_muon_gates",
    "Mamba2": "equal_compute_averaged_mamba2",
    f"Mamba2, {LONG}": "equal_compute_averaged_mamba2_longer",
    f"Mamba2, 10 M, {LONG}": "equal_compute_averaged_mamba2_10m",
    MAMBA2_NORMED: "equal_compute_averaged_mamba2_weight_norm",
    MAMBA2_FOUR: "equal_compute_averaged_mamba2_four_layers",
    MAMBA2_FOUR_LONG: "equal_compute_averaged_mamba2_four_layers_longer",
    MAMBA2_FOUR_10M: "equal_compute_averaged_mamba2_four_layers_10m",
    MAMBA2_STAGES: "equal_compute_averaged_mamba2_stages",
    MAMBA2_STAGES_THIRD: "equal_compute_averaged_mamba2_third_text",
    MAMBA2_STAGES_10M: "equal_compute_averaged_mamba2_stages_10m",
    MAMBA2_STAGES_LONG: "equal_compute_averaged_mamba2_stages_longer",
    f"Mamba2, {MORE}": "equal_compute_averaged_mamba2_longest",
    "Mamba2, longer averages": "equal_compute_averaged_mamba2_averages",
    "Mamba2, Muon": "equal_compute_averaged_mamba2_muon",
    ONCE: "equal_compute_once_late",
    ONCE_GATED: "equal_compute_once_gates",
    ONCE_DAMPED: "equal_compute_once_damped",
    ONCE_MAMBA2: "equal_compute_once_mamba2",
    **PER_PARAMETER,
}
"""Result files by part of the comparison."""
SEARCH = "equal_compute_search"
"""Result file of the search among recipes with gates: three seeds of each, measured only for the choice."""
HALF = {
    f"Llama, {LONG}": "Llama, penalty",
    f"Llama, 10 M, {LONG}": "Llama, 10 M",
    f"Llama, Muon, {LONG}": "Llama, Muon",
    f"Mamba2, {LONG}": "Mamba2",
    f"Llama, {OTHER}, {MORE}": f"Llama, {OTHER}, {LONG}",
    f"Llama, {OTHER}, {LONG}": ABLATED,
    f"Llama, {ATTRACTOR}, {OTHER}, {MORE}": f"Llama, {ATTRACTOR}, {OTHER}, {LONG}",
}
"""Parts with the same text and half of the FLOPs, whose explicit models are candidates, too."""
BESIDE = {
    STAGED: (ABLATED,),
    GATED: (ABLATED, STAGED),
    GATED_THIRD: (STAGED_THIRD,),
    GATED_2M: (STAGED_2M,),
    GATED_10M: (STAGED_10M,),
    GATED_30M: (STAGED_30M,),
    PENALIZED: (f"Llama, {OTHER}, {MORE}", f"Llama, {OTHER}, {LONG}"),
    NORMED: (f"Llama, {OTHER}, {LONG}",),
    MAMBA2_STAGES: (MAMBA2_FOUR,),
    MAMBA2_NORMED: (f"Mamba2, 10 M, {LONG}",),
    f"Llama, {ATTRACTOR}, {OTHER}, {LONG}": (f"Llama, {OTHER}, {LONG}",),
    f"Llama, {ATTRACTOR}, {OTHER}, {MORE}": (f"Llama, {OTHER}, {MORE}", f"Llama, {OTHER}, {LONG}"),
    f"Llama, {RANDOM}, {OTHER}, {LONG}": (f"Llama, {OTHER}, {LONG}",),
}
"""Parts with the same text whose explicit models are candidates, too: those without weight norm, and those of
parts whose implicit models alone were trained."""
EDGES = (f"Mamba2, {MORE}", "Mamba2, longer averages", MAMBA2_STAGES_LONG)
"""Parts that the summary leaves out: they test the edges of others."""
GROUPS = {
    STAGES: (
        GATED, GATED_THIRD, GATED_2M, GATED_10M, GATED_30M,
        STAGED, STAGED_THIRD, STAGED_2M, STAGED_10M, STAGED_30M,
        MAMBA2_STAGES, MAMBA2_STAGES_THIRD, MAMBA2_STAGES_10M, MAMBA2_STAGES_LONG,
    ),
    "Llama": ("Llama",),
    "more passes": ("Llama, penalty", f"Llama, {LONG}", f"Llama, 10 M, {LONG}"),
    OTHER: (
        ABLATED,
        f"Llama, {OTHER}, {LONG}",
        f"Llama, {ATTRACTOR}, {OTHER}, {LONG}",
        f"Llama, {RANDOM}, {OTHER}, {LONG}",
        NORMED,
        f"Llama, {OTHER}, {MORE}",
        f"Llama, {ATTRACTOR}, {OTHER}, {MORE}",
        PENALIZED,
    ),
    "sizes": ("Llama, 0.7 M", "Llama, 2 M", "Llama, 10 M", "Llama, 30 M"),
    "Mamba2": ("Mamba2", f"Mamba2, {LONG}", f"Mamba2, {MORE}"),
    "Muon": ("Llama, Muon", f"Llama, Muon, {LONG}", GATED_MUON, "Mamba2, Muon"),
    "Mamba2, 10 M": (f"Mamba2, 10 M, {LONG}", MAMBA2_NORMED),
    f"Mamba2, {FOUR_LAYERS}": (MAMBA2_FOUR, MAMBA2_FOUR_LONG, MAMBA2_FOUR_10M),
    ONCE: (ONCE,),
    ONCE_GATED: (ONCE_GATED,),
    ONCE_DAMPED: (ONCE_DAMPED, ONCE_MAMBA2),
    "text per parameter": (*PER_PARAMETER,),
}  # fmt: skip
"""Parts whose recipes share a table."""
MAIN = (
    *(part for part in GROUPS[STAGES] if not part.startswith("Llama") or END in part),
    ONCE_DAMPED,
    ONCE_MAMBA2,
)
OTHERS = [part for part in FILES if part not in MAIN]
"""Parts of the summary in docs/equal_compute.md, and of the other one in docs/equal_compute_tables.md."""
ONE_MODEL = ("more passes", OTHER, "sizes", "Muon")
"""Groups whose choice was between recipes of one model of each side, which the page has in words."""
SIZES = ("Llama, 0.7 M", "Llama, 2 M", "Llama", "Llama, 10 M", "Llama, 30 M")
GATED_SIZES = (GATED_2M, GATED, GATED_10M, GATED_30M)
"""Parts with text and FLOPs in proportion to the size, of the former recipe and with gates."""


def _phase(name: str, until: float, loops: int) -> str:
    return f"{{name: {name}, until: {until:g}, model: {{depth: {{loops: {loops}}}}}}}"


def stages(*loops: int, penalty: float = 0.0) -> str:
    """Return phases of equal length with these numbers of loops; the last one may have a penalty."""
    phases = [_phase(f"loops{n}", (place + 1) / len(loops), n) for place, n in enumerate(loops[:-1])]
    gradient = f", model: {{gradient: {{residual_weight: {penalty}}}}}" if penalty else ""
    return f"phases=[{', '.join(phases)}, {{name: loops{loops[-1]}{gradient}}}]"


def ending(stages: Mapping[float, int], *, penalty: int) -> str:
    """Return phases with these numbers of loops, by the share of the steps at which each ends.

    The last part of the steps has the loops of the model, and a penalty.
    """
    names = {1: "one", 2: "two", 3: "three", 4: "four"}
    phases = ", ".join(_phase(names[n], until, n) for until, n in stages.items())
    return f"phases=[{phases}, {{name: end, model: {{gradient: {{residual_weight: {penalty}}}}}}}]"


BOUNDED_GATES = "model.residual_scaling={kind: bounded_gate, maximum: 0.75, init: 0.5}"
CHANGES = {
    BOUNDED_GATES: "gates of at most 0.75",
    "model.residual_scaling={kind: layer_scale, init: 0.25}": "branches scaled by 0.25",
    "model.depth={kind: uniform, low: 1, high: 5}": "random depth of 1 to 5",
    "model.depth={kind: uniform, low: 1, high: 2}": "random depth of 1 or 2",
    stages(1, 2, 3, 4, penalty=4.0): "in stages of 1 to 4 loops, penalty 4",
    **{
        ending({0.27: 1, 0.53: 2, 0.8: 3}, penalty=n): f"fewer before 80%: 1, 2 and 3, penalty {n}"
        for n in (4, 16)
    },
    ending({0.3: 1, 0.55: 2, 0.8: 4}, penalty=4): "fewer before 80%: 1, 2 and 4, penalty 4",
    ending({0.5: 1, 0.8: 3}, penalty=4): "fewer before 80%: 1 and 3, penalty 4",
}
"""Changes of a run's spec in the words of the tables."""


def read(part: str) -> list[dict[str, Any]]:
    """Return the short rows of a part; none if it was not measured."""
    return runs_of(FILES[part])


def runs_of(file: str) -> list[dict[str, Any]]:
    """Return the short rows of a result file; none if there is no such file."""
    path = RESULTS / f"{file}.json"
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return found


def choosing(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs that chose."""
    return [run for run in runs if run["recipe"]["seed"] == 0]


def points_tried(part: str, recipe: Recipe) -> set[tuple[float, float, float]]:
    """Return learning rate, weight decay and share of the budget of the runs that chose a model's recipe.

    Those of the same model and FLOPs, in a part and in those with the same text.
    """

    def without_point(one: Recipe) -> Recipe:
        return replace(one, learning_rate=1.0, weight_decay=0.0, share=1.0, average=None, seed=0)

    runs = [run for name in (part, *BESIDE.get(part, ())) for run in choosing(read(name))]
    tried = [one for one in map(recipe_of, runs) if without_point(one) == without_point(recipe)]
    return {(one.learning_rate, one.weight_decay, one.share) for one in tried}


def tuned_alike(part: str, ours: Recipe, theirs: Recipe) -> bool:
    """Return whether the explicit recipe was chosen from all points of the implicit one, two or more."""
    own = points_tried(part, ours)
    return len(own) > 1 and own <= points_tried(part, theirs)


def reported(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs that are reported."""
    return [run for run in runs if run["recipe"]["seed"]]
