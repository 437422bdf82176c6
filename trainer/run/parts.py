"""The components of a run (callbacks, data, model), built from its spec and laid out over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from implicit_blocks import registry
from implicit_blocks.registry.contracts import require
from trainer.callbacks import Callbacks
from trainer.checkpoint.rng import seed_everything
from trainer.data.source import DataSource, EvaluationSet
from trainer.distributed import Layout, Ranks, lay_out
from trainer.run.init_from import Origin, read_start
from trainer.run.trainable_model import (
    CapturesGraphs,
    CheckpointsActivations,
    ChecksInputs,
    CompilesLayers,
    QuantizesSearch,
)
from trainer.specs.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The components of a run that do not depend on its layout; the model is on the CPU.

    ``sources`` holds the data of each phase; phases with equal data specs share one object.
    """

    callbacks: Callbacks
    sources: Sequence[DataSource]
    evaluation_sets: Mapping[str, EvaluationSet]
    model: nn.Module


def make_parts(spec: RunSpec, *, origin: Origin | None, processes: int) -> Parts:
    """Build the components that ``spec`` describes, with the weights of ``origin`` if given.

    The result is the same on every rank.

    Raises:
        ValueError: a component cannot be built, the processes cannot share a batch equally, or the model
            lacks a capability that the spec asks for.

    """
    spec.require_shares(processes)
    seed_everything(spec.training.seed)
    callbacks = Callbacks.build(spec.callbacks)
    own, *sources = _sources(spec)
    sets = own.evaluation_sets(spec.evaluation.at(spec.data.seq_len))
    require(
        isinstance(sets, Mapping) and all(isinstance(each, EvaluationSet) for each in sets.values()),
        own,
        "evaluation sets",
        f"evaluation_sets returned a {type(sets).__name__}; return a dict of EvaluationSets by name",
    )
    # The model is built on the CPU and then moved: initial weights depend on neither device nor layout.
    seed_everything(spec.training.seed)
    model = _model(spec)
    if origin is not None:
        like = model.state_dict()
        model.load_state_dict(read_start(origin, spec.model, like=like))
    return Parts(callbacks=callbacks, sources=sources, evaluation_sets=sets, model=model)


def lay_out_model(spec: RunSpec, model: nn.Module, ranks: Ranks) -> Layout:
    """Lay the model out over the ranks; switch on CUDA graphs where the spec asks and the layout allows it.

    Raises:
        ValueError: these ranks or this model do not support the layout, the model does not support CUDA
            graphs, or the layout no searches in 8-bit floats.

    """
    training = spec.training
    layout = lay_out(model, training.distributed, ranks, phases=[phase.model for phase in spec.phase_specs()])
    if training.cuda_graphs and ranks.device.type == "cuda" and layout.resolved.kind in ("none", "ddp"):
        if not isinstance(model, CapturesGraphs):
            raise _unsupported(spec, "capture_graphs", "training.cuda_graphs=false")
        model.capture_graphs()
    if training.search_dtype is not None and (kind := layout.resolved.kind) not in ("none", "ddp"):
        raise ValueError(
            f"training.search_dtype is {training.search_dtype}, which needs whole weights on every rank, and "
            f"{kind} divides them; set training.search_dtype=null, or training.distributed.kind=ddp"
        )
    return layout


def _sources(spec: RunSpec) -> list[DataSource]:
    """Return the run's own data, then those of each phase; equal specs share one source."""
    seed, vocab_size = spec.training.seed, getattr(spec.model, "vocab_size", None)  # plugins may have none
    read = [(each.model_dump_json(), each) for each in (spec.data, *(p.data for p in spec.phase_specs()))]
    made = {key: registry.build(each, seed=seed, vocab_size=vocab_size) for key, each in dict(read).items()}
    return [made[key] for key, _ in read]


def _model(spec: RunSpec) -> nn.Module:
    """Build the model and refuse missing capabilities before anything is written."""
    model: nn.Module = registry.build(spec.model)
    data = [spec.data, *(phase.data for phase in spec.phase_specs())]
    if isinstance(model, ChecksInputs):
        if any(getattr(each, "documents", "ignore") != "ignore" for each in data):
            model.require_documents_apart()
        lengths = [*(each.seq_len for each in data), *spec.evaluation.at(spec.data.seq_len).lengths]
        model.require_length(max(lengths))
    if spec.training.compile_layers:
        if not isinstance(model, CompilesLayers):
            raise _unsupported(spec, "compile_layers", "training.compile_layers=false")
        model.compile_layers()
    if spec.training.search_dtype is not None:
        if not isinstance(model, QuantizesSearch):
            raise _unsupported(spec, "quantize_search", "training.search_dtype=null")
        gradients = [getattr(phase.model, "gradient", model.gradient) for phase in spec.phase_specs()]
        if not any(gradient.searches for gradient in gradients):
            raise _unsupported(spec, "a search in any phase of this run", "training.search_dtype=null")
        model.quantize_search(getattr(torch, spec.training.search_dtype))
    checkpoints = any(phase.training.checkpoint_activations != "none" for phase in spec.phase_specs())
    if checkpoints and not isinstance(model, CheckpointsActivations):
        raise _unsupported(spec, "checkpoint_activations", "training.checkpoint_activations=none")
    return model


def _unsupported(spec: RunSpec, capability: str, remedy: str) -> ValueError:
    return ValueError(f"a model of kind {spec.model.kind!r} does not offer {capability}; set {remedy}")
