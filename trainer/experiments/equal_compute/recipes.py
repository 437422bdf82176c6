"""Recipes: what one run trains, and how; and the run spec of a recipe. Imports no torch."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from implicit_blocks.specs import ModelSpec
from implicit_blocks.specs.base import validate
from implicit_blocks.specs.errors import format_error
from implicit_blocks.specs.loading import apply_overrides
from implicit_blocks.specs.tree import dump_yaml, parse_yaml
from trainer.experiments.equal_compute.flops import run_flops
from trainer.specs.run import RunSpec

Family = Literal["llama", "mamba2"]
Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run: the shape of the model, its budget, and what is tuned.

    The budget is in executed training FLOPs; ``share`` below 1 uses only this part of it, which is fewer
    epochs of the same text.
    """

    family: Family
    layers: tuple[int, int, int]
    """Layers of prelude, core and coda; an explicit model has (0, n, 0)."""
    loops: int = 0
    """Loops of the core in training; 0: the explicit model."""
    gradient_loops: int | None = None
    """Number of loops, the last ones, that are differentiated; None: all."""
    loops_from: float = 0.0
    """Share of the steps before which the core is run once."""
    end_loops: int = 0
    """Loops of the last part of the steps, of which as many as before are differentiated; 0: no such part."""
    end_from: float = 0.9
    """Share of the steps after which that part begins."""
    injection: str = "residual"
    """How the prelude's output enters the core."""
    gate: float | None = None
    """Initial value of the gate of the residual injection; None: no gate."""
    damping: float = 1.0
    """Damping of the residual injection: of the map itself, in training and evaluation."""
    residual_weight: float = 0.0
    """Weight of the penalty on the last loop's squared residual in the last part of the steps."""
    width: int = 256
    optimizer: Optimizer = "adamw"
    """Muon moves the matrices of the layers, with AdamW for all other parameters."""
    learning_rate: float
    weight_decay: float
    petaflops: float
    bounded: bool = False
    """Whether a search that stops at a tolerance counts with its maximum of iterations, or is refused."""
    share: float = 1.0
    seed: int = 0
    weight_norm: bool = False
    qk_norm: bool = True
    average: float | tuple[float, ...] | None = None
    """Factor of a moving average of the weights, per step; of several the best on the text of the choice."""
    changes: tuple[str, ...] = ()
    """Further changes of the run's spec, each ``path.to.key=value`` as for ``python -m trainer``."""
    batch_size: int = 16
    length: int = 512
    vocab_size: int = 8192
    precision: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "changes", tuple(self.changes))
        if isinstance(self.average, Sequence):
            object.__setattr__(self, "average", tuple(self.average))
        prelude, core, coda = self.layers
        if core < 1 or min(prelude, coda) < 0:
            raise ValueError(f"layers is {self.layers}; give prelude, core (at least 1) and coda")
        if not self.loops and (prelude or coda):
            raise ValueError(f"an explicit model has layers (0, n, 0), not {self.layers}; or set loops")
        if self.optimizer not in get_args(Optimizer):
            known = ", ".join(get_args(Optimizer))
            raise ValueError(f"optimizer is {self.optimizer!r}; choose from {known}")
        if self.gate is not None and (not self.loops or self.injection != "residual"):
            raise ValueError(f"gate is {self.gate}, and only injection 'residual' of a looped model has one")
        if self.damping != 1 and (not self.loops or self.injection != "residual"):
            raise ValueError(
                f"damping is {self.damping}, and only injection 'residual' of a looped model has one"
            )
        if self.residual_weight and not self.end_loops:
            raise ValueError(f"residual_weight is {self.residual_weight}, for the last part: set end_loops")
        for name in ("learning_rate", "petaflops", "share"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if not 0 <= self.loops_from < 1 or (self.loops_from and self.loops < 2):
            raise ValueError(f"loops_from is {self.loops_from}; give a share below 1, for 2 loops or more")
        if self.end_loops and not (self.loops and self.loops_from < self.end_from < 1):
            raise ValueError(
                f"end_loops is {self.end_loops} from {self.end_from}; give a looped model, and a share "
                f"between loops_from, {self.loops_from}, and 1"
            )

    @property
    def side(self) -> Literal["explicit", "implicit"]:
        """The side of the comparison."""
        return "implicit" if self.loops else "explicit"

    @property
    def averages(self) -> tuple[float, ...]:
        """The factors of the moving averages."""
        return self.average if isinstance(self.average, tuple) else (self.average,) if self.average else ()

    @property
    def shape(self) -> str:
        """The shape of the model in words: ``4 layers``, or ``1-2-1, 3 loops``."""
        changes = "".join(f", {change}" for change in self.changes)
        if not self.loops:
            return f"{self.layers[1]} layers{changes}"
        late = f" from {self.loops_from:.0%}" if self.loops_from else ""
        kind = "" if self.injection == "residual" else f" {self.injection}"
        last = "" if self.gradient_loops is None else f", gradient of {self.gradient_loops}"
        end = f", {self.end_loops} from {self.end_from:.0%}" if self.end_loops else ""
        gate = "" if self.gate is None else f", gate {self.gate:g}"
        damping = "" if self.damping == 1 else f", damping {self.damping:g}"
        penalty = f", penalty {self.residual_weight:g}" if self.residual_weight else ""
        rest = f"{late}{end}{last}{gate}{damping}{penalty}{changes}"
        return f"{'-'.join(map(str, self.layers))}{kind}, {self.loops} loops{rest}"

    @property
    def name(self) -> str:
        """A name that no other recipe has, fit for a file."""
        shape = "-".join(map(str, self.layers)) + f"x{self.loops}" if self.loops else f"{self.layers[1]}"
        parts = [self.family, self.side, shape, f"w{self.width}"]
        if self.loops:
            parts.append(self.injection)
            parts += [] if self.gradient_loops is None else [f"k{self.gradient_loops}"]
            parts += [f"from{self.loops_from:g}"] if self.loops_from else []
            parts += [f"end{self.end_loops}from{self.end_from:g}"] if self.end_loops else []
            parts += [] if self.gate is None else [f"gate{self.gate:g}"]
            parts += [] if self.damping == 1 else [f"damp{self.damping:g}"]
            parts += [f"pen{self.residual_weight:g}"] if self.residual_weight else []
        parts += [] if self.optimizer == "adamw" else [self.optimizer]
        parts += ["wn"] if self.weight_norm else []
        parts += [] if self.qk_norm or self.family == "mamba2" else ["plain"]
        parts += [_short("_".join(self.changes))] if self.changes else []
        parts += [f"lr{self.learning_rate:g}", f"wd{self.weight_decay:g}", f"{self.petaflops:g}pf"]
        parts += [f"share{self.share:g}"] if self.share != 1 else []
        parts += ["ema" + "-".join(f"{decay:g}" for decay in self.averages)] if self.averages else []
        return "_".join([*parts, f"s{self.seed}"])

    @classmethod
    def of(cls, row: dict[str, Any]) -> Recipe:
        """Return the recipe of a row of JSON.

        Raises:
            ValueError: a field is unknown, missing or out of range.

        """
        try:
            return cls(**row)
        except TypeError as error:
            raise ValueError(f"a run is described by {sorted(row)}: {error}") from None

    def as_row(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        return {**asdict(self), "layers": list(self.layers), "changes": list(self.changes)}

    def with_seed(self, seed: int) -> Recipe:
        """Return the same recipe with another seed."""
        return replace(self, seed=seed)


def _short(changes: str) -> str:
    """Return changes as a part of a file's name, which may have 255 bytes in all."""
    words = re.sub(r"[^\w.=-]+", "-", changes).strip("-")
    return words if len(words) <= 40 else f"{words[:31]}-{zlib.crc32(changes.encode()):08x}"


def spec_of(recipe: Recipe, data: Path) -> RunSpec:
    """Return the run of a recipe on the tokens in ``data``, an output of ``python -m trainer.tokenize``.

    The number of steps is the largest within the budget.

    Raises:
        ValueError: the recipe is not valid, or its budget is below one step.

    """
    one = _validated(recipe, data, steps=1000)
    executed = run_flops(one, bound=recipe.bounded)
    steps = math.floor(1000 * recipe.share * recipe.petaflops * 1e15 / executed + 1e-9)
    if steps < 2:
        raise ValueError(f"{recipe.name}: {recipe.petaflops:g} PFLOP are below two steps; raise petaflops")
    return _validated(recipe, data, steps=steps)


def model_of(recipe: Recipe) -> ModelSpec:
    """Return the model of a recipe alone, which needs no tokens."""
    return ModelSpec.model_validate(_changed(recipe, Path(), steps=2)["model"])


def _validated(recipe: Recipe, data: Path, *, steps: int) -> RunSpec:
    tree = _changed(recipe, data, steps)
    try:
        return validate(RunSpec, tree)
    except ValidationError as error:
        raise format_error(error, tree, source=recipe.name) from None


def _changed(recipe: Recipe, data: Path, steps: int) -> dict[str, Any]:
    tree = _tree(recipe, data, steps)
    if not recipe.changes:
        return tree
    return apply_overrides(parse_yaml(dump_yaml(tree), source=recipe.name), recipe.changes)


def _tree(recipe: Recipe, data: Path, steps: int) -> dict[str, Any]:
    prelude, core, coda = recipe.layers
    model: dict[str, Any] = {
        "kind": "explicit_lm",
        "vocab_size": recipe.vocab_size,
        "d_model": recipe.width,
        "n_layers": core,
        "weight_norm": recipe.weight_norm,
        **_layers(recipe),
    }
    phases: list[dict[str, Any]] = []
    if recipe.loops:
        last = recipe.gradient_loops
        injection: dict[str, Any] = {"kind": recipe.injection}
        if recipe.gate is not None:
            injection["gate_init"] = recipe.gate
        if recipe.damping != 1:
            injection["damping"] = recipe.damping
        model |= {
            "kind": "implicit_lm",
            "injection": injection,
            "depth": {"kind": "fixed", "loops": recipe.loops},
            "gradient": {"kind": "last_loops", "loops": last},
            "stopping": {"tolerance": 1e-3, "max_iterations": 32},
            "at_evaluation": {"stopping": {"max_iterations": 32}},
        }
        model |= {name: {"n_layers": n} for name, n in (("prelude", prelude), ("coda", coda)) if n}
        if recipe.loops_from:
            once = {"depth": {"kind": "fixed", "loops": 1}}
            phases = [{"name": "once", "until": recipe.loops_from, "model": once}]
        if recipe.end_loops:
            gradient: dict[str, Any] = {"loops": last or recipe.loops}
            if recipe.residual_weight:
                gradient["residual_weight"] = recipe.residual_weight
            end = {"depth": {"loops": recipe.end_loops}, "gradient": gradient}
            phases.append({"name": "looped", "until": recipe.end_from})
            phases.append({"name": "end", "model": end})
        elif phases:
            phases.append({"name": "looped"})
    return {
        "kind": "run",
        "model": model,
        "data": {"kind": "tokens", "path": str(data), "seq_len": recipe.length},
        "training": {
            "max_steps": steps,
            "batch_size": recipe.batch_size,
            "seed": recipe.seed,
            "precision": recipe.precision,
            "max_grad_norm": 1.0,
            "optimizer": {
                "kind": recipe.optimizer,
                "learning_rate": recipe.learning_rate,
                "weight_decay": recipe.weight_decay,
                "betas": [0.9, 0.95],
            },
            "schedule": {
                "kind": "warmup_constant_sqrt",
                "warmup": 0.02,
                "decay": 0.3,
                "final_learning_rate": 1e-5,
            },
        },
        "phases": phases,
        "evaluation": {"sequences": 512, "batch_size": 32},
    }


def _layers(recipe: Recipe) -> dict[str, Any]:
    """Return mixer and MLP of a layer of the family, in proportion to the width."""
    width = recipe.width
    if recipe.family == "mamba2":
        return {"mixer": {"kind": "mamba2", "d_state": min(128, width // 2), "head_dim": min(64, width // 4)}}
    if recipe.family != "llama":
        raise ValueError(f"family is {recipe.family!r}; choose llama or mamba2")
    mixer: dict[str, Any] = {"kind": "attention", "n_heads": max(1, width // 64), "rope_theta": 500000}
    if recipe.qk_norm:
        mixer["qk_norm"] = "weighted"
    return {"mixer": mixer, "mlp": {"kind": "swiglu", "d_ff": -(-8 * width // 3 // 64) * 64}}
