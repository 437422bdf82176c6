"""Run specs of the word-problem studies, derived from one base spec. Imports no torch.

A *model* is named ``implicit-mamba2``, ``mamba2``, ``implicit-llama``, ``llama``, or ``transformers:`` and a
model type of transformers. All models have the width of the base spec's model, see the same data in the same
order, and keep the phases' data and training settings; search settings apply only to implicit models.
Explicit models use Mamba2's default initialization of the decay. An override of ``model.d_model`` sets the
width of all models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, merge
from implicit_blocks.specs.base import validate
from implicit_blocks.specs.errors import format_error
from implicit_blocks.specs.loading import apply_overrides, resolve
from implicit_blocks.specs.tree import Section
from trainer.specs.run import DataSpec, MixtureSpec, RunSpec, WordProblemSpec

IMPLICIT = ("implicit-mamba2", "implicit-llama")
NATIVE = ("implicit-mamba2", "mamba2", "implicit-llama", "llama")
BASELINE = "transformers:"
_DECAY_FIELDS = ("dt_min", "dt_max", "a_min", "a_max")
_WIDTH = ["model", "d_model"]


def require_model(name: str) -> None:
    """Reject an unknown model name.

    Raises:
        ValueError: lists the known names.

    """
    if name in NATIVE or (name.startswith(BASELINE) and name != BASELINE):
        return
    raise ValueError(f"unknown model {name!r}; {did_you_mean(name, NATIVE)}, or use {BASELINE}NAME")


def vary_spec(
    base: str,
    *,
    model: str,
    layers: int = 1,
    group: str | None = None,
    length: int | None = None,
    identity_probability: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    evaluation: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> RunSpec:
    """Return the spec of one run.

    Args:
        base: name or path of the base spec.
        model: see above.
        layers: number of layers of the model.
        group: group of the word problem; None: the base spec's, as for the following arguments.
        length: training length; longer phases are cut to it.
        identity_probability: identity probability in all phases.
        iterations: maximum iterations of the search in all phases, and maximum steps of unrolled phases.
        seed: seed of the run.
        evaluation: changes to that section.
        overrides: further changes, ``path.to.key=value``, applied last; explicit models ignore those of
            search and gradient.

    Raises:
        ValueError: an unknown model, a base spec that is not for word problems or mixtures of them, or
            invalid settings.

    """
    require_model(model)
    tree = resolve(base)
    try:
        base_spec = validate(RunSpec, tree)
    except ValidationError as error:
        raise format_error(error, tree, source=base) from None
    if not _is_word_problem(base_spec.data):
        raise ValueError(
            f"{base} is a run on data of kind {base_spec.data.kind!r}; use one on a word_problem"
        )
    varies = ImplicitLMSpec if model in IMPLICIT else (ImplicitLMSpec, ExplicitLMSpec)
    if not isinstance(base_spec.model, varies):
        raise ValueError(
            f"{base} has a model of kind {base_spec.model.kind!r}, from which {model} cannot be derived; "
            "use a spec with an implicit_lm"
        )
    data = _without_none(group=group, seq_len=length, identity_probability=identity_probability)
    tree = merge(tree, {"training": {"seed": seed}, "evaluation": dict(evaluation or {})})
    tree["data"] = _data(tree["data"], data)
    width = _width(tree, base_spec.model.d_model, overrides)
    own = merge(tree["model"], {"d_model": width})
    tree["model"] = _model(own, model, layers=layers, width=width)
    tree["phases"] = [
        Section(_phase(phase, implicit=model in IMPLICIT, data=data, iterations=iterations))
        for phase in tree.get("phases", [])
    ]
    if model in IMPLICIT and iterations is not None:
        tree["model"] = merge(tree["model"], {"stopping": {"max_iterations": iterations}})
    if not tree["phases"]:
        del tree["phases"]
    tree = apply_overrides(Section(tree), [text for text in overrides if _concerns(model, text)])
    try:
        return validate(RunSpec, tree)
    except ValidationError as error:
        raise format_error(error, tree, source=base) from None


def _is_word_problem(data: DataSpec) -> bool:
    """Whether the data are a word problem, or a mixture of several."""
    if isinstance(data, MixtureSpec):
        return all(isinstance(source.data, WordProblemSpec) for source in data.sources)
    return isinstance(data, WordProblemSpec)


def _data(own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `data` section with changes, which apply to all sources of a mixture."""
    if "sources" not in own:
        changed: dict[str, Any] = merge(own, changes)
        return changed
    sources = [{**source, "data": merge(source["data"], changes)} for source in own["sources"]]
    return {**own, **{key: changes[key] for key in ("seq_len",) if key in changes}, "sources": sources}


def _width(tree: Mapping[str, Any], own: int, overrides: Sequence[str]) -> int:
    """Return the width of all models: the base spec's, or an override of it."""
    wider = [text for text in overrides if _keys(text) == _WIDTH]
    width = apply_overrides(Section(tree), wider)["model"]["d_model"] if wider else own
    if not isinstance(width, int) or width < 1:
        raise ValueError(f"model.d_model must be a positive integer, got {width!r}")
    return width


def _keys(override: str) -> list[str]:
    return override.partition("=")[0].strip().split(".")


def _concerns(model: str, override: str) -> bool:
    """Whether an override applies to this model: explicit models have no search and gradient."""
    keys = _keys(override)
    if keys == _WIDTH:
        return not model.startswith(BASELINE)
    if keys[0] == "phases":
        return model in IMPLICIT or keys[2:3] != ["model"]
    of_search = ImplicitLMSpec.model_fields.keys() - ExplicitLMSpec.model_fields.keys()
    return model in IMPLICIT or keys[0] != "model" or not of_search.intersection(keys[1:2])


def _model(own: Mapping[str, Any], name: str, *, layers: int, width: int) -> dict[str, Any]:
    """Return the `model` section of a named model."""
    if name.startswith(BASELINE):
        return {"kind": "transformers", **_baseline(name.removeprefix(BASELINE), own, layers, width)}
    changes: dict[str, Any] = {"n_layers": layers}
    if name.endswith("llama"):
        changes["mixer"] = {"kind": "attention", "n_heads": max(1, width // 64)}
        changes["mlp"] = {"kind": "swiglu", "d_ff": int(2 / 3 * 4 * width)}
    model: dict[str, Any] = merge(own, changes)
    if name in IMPLICIT:
        return model
    kept = {key: value for key, value in model.items() if key in ExplicitLMSpec.model_fields}
    # An explicit layer must keep the state itself, so its heads need the default slow decay.
    mixer = {key: value for key, value in kept["mixer"].items() if key not in _DECAY_FIELDS}
    return {**kept, "mixer": mixer, "kind": "explicit_lm"}


def _baseline(architecture: str, own: Mapping[str, Any], layers: int, width: int) -> dict[str, Any]:
    """Return a baseline's architecture and configuration, with the sizes of the base spec's model."""
    mixer = own.get("mixer", {})
    expand, head, state = mixer.get("expand", 2), mixer.get("head_dim", 64), mixer.get("d_state", 128)
    heads = max(1, width // 64)
    known: dict[str, dict[str, Any]] = {
        "llama": {
            "intermediate_size": int(2 / 3 * 4 * width),
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        },
        "mamba2": {
            "state_size": state,
            "expand": expand,
            "head_dim": head,
            "num_heads": expand * width // head,
            "n_groups": 1,
            "chunk_size": 32,
        },
        "mamba": {"state_size": 16, "expand": expand},
        "gpt_neox": {"intermediate_size": 4 * width, "num_attention_heads": heads},
    }
    own_fields = known.get(architecture) or _usual_fields(architecture, width, heads)
    config = {"hidden_size": width, "num_hidden_layers": layers, **own_fields}
    vocabulary = {"vocab_size": own["vocab_size"]} if "vocab_size" in own else {}
    return {"architecture": architecture, "config": config, **vocabulary}


def _usual_fields(architecture: str, width: int, heads: int) -> dict[str, Any]:
    """Return the fields that fit an architecture's heads and MLP to a width, where it has them."""
    from trainer.baselines.transformers_model import config_fields  # torch and transformers

    wanted = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
        "intermediate_size": 4 * width,
        "ffn_dim": 4 * width,
    }
    known = config_fields(architecture)
    return {name: value for name, value in wanted.items() if name in known}


def _phase(
    phase: Mapping[str, Any], *, implicit: bool, data: Mapping[str, Any], iterations: int | None
) -> dict[str, Any]:
    """Return a phase adapted to another model, other data, or fewer iterations."""
    changed = {key: value for key, value in phase.items() if key != "model" or implicit}
    own = dict(phase.get("data", {}))
    if "seq_len" in own and "seq_len" in data:
        own["seq_len"] = min(own["seq_len"], data["seq_len"])
    if "identity_probability" in data:
        own.pop("identity_probability", None)
    if own or "data" in changed:
        changed["data"] = own
    if implicit and iterations is not None and "model" in changed:
        model = dict(changed["model"])
        for section, key in (("stopping", "max_iterations"), ("gradient", "steps")):
            inner = dict(model.get(section, {}))
            if key in inner and (section == "stopping" or inner.get("kind") == "unrolled"):
                model[section] = {**inner, key: min(inner[key], iterations)}
        changed["model"] = model
    return changed


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
