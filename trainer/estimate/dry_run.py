"""Dry run: sizes, operations, memory, phases and data of a run from its spec alone. Imports no torch."""

from __future__ import annotations

from implicit_blocks.describing.equations import loops_of
from implicit_blocks.gradients import LastLoopsSpec
from implicit_blocks.models.counting import count_flops, count_parameters, training_flops_per_token
from implicit_blocks.specs import ImplicitLMSpec, ModelSpec
from trainer.data.token_folder import check_tokens, open_tokens, validation_folder
from trainer.estimate.division import estimate_communication
from trainer.estimate.memory import GPU_BYTES, decoding_state, estimate_memory, resolve_layout
from trainer.reporting.display import duration, magnitude
from trainer.run.init_from import find_start
from trainer.run.length import resolve_epochs
from trainer.specs.data import DataSpec, MixtureSpec, StreamSpec, TokensSpec
from trainer.specs.run import Phase, RunSpec


def dry_run_report(spec: RunSpec, *, name: str, ranks: int = 1, rate: str | None = None) -> str:
    """Return a readable report of a run's cost.

    Args:
        spec: the run.
        name: name of the run.
        ranks: number of processes, one GPU each.
        rate: measured throughput of the whole run in tokens per second: a number, or one per phase, such as
            ``bounded=20000,free=9000``.

    Raises:
        ValueError: the data cannot be read, an evaluation is longer than the held-out text, the layout is
            impossible with these ranks, or a rate is not a positive number or lacks a phase.

    """
    epochs, spec = spec.training.epochs, resolve_epochs(spec)
    training, phases, tokens = spec.training, spec.phase_specs(), spec.total_tokens
    sequences, vocab_size = spec.total_sequences, getattr(spec.model, "vocab_size", None)
    spec.require_shares(ranks)
    batches = {(p.training.batch_size, p.training.sequences_at_once, p.data.seq_len) for p in phases}
    one_batch = len(batches) == 1
    lines = [
        f"{name} ({spec.model.kind})",
        *_section("parameters", _parameters(spec.model)),
        *_section("data", spec.data.describe(sequences=sequences, vocab_size=vocab_size)),
        *_section(
            "training",
            [
                f"{spec.total_steps:,} steps of {_batch(phases[0]) if one_batch else 'batches by phase'}, "
                f"{magnitude(tokens)} tokens in total{'' if epochs is None else f' ({epochs:g} epochs)'}",
                *([_micro_batches(phases[0], ranks)] if one_batch else []),
                f"{training.precision}, {getattr(training.optimizer, 'path', training.optimizer.kind)}, "
                f"{training.schedule.kind}{_average(spec)}",
            ],
        ),
        *_section("start", _start(spec)),
        *_section("ranks", _ranks(spec, ranks)),
    ]
    rates = _rates(rate, [phase.name for phase in phases])
    total: float | None = 0.0
    seconds = 0.0
    for phase in phases:
        described, flops = _phase(spec, phase, ranks)
        if not one_batch:
            described.insert(1, f"{_batch(phase)}, {_micro_batches(phase, ranks)}")
        if phase.data != spec.data:
            described[1:1] = phase.data.describe(sequences=_sequences(phase), vocab_size=vocab_size)
        if phase.name in rates:
            phase_seconds = _sequences(phase) * phase.data.seq_len / rates[phase.name]
            described.append(f"{duration(phase_seconds)} at {rates[phase.name]:,.0f} tokens/s")
            seconds += phase_seconds
        lines += _section(f"phase {phase.name}", described)
        total = None if total is None or flops is None else total + flops
    bounds = [_bound(phase.model) for phase in phases]
    bound = next((one for one in ("at most ", "on average ") if one in bounds), "")
    whole = ["unknown" if total is None else f"{bound}{_scaled(total)}FLOP"]
    if rates:
        whole.append(f"{duration(seconds)} for {magnitude(tokens)} tokens")
    lines += _section("whole run", whole)
    lengths, most = spec.evaluation.at(spec.data.seq_len).lengths, spec.evaluation.sequences
    held_out = _held_out_tokens(spec.data, length=max(lengths), vocab_size=vocab_size)
    counts = [most if held_out is None else min(most, (held_out - 1) // length) for length in lengths]
    few = "at most " if held_out is None and (spec.data.finite or isinstance(spec.data, MixtureSpec)) else ""
    numbers = few + ", ".join(map(str, counts if min(counts) < most else counts[:1]))
    evaluated = f"lengths {', '.join(map(str, lengths))}"
    if spec.evaluation.identity_probabilities:
        evaluated += f"; p {', '.join(f'{p:g}' for p in spec.evaluation.identity_probabilities)}"
    lines += _section("evaluation", [f"{evaluated}; {numbers} sequences each", *_evaluation_search(spec)])
    lines += _section("decoding", _decoding(spec))
    return "\n".join(lines)


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"  {title if number == 0 else '':<16}{line}" for number, line in enumerate(lines)]


def _held_out_tokens(data: DataSpec, *, length: int, vocab_size: int | None) -> int | None:
    """Return the number of held-out tokens, if known; reject too few for this length, as the run does."""
    for source in data.sources if isinstance(data, MixtureSpec) else ():
        _held_out_tokens(source.data, length=length, vocab_size=vocab_size)
    if isinstance(data, TokensSpec | StreamSpec):
        path = data.path if isinstance(data, TokensSpec) else data.validation_path
        held_out = None if path is None else validation_folder(path, data.validation_path)
        if held_out is not None:
            tokens = open_tokens(held_out, dtype=getattr(data, "dtype", None))
            check_tokens(tokens, length=length, vocab_size=vocab_size, documents=data.documents)
            return tokens.tokens
    return None


def _parameters(model: ModelSpec) -> list[str]:
    counts = count_parameters(model)
    if counts is None:
        number = model.parameter_total()
        return ["unknown: not declared by the model's spec" if number is None else f"{number:,}"]
    looped = counts.prelude != 0 or counts.coda != 0
    named = (
        ("embedding", counts.embedding),
        ("head", counts.head),
        ("prelude", counts.prelude),
        ("core" if looped else "layers", counts.backbone),
        ("projection", counts.projection),
        ("coda", counts.coda),
        ("injection", counts.injection),
        ("start", counts.start),
        ("exit gate", counts.exit_gate),
        ("weight norm's gains", counts.gains),
    )
    parts = [f"{label} {'unknown' if n is None else magnitude(n)}" for label, n in named if n != 0]
    total = "unknown" if counts.total is None else f"{counts.total:,}"
    return [f"{total}: {', '.join(parts)}"]


def _sequences(phase: Phase) -> int:
    return (phase.last_step - phase.first_step) * phase.training.batch_size


def _batch(phase: Phase) -> str:
    size, length = phase.training.batch_size, phase.data.seq_len
    return f"{size:,} x {length:,} = {size * length:,} tokens"


def _micro_batches(phase: Phase, ranks: int) -> str:
    """Return the size of a forward pass, and how many of them accumulate the gradient of a step."""
    shares, length = phase.training.distributed.batch_shares(ranks), phase.data.seq_len
    share = phase.training.share(shares)
    size = min(phase.training.sequences_at_once, share)
    count, last = -(-share // size), share % size
    text = f"micro-batches of {size:,} x {length:,} = {size * length:,} tokens, "
    text += "1 per step" if count == 1 else f"gradients accumulated over {count:,} per step"
    text += f" (the last of {last:,} sequences)" if last else ""
    return text if ranks == 1 else f"{text} on each of {ranks} ranks"


def _average(spec: RunSpec) -> str:
    ema = spec.training.ema
    if ema is None:
        return ""
    start = f" after {spec.ema_start:,} steps" if spec.ema_start else ""
    first = ema.decay ** (spec.total_steps - spec.ema_start - 1)
    short = f"; {first:.0%} of it are its first weights, lower training.ema.decay" if first > 0.1 else ""
    return f", average of the weights (decay {ema.decay:g}){start}{short}"


def _start(spec: RunSpec) -> list[str]:
    """Return the source of the initial weights; empty for random initialization."""
    start = spec.training.init_from
    if start is None:
        return []
    origin = find_start(start, spec)
    lines = [f"WARNING: {complaint}" for complaint in origin.complaints]
    suffix = "" if origin.progress is None else f" after {origin.progress['tokens']:,} tokens"
    loaded = [name for name in ("optimizer", "position") if getattr(start, name)]
    return [*lines, f"{' and '.join(['weights', *loaded])} of {origin.path}{suffix}"]


def _ranks(spec: RunSpec, ranks: int) -> list[str]:
    if ranks == 1:
        return ["1 (--ranks N for more)"]
    resolved = resolve_layout(spec, ranks)
    if resolved is None:
        return [f"{ranks}, unknown layout: it depends on the model's size"]
    whole = {
        "none": "each with the full state of its part",
        "ddp": "each with the full state",
        "fsdp": f"each with 1/{resolved.shards} of the state",
        "hsdp": f"in groups of {resolved.shards}, each rank with 1/{resolved.shards} of the state",
    }
    assumed = (
        f" (auto, for GPUs of {GPU_BYTES / 1e9:.0f} GB)" if spec.training.distributed.kind == "auto" else ""
    )
    divided = [
        *([f"{resolved.tensor} ranks divide heads"] if resolved.tensor > 1 else []),
        *([f"{resolved.context} ranks divide sequences"] if resolved.context > 1 else []),
    ]
    return [f"{ranks}, {resolved.kind}{assumed}: {', '.join([whole[resolved.kind], *divided])}"]


def _rates(text: str | None, phases: list[str]) -> dict[str, float]:
    """Return the throughput of each phase in tokens per second."""
    if text is None:
        return {}
    entries = [entry.rpartition("=") for entry in text.split(",")]
    try:
        rates = {phase.strip(): float(number) for phase, _, number in entries}
    except ValueError:
        rates = {}
    if not rates or min(rates.values()) <= 0:
        raise ValueError(
            f"--rate must be a positive number of tokens per second, such as 20000; got {text!r}"
        )
    if set(rates) == {""}:
        return dict.fromkeys(phases, rates[""])
    if set(rates) != set(phases):
        raise ValueError(
            f"--rate must name each phase once, got {text!r}; use "
            f"{','.join(f'{phase}=20000' for phase in phases)}"
        )
    return rates


def _phase(spec: RunSpec, phase: Phase, ranks: int) -> tuple[list[str], float | None]:
    lines = [f"steps {phase.first_step + 1:,} to {phase.last_step:,}, {_search(phase.model)}"]
    length = phase.data.seq_len
    flops = training_flops_per_token(phase.model, length=length)
    forward = count_flops(phase.model, length=length)
    if flops is None or forward is None or forward.layers is None:
        lines.append("FLOP per token: unknown, a component does not declare its cost")
        return lines, None
    bound = _bound(phase.model)
    cost = f"{bound}{_scaled(flops)}FLOP per token"
    least = training_flops_per_token(phase.model, length=length, iterations=1)
    if bound == "at most " and least is not None:
        cost = f"{_scaled(least)}FLOP per token with one iteration, {bound}{_scaled(flops)}FLOP"
    each = f"{_scaled(forward.layers)}FLOP per pass through the "
    if not (forward.prelude or forward.coda):
        lines.append(f"{cost} ({each}layers)")
    else:
        once = (forward.prelude or 0.0) + (forward.coda or 0.0)
        lines.append(f"{cost} ({each}core, {_scaled(once)}FLOP through prelude and coda)")
    whole = flops * _sequences(phase) * length
    lines.append(f"{bound}{_scaled(whole)}FLOP in total")
    memory = estimate_memory(spec, phase, ranks=ranks)
    if memory is not None:
        parts = ", ".join(f"{name} {_bytes(size)}" for name, size in memory.parts().items())
        again = phase.training.checkpoint_activations
        computed = "" if again == "none" else f"; {again} recomputed in backward"
        each = "" if ranks == 1 else " per rank"
        lines.append(f"memory about {_bytes(memory.total)}{each}: {parts}{computed}")
    resolved = resolve_layout(spec, ranks)
    sent = None if resolved is None else estimate_communication(phase, resolved, ranks=ranks)
    if sent is not None and sent.total:
        parts = ", ".join(f"{name} {_bytes(size)}" for name, size in sent.parts().items())
        lines.append(f"each rank sends {bound}{_bytes(sent.total)} per step: {parts}")
    return lines, whole


def _bound(model: ModelSpec) -> str:
    """Return whether a cost is the largest one, the mean, or (empty) exact."""
    if not isinstance(model, ImplicitLMSpec):
        return ""
    if (mean := model.depth.expected_loops()) is not None:
        return "" if mean == model.depth.maximum_loops() else "on average "
    return "at most " if model.gradient.searches else ""


def _search(model: ModelSpec) -> str:
    """Return a description of the search, with the paper's (s+k) where it applies."""
    if not isinstance(model, ImplicitLMSpec):
        return "one pass through the layers"
    gradient, stopping = model.gradient, model.stopping
    loops = loops_of(model)
    if isinstance(gradient, LastLoopsSpec):
        last = "all loops" if gradient.loops is None else f"the last {gradient.loops}"
        return f"core: {loops}, gradient of {last}"
    if loops is not None:
        return f"core: {loops} with {model.solver.kind}, {gradient.kind} gradient"
    steps = getattr(
        getattr(gradient, "gradient", gradient), "steps", None
    )  # a penalty wraps another gradient
    if gradient.kind == "unrolled":
        return f"{steps} updates of {model.solver.kind}, unrolled"
    budget = f"({stopping.max_iterations}+{steps})" if steps is not None else f"({stopping.max_iterations})"
    return (
        f"{budget}: {model.solver.kind} to a residual of {stopping.tolerance:g} ({stopping.norm}), "
        f"{gradient.kind} gradient"
    )


def _evaluation_search(spec: RunSpec) -> list[str]:
    """Return a description of the evaluation search, which has its own solver."""
    model = spec.final_model
    if not isinstance(model, ImplicitLMSpec):
        return []
    solver, stopping, leaves = model.at_evaluation.solver, model.evaluation_stopping, model.at_evaluation.exit
    if (fixed := model.at_evaluation.fixed_loops) is not None:
        return [f"{fixed} loops of the core: model.at_evaluation.exit"]
    damping = getattr(solver, "damping", 1.0)
    damped = "" if damping == 1 else f", damping {damping:g}"
    until = f"to a residual of {stopping.tolerance:g} ({stopping.norm})"
    if leaves.kind != "residual":
        until = f"until exit criterion {leaves.kind}"
    return [
        f"{solver.kind}{damped}, {until}, at most {stopping.max_iterations} iterations: model.at_evaluation"
    ]


def _decoding(spec: RunSpec) -> list[str]:
    """Return the memory of a sequence's state in decoding; empty if a mixer does not declare it."""
    model, tokens = spec.final_model, spec.data.seq_len
    size = decoding_state(model, tokens=tokens)
    if size is None:
        return []
    loops = model.state_loops if isinstance(model, ImplicitLMSpec) else 1
    kept = "" if loops == 1 else f", one state of the core for each of {loops} loops"
    return [f"state of a sequence after {tokens:,} tokens {_bytes(size)} (float32{kept})"]


def _scaled(value: float) -> str:
    """Return a number with a metric prefix for a unit: ``4.5 G``, ``950``."""
    for suffix in ("", " k", " M", " G", " T", " P", " E"):
        if value < 1000:
            return f"{value:.0f} " if suffix == "" else f"{value:.3g}{suffix}"
        value /= 1000
    return f"{value:.3g} Z"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"
