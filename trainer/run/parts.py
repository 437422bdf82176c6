"""What a run is made of: its callbacks, data and model, built from its spec and laid out over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from implicit_blocks import registry
from implicit_blocks.registry.contracts import require
from trainer.callbacks import Callbacks
from trainer.checkpoint.rng import seed_everything
from trainer.data.source import DataSource, EvaluationSet
from trainer.distributed import Layout, Ranks, lay_out
from trainer.run.init_from import Origin, read_start
from trainer.specs.run import RunSpec


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a run that don't depend on how it is laid out; the model is on the CPU.

    ``sources`` are the data of each phase, the same object where they are the same.
    """

    callbacks: Callbacks
    sources: Sequence[DataSource]
    evaluation_sets: Mapping[str, EvaluationSet]
    model: nn.Module


def make_parts(spec: RunSpec, *, origin: Origin | None, processes: int) -> Parts:
    """Build what ``spec`` describes, with the weights of ``origin`` where there is one; every rank the same.

    Raises:
        ValueError: something can't be built, the processes can't share a batch, or the model lacks what the
            training or the data ask for.

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
        f"evaluation_sets returned a {type(sets).__name__}; return a dict of EvaluationSets by their names",
    )
    # Built on the CPU and moved, so that the initial weights depend on neither device nor layout.
    seed_everything(spec.training.seed)
    model = _model(spec)
    if origin is not None:
        like = model.state_dict()
        model.load_state_dict(read_start(origin, spec.model, like=like))
    return Parts(callbacks=callbacks, sources=sources, evaluation_sets=sets, model=model)


def lay_out_model(spec: RunSpec, model: nn.Module, ranks: Ranks) -> Layout:
    """Lay the model out over the ranks; its work is captured as CUDA graphs where spec and layout have it so.

    Raises:
        ValueError: a layout that these ranks or this model can't have, or a model that records no graphs.

    """
    training = spec.training
    layout = lay_out(model, training.distributed, ranks, phases=[phase.model for phase in spec.phase_specs()])
    if training.cuda_graphs and ranks.device.type == "cuda" and layout.kind in ("none", "ddp"):
        _method(model, spec, "capture_graphs", "training.cuda_graphs=false")()
    return layout


def _sources(spec: RunSpec) -> list[DataSource]:
    """Return the run's own data and those of each phase; equal specs share one source."""
    vocab_size = getattr(spec.model, "vocab_size", None)
    read = [spec.data, *(phase.data for phase in spec.phase_specs())]
    made: dict[str, DataSource] = {}
    for each in read:
        if (key := each.model_dump_json()) not in made:
            made[key] = registry.build(each, seed=spec.training.seed, vocab_size=vocab_size)
    return [made[each.model_dump_json()] for each in read]


def _model(spec: RunSpec) -> nn.Module:
    """Build the model, and refuse what it doesn't offer while nothing has been made yet."""
    model: nn.Module = registry.build(spec.model)
    # The library's models keep documents apart, at any length; others may have to refuse, before anything is
    # made.
    data = [spec.data, *(phase.data for phase in spec.phase_specs())]
    if any(getattr(each, "documents", "ignore") != "ignore" for each in data):
        getattr(model, "require_documents_apart", lambda: None)()
    lengths = [*(each.seq_len for each in data), *spec.evaluation.at(spec.data.seq_len).lengths]
    getattr(model, "require_length", lambda length: None)(max(lengths))
    if spec.training.compile_layers:
        _method(model, spec, "compile_layers", "training.compile_layers=false")()
    if any(phase.training.checkpoint_activations != "none" for phase in spec.phase_specs()):
        _method(model, spec, "checkpoint_activations", "training.checkpoint_activations=none")
    return model


def _method(model: nn.Module, spec: RunSpec, name: str, instead: str) -> Callable[..., None]:
    """Return what a model offers for a setting of training, or refuse the setting."""
    found: Callable[..., None] | None = getattr(model, name, None)
    if found is None:
        raise ValueError(f"a model of kind {spec.model.kind!r} does not offer {name}; set {instead}")
    return found
