"""Comparisons: the models of both sides, by setting. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

from trainer.experiments.equal_compute.grid import Grid
from trainer.experiments.equal_compute.recipes import Optimizer, Recipe

Kind = Literal["equal_size", "free_size", "fresh_text"]
Side = Literal["implicit", "explicit"]

KINDS: dict[str, str] = {
    "equal_size": "equal text, parameters and FLOPs",
    "free_size": "equal text and FLOPs, the explicit side free in depth, width and epochs",
    "fresh_text": "fresh text, each token once, equal FLOPs, free size",
}
"""The settings of a comparison, in words."""
SIDES: tuple[Side, ...] = ("implicit", "explicit")
NORMALIZATIONS: dict[str, dict[str, Any]] = {
    "qk_norm": {"qk_norm": True, "weight_norm": False},
    "weight_norm": {"qk_norm": False, "weight_norm": True},
}
"""The normalizations, which both sides have alike. Mamba2 has no queries: without weight norm it has none."""
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
"""The optimizers, which both sides have alike."""

_SHAPE = re.compile(r"(\d+)-(\d+)-(\d+)x(\d+)(?:k(\d+))?(?:@(0?\.\d+))?(?:\+(\d+)@(0?\.\d+))?")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Both sides of a comparison, and the grid over which each is tuned."""

    kind: Kind
    family: str
    normalization: str
    optimizer: str
    implicit: tuple[Recipe, ...]
    explicit: tuple[Recipe, ...]
    grid: Grid

    @property
    def title(self) -> str:
        """The comparison in words."""
        shape = f", {self.implicit[0].shape}" if self.kind == "equal_size" else ""
        with_ = f"{self.normalization.replace('_', ' ')}, {self.optimizer}"
        return f"{self.family}, {with_}{shape}: {KINDS[self.kind]}"

    def side(self, side: Side) -> tuple[Recipe, ...]:
        """Return the models of a side, at any point of the grid."""
        return self.implicit if side == "implicit" else self.explicit

    def points(self, side: Side, seeds: Sequence[int]) -> Iterator[Recipe]:
        """Yield the runs that tune a side."""
        for recipe, seed in product(self.side(side), seeds):
            yield from self.grid.points(recipe.with_seed(seed))


def looped_shape(text: str) -> dict[str, Any]:
    """Return the fields of a recipe for a looped shape.

    ``1-2-1x3``: prelude, core, coda, and loops; ``k2``: the last 2 loops are differentiated; ``@.6``: one
    loop for the first 60 % of the steps; ``+8@.8``: 8 loops after 80 % of them.

    Raises:
        ValueError: it is written otherwise.

    """
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a looped shape; write prelude-core-coda x loops, as in 1-2-1x3")
    prelude, core, coda, loops, last, late, end_loops, end_from = found.groups()
    end = {} if end_loops is None else {"end_loops": int(end_loops), "end_from": float(end_from)}
    return {
        **end,
        "layers": (int(prelude), int(core), int(coda)),
        "loops": int(loops),
        "gradient_loops": None if last is None else int(last),
        "loops_from": 0.0 if late is None else float(late),
    }


def comparisons(
    base: Recipe,
    *,
    kinds: Sequence[str],
    families: Sequence[str],
    normalizations: Sequence[str],
    optimizers: Sequence[str] = ("adamw",),
    shapes: Sequence[str],
    layers: Sequence[int],
    widths: Sequence[int],
    grid: Grid,
    fresh_petaflops: float,
) -> list[Comparison]:
    """Return the comparisons of an experiment.

    Args:
        base: the fields that all runs share; its shape is replaced.
        kinds: of the settings, see `KINDS`.
        families: of the models.
        normalizations: see `NORMALIZATIONS`.
        optimizers: of both sides, each a comparison of its own, see `OPTIMIZERS`.
        shapes: of the looped models, see `looped_shape`.
        layers: of the explicit models whose size is free.
        widths: of the explicit models whose size is free, besides that of ``base``.
        grid: of both sides.
        fresh_petaflops: the budget where each token is seen once.

    Raises:
        ValueError: a name is unknown, or a shape is not valid.

    """
    _require_known("comparison", kinds, KINDS)
    _require_known("normalization", normalizations, NORMALIZATIONS)
    _require_known("optimizer", optimizers, OPTIMIZERS)
    once = Grid(learning_rates=grid.learning_rates, weight_decays=grid.weight_decays)
    found: list[Comparison] = []
    for family, normalization, optimizer, kind in product(families, normalizations, optimizers, kinds):
        plain: dict[str, Any] = {"loops": 0, "gradient_loops": None, "loops_from": 0.0, "end_loops": 0}
        common: dict[str, Any] = {"family": family, "optimizer": optimizer, **NORMALIZATIONS[normalization]}
        if kind == "fresh_text":
            common["petaflops"] = fresh_petaflops
        looped = tuple(replace(base, **common, **looped_shape(shape)) for shape in shapes)
        label: dict[str, Any] = {
            "kind": kind,
            "family": family,
            "normalization": normalization,
            "optimizer": optimizer,
        }
        if kind == "equal_size":
            for one in looped:
                twin = replace(one, **plain, layers=(0, sum(one.layers), 0))
                found.append(Comparison(**label, implicit=(one,), explicit=(twin,), grid=grid))
            continue
        depths = sorted({*layers, *(sum(one.layers) for one in looped)})
        free = tuple(
            replace(base, **common, **plain, layers=(0, depth, 0), width=width)
            for depth, width in product(depths, sorted({base.width, *widths}))
        )
        tuned = once if kind == "fresh_text" else grid
        found.append(Comparison(**label, implicit=looped, explicit=free, grid=tuned))
    return found


def _require_known(what: str, names: Sequence[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
