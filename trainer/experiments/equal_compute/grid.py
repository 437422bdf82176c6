"""The grid over which both sides of a comparison are tuned. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from trainer.experiments.equal_compute.recipes import Recipe

STEP = 2.0
"""Factor by which a grid grows beyond its edge."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Learning rates, weight decays, and shares of the budget: fewer epochs of the same text."""

    learning_rates: tuple[float, ...]
    weight_decays: tuple[float, ...]
    shares: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name in ("learning_rates", "weight_decays", "shares"):
            values = tuple(sorted(getattr(self, name)))
            object.__setattr__(self, name, values)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name.replace('_', ' ')} are {list(values)}; give at least one, each once")
            if values[0] <= 0:
                raise ValueError(f"{name.replace('_', ' ')} must be positive, got {values[0]:g}")
        if self.shares[-1] > 1:
            raise ValueError(f"a share of the budget is at most 1, got {self.shares[-1]:g}")

    def points(self, recipe: Recipe) -> Iterator[Recipe]:
        """Yield the recipe at every point of the grid, the full budget first."""
        for share, decay, rate in product(self.shares[::-1], self.weight_decays, self.learning_rates):
            yield replace(recipe, learning_rate=rate, weight_decay=decay, share=share)

    def edges(self, recipe: Recipe) -> list[str]:
        """Return a description of the edges of the grid at which a recipe lies.

        An axis with one value has no edge that says anything. The full budget is no edge, since more is not
        allowed.
        """
        found = []
        for word, value, values in self._axes(recipe):
            if len(values) == 1:
                continue
            if value == values[0]:
                found.append(f"the lowest {word}")
            elif value == values[-1] and word != "share of the budget":
                found.append(f"the highest {word}")
        return found

    def untuned(self) -> list[str]:
        """Return the axes with a single value, along which nothing was tuned."""
        named = {
            "learning rate": self.learning_rates,
            "weight decay": self.weight_decays,
            "share of the budget": self.shares,
        }
        return [word for word, values in named.items() if len(values) == 1]

    def widened(self, recipes: Iterable[Recipe]) -> Grid:
        """Return the grid with one more value beyond each edge at which one of these recipes lies."""
        rates, decays, shares = set(self.learning_rates), set(self.weight_decays), set(self.shares)
        for edge in {edge for recipe in recipes for edge in self.edges(recipe)}:
            for word, before, values in (
                ("learning rate", self.learning_rates, rates),
                ("weight decay", self.weight_decays, decays),
                ("share of the budget", self.shares, shares),
            ):
                if edge == f"the lowest {word}":
                    values.add(float(f"{before[0] / STEP:.6g}"))
                elif edge == f"the highest {word}":
                    values.add(float(f"{before[-1] * STEP:.6g}"))
        return Grid(learning_rates=tuple(rates), weight_decays=tuple(decays), shares=tuple(shares))

    def _axes(self, recipe: Recipe) -> list[tuple[str, float, tuple[float, ...]]]:
        return [
            ("learning rate", recipe.learning_rate, self.learning_rates),
            ("weight decay", recipe.weight_decay, self.weight_decays),
            ("share of the budget", recipe.share, self.shares),
        ]
