"""The work of each process of a distributed test; run as a program, with TASK in the environment."""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import trainer.run.build
from implicit_blocks.layers import Linear, RMSNorm
from implicit_blocks.parallel import collectives
from trainer.callbacks import Callback
from trainer.distributed import Ranks, join, leave
from trainer.reporting.metrics import read_metrics
from trainer.run.build import Run, build
from trainer.specs.run import RunSpec

TASK: dict[str, Any] = globals().get("TASK", {})


def hide_labels(run: Run) -> None:
    """Remove labels, so that sequences have unequal numbers of them; some have none."""
    batch = run.loop.active.data.batch

    def hidden(position: int, count: int) -> Any:
        made = batch(position, count)
        for row in range(count):
            made.labels[row, (position + row) % made.labels.shape[1] + 1 :] = -100
            if (position + row) % 8 in (2, 3):
                made.labels[row] = -100
        return made

    run.loop.active.data.batch = hidden  # type: ignore[method-assign]  # of this object alone


def watch_types(run: Run) -> dict[str, set[torch.dtype]]:
    """Return sets that collect the dtypes of weights, gradients and the layers' products."""
    weights = {parameter.dtype for parameter in run.model.parameters()}
    types: dict[str, set[torch.dtype]] = {"weights": weights, "gradients": set(), "products": set()}
    types["decays_and_norms"] = set()
    update = run.loop.optimizer.step

    def step(*arguments: Any, **keywords: Any) -> Any:
        types["gradients"] |= {p.grad.dtype for p in run.model.parameters() if p.grad is not None}
        return update(*arguments, **keywords)

    run.loop.optimizer.step = step  # type: ignore[method-assign]  # of this object alone
    for module in run.model.modules():
        if isinstance(module, Linear):
            module.register_forward_hook(lambda module, _, output: types["products"].add(output.dtype))
        for name in ("A_log", "dt_bias", "D"):
            if hasattr(module, name):
                module.register_forward_pre_hook(
                    lambda module, _, name=name: types["decays_and_norms"].add(getattr(module, name).dtype)
                )
        if isinstance(module, RMSNorm):
            module.register_forward_pre_hook(
                lambda module, _: types["decays_and_norms"].add(module.weight.dtype)
            )
    return types


def train(spec: dict[str, Any], folder: str, *, ranks: Ranks | None = None, hide: bool = False) -> Any:
    """Train a run; return its rows, its evaluations, and how often this process called a layer."""
    run = build(RunSpec.model_validate(spec), output=Path(folder), device="cpu", ranks=ranks)
    calls: list[bool] = []
    model: Any = run.model
    blocks = model.backbone.blocks() if hasattr(model, "backbone") else [model]
    blocks[0].register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    types = watch_types(run)
    if hide:
        hide_labels(run)
    run.train()
    return {
        "rows": list(read_metrics(Path(folder) / "metrics.jsonl")),
        "evaluations": list(read_metrics(Path(folder) / "evaluations.jsonl")),
        "calls": len(calls),
        "types": {name: sorted(str(kind).removeprefix("torch.") for kind in types[name]) for name in types},
        "layout": run.loop.layout.resolved.kind,
        "shards": [tuple(p.to_local().shape) for p in run.model.parameters() if hasattr(p, "to_local")],
    }


def train_each(ranks: Ranks, runs: dict[str, Any], folder: str, hide: bool = False) -> Any:
    return {
        name: train(spec, f"{folder}/{name}", ranks=ranks, hide=hide) for name, spec in sorted(runs.items())
    }


class Collectives(TorchDispatchMode):
    """Counts the calls of PyTorch's distributed operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def train_each_compiled(ranks: Ranks, runs: dict[str, Any], folder: str) -> Any:
    """Train with compiled layers: the compiler traces and differentiates, but generates no kernels."""
    compiled = torch.nn.Module.compile

    def without_kernels(self: Any, **options: Any) -> None:
        compiled(self, backend="aot_eager", **options)

    torch.nn.Module.compile = without_kernels  # type: ignore[method-assign]  # of this process
    return train_each(ranks, runs, folder)


def train_in_turns(ranks: Ranks, turns: list[tuple[int, dict[str, Any]]], folder: str) -> Any:
    """Train one run in one layout after the other, each resumed from the last; return its rows."""
    for number, (stop_at, spec) in enumerate(turns):
        run = build(
            RunSpec.model_validate(spec), output=Path(folder), device="cpu", ranks=ranks, resume=number > 0
        )
        run.train(stop_at=stop_at)
    return list(read_metrics(Path(folder) / "metrics.jsonl"))


def save_again(ranks: Ranks, runs: dict[str, Any]) -> Any:
    """Load the last checkpoint of each run folder, and save it again as that of step 99."""
    for folder, spec in runs.items():
        run = build(RunSpec.model_validate(spec), output=Path(folder), device="cpu", ranks=ranks, resume=True)
        run.loop.checkpoints.save(replace(run.loop.progress, step=99), seconds=lambda: 0.0)
        run.loop.checkpoints.end()
        run.loop.active.close()
        run.folder.release()


def count_traffic(ranks: Ranks, runs: dict[str, Any], folder: str) -> Any:
    """Return for each run the parameters of this rank, and the bytes that its layers send in a step."""
    found = {}
    for name, spec in runs.items():
        run = build(RunSpec.model_validate(spec), output=Path(folder) / name, device="cpu", ranks=ranks)
        sent = [0.0]

        def counted(exchange: Any, share: float, sent: list[float] = sent) -> Any:
            def run_exchange(x: torch.Tensor, group: Any) -> torch.Tensor:
                sent[0] += share * x.numel() * x.element_size()
                received: torch.Tensor = exchange(x, group)
                return received

            return run_exchange

        size = ranks.world_size  # a ring sends these shares of the input
        shares = {"_sum": 2 * (size - 1) / size, "_gather": size - 1, "_scatter_sum": (size - 1) / size}
        with ExitStack() as patches:
            for exchange, share in shares.items():
                original = getattr(collectives, exchange)
                patches.enter_context(mock.patch.object(collectives, exchange, counted(original, share)))
            run.loop.evaluator.sets = {}
            run.train()
        found[name] = {"parameters": sum(p.numel() for p in run.model.parameters()), "sent": sent[0]}
    return found


def count_gathers(ranks: Ranks, runs: dict[str, Any], folder: str) -> Any:
    """Return how many times weights are gathered, and gradients scattered, in each step of each run."""
    gathers = {}
    for name, spec in sorted(runs.items()):
        run = build(RunSpec.model_validate(spec), output=Path(folder) / name, device="cpu", ranks=ranks)
        of_steps: list[tuple[int, int]] = []
        one_step = run.loop._one_step

        def counted(one_step: Any = one_step, of_steps: Any = of_steps) -> None:
            with Collectives() as collectives:
                one_step()
            counts = collectives.counts
            of_steps.append((counts["_allgather_base_"], counts["_reduce_scatter_base_"]))

        run.loop._one_step = counted  # type: ignore[method-assign]  # of this object alone
        run.train()
        gathers[name] = of_steps
    return gathers


def look_at_layouts(ranks: Ranks, runs: dict[str, Any], folder: str) -> Any:
    """Return for each run the gradient exchanges of a step, random numbers, and the types of the weights."""
    found: dict[str, Any] = {}
    for name, spec in sorted(runs.items()):
        run = build(RunSpec.model_validate(spec), output=Path(folder) / name, device="cpu", ranks=ranks)
        exchanges: list[int] = []
        if isinstance(run.loop.layout.forward, DistributedDataParallel):

            def exchange(_: None, bucket: Any, exchanges: list[int] = exchanges) -> Any:
                exchanges.append(bucket.index())
                group: Any = torch.distributed.group.WORLD
                return allreduce_hook(group, bucket)

            exchange.__annotations__.clear()  # torch reads them, and these are text
            run.loop.layout.forward.register_comm_hook(None, exchange)
        drawn = torch.rand(3).tolist()
        run.loop.run(stop_at=1)
        weight = next(run.model.parameters())
        with run.loop.layout.gathered():
            whole = next(run.model.parameters())
        found[name] = {
            "exchanges": exchanges,
            "drawn": drawn,
            "kept": type(weight).__name__,
            "gathered": type(whole).__name__,
            "then": type(next(run.model.parameters())).__name__,
        }
    return found


def build_it(ranks: Ranks, specs: list[dict[str, Any]], folder: str) -> Any:
    """Build the run of this rank's spec."""
    spec = RunSpec.model_validate(specs[ranks.rank % len(specs)])
    build(spec, output=Path(folder), device="cpu", ranks=ranks)


def build_in_own_folder(ranks: Ranks, spec: dict[str, Any], folders: list[str], folder: str) -> Any:
    """Build a run whose data have a different path on each rank, as on separate machines."""
    os.chdir(folders[ranks.rank])
    build(RunSpec.model_validate(spec), output=Path(folder), device="cpu", ranks=ranks)


def fail_on_one_rank(ranks: Ranks, spec: dict[str, Any], folder: str, what: str) -> Any:
    run = build(RunSpec.model_validate(spec), output=Path(folder), device="cpu", ranks=ranks)
    if what == "data" and ranks.rank == 1:

        def broken(position: int, count: int) -> Any:
            raise ValueError(f"no token at {position}")

        run.loop.active.data.batch = broken  # type: ignore[method-assign]  # of this object alone
    if what == "crash" and ranks.rank == 1:

        def crash(*_: Any) -> None:
            if run.loop.progress.step == 1:
                raise RuntimeError("a broken layer")

        model: Any = run.model
        model.backbone.blocks()[0].register_forward_pre_hook(crash)
    if what == "callback" and ranks.rank == 1:
        from trainer.specs.callbacks import CallbackSpec

        class Broken(Callback):
            def on_step(self, run: Any, *, row: Any) -> None:
                raise OSError("no room")

        class BrokenSpec(CallbackSpec):
            kind: str = "test.broken"

        from implicit_blocks import registry

        class Entry:
            owner, version = "test", "1"

        found = registry.entry

        def entry(family: str, kind: str) -> Any:
            return Entry if kind == "test.broken" else found(family, kind)

        registry.entry = entry
        run.loop.callbacks._members.append((BrokenSpec(), Broken()))
    if what == "signal" and ranks.rank == 1:
        import signal

        one_step = run.loop._one_step

        def interrupted() -> None:
            one_step()
            if run.loop.progress.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        run.loop._one_step = interrupted  # type: ignore[method-assign]  # of this object alone
        assert run.train() is None
        return run.loop.progress.step
    return None if run.train() is None and what != "signal" else run.loop.progress.step


def interrupt_evaluation(ranks: Ranks, spec: dict[str, Any], folder: str, at: int) -> Any:
    """Send the last rank a signal while it evaluates its first batch after step ``at``."""
    import signal

    run = build(RunSpec.model_validate(spec), output=Path(folder), device="cpu", ranks=ranks)
    calls: list[int] = []

    def watch(module: Any, *_: Any) -> None:
        if not module.training:
            calls.append(run.loop.progress.step)
            if run.loop.progress.step == at and calls.count(at) == 1 and ranks.rank == ranks.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    run.model.register_forward_pre_hook(watch)
    summary = run.train()
    return {
        "finished": summary is not None,
        "signal": run.loop.stopped_by,
        "step": run.loop.progress.step,
        "calls": calls.count(at),
    }


def export_plainly(ranks: Ranks, spec: dict[str, Any], folder: str) -> Any:
    """Train a run that exports its model without transformers, whose import takes seconds."""
    from trainer.checkpoint import export as exporting

    exporting._write_for_transformers = lambda *arguments: False
    build(RunSpec.model_validate(spec), output=Path(folder), device="cpu", ranks=ranks).train()


def save_kept_copies(ranks: Ranks, kinds: list[str], folder: str) -> Any:
    """Save three times with reused host copies, as on a GPU, and load in another order, for each layout."""
    return {kind: _save_kept_copies(ranks, kind, f"{folder}/{kind}") for kind in kinds}


def _save_kept_copies(ranks: Ranks, kind: str, folder: str) -> tuple[list[bool], list[int]]:
    from implicit_blocks import registry
    from implicit_blocks.specs import load_spec
    from trainer.checkpoint import staging as checkpoint_staging
    from trainer.checkpoint.folder import TrainingProgress
    from trainer.checkpoint.load import load_checkpoint
    from trainer.checkpoint.writer import Checkpointer
    from trainer.distributed import lay_out
    from trainer.optim.optimizers import optimizer_state
    from trainer.specs.distributed import DistributedSpec

    checkpoint_staging._lock = lambda memory: False  # there is no GPU to lock pages for
    spec: Any = load_spec("word_problem_s3", ["model.d_model=16", "model.mixer.head_dim=8"])
    torch.manual_seed(0)
    model = registry.build(spec.model)
    lay_out(model, DistributedSpec.model_validate({"kind": kind, "shard_size": 1}), ranks)
    optimizer = registry.build(spec.training.optimizer, model=model)
    checkpointer = Checkpointer(
        Path(folder), model=model, optimizer=optimizer, spec_digest="", keep=3, ranks=ranks
    )
    checkpointer._staging = checkpoint_staging.Staging(torch.device("cuda"))

    def values() -> dict[str, Any]:
        every = {**dict(model.named_parameters()), **optimizer_state(optimizer, model)[0]}
        return {name: getattr(t, "full_tensor", lambda t=t: t)().clone() for name, t in every.items()}

    saved = {}
    for step in (1, 2, 3):
        for parameter in model.parameters():  # at the first step some have no moments yet
            given = step > 1 or parameter.numel() > 32
            parameter.grad = torch.full_like(parameter, step) if given else None
        optimizer.step()
        saved[step] = values()
        checkpointer.save(TrainingProgress(step=step))
        checkpointer.wait()
    same = []
    for step in (3, 1, 2):
        load_checkpoint(Path(folder) / f"step-{step:08d}", model=model, optimizer=optimizer, ranks=ranks)
        now = values()
        same.append(
            now.keys() == saved[step].keys()
            and all(torch.equal(now[name], saved[step][name]) for name in now)
        )
    sizes = [path.stat().st_size for path in (Path(folder) / "step-00000003").glob("*.distcp")]
    return same, sizes


def evaluate_tasks(ranks: Ranks, requests: list[list[str]]) -> Any:
    """Return the exit code of each request, and how often this process announces files."""
    from trainer.evaluation.command import main as evaluate

    found = []
    for arguments in requests:
        printed = io.StringIO()
        with mock.patch("trainer.distributed.leave"), redirect_stdout(printed):  # the scenario leaves
            found.append((evaluate(arguments), printed.getvalue().count("written:")))
    return found


def talk(ranks: Ranks) -> Any:
    """Return the results of all collective operations of the ranks."""
    ranks.barrier()
    return {
        "sum": ranks.sum([1.0, ranks.rank]),
        "max": ranks.max([ranks.rank, -ranks.rank]),
        "any": ranks.any(ranks.rank == 1),
        "all": ranks.all(ranks.rank == 1),
        "gather": ranks.gather([ranks.rank, 0.5]),
        "objects": ranks.gather_objects({"rank": ranks.rank}),
        "broadcast": ranks.broadcast(f"of rank {ranks.rank}"),
        "run_on_rank0": ranks.run_on_rank0(lambda: f"of rank {ranks.rank}"),
        "run_all": ranks.run_all(lambda: ranks.rank),
    }


def fail_on_rank0(ranks: Ranks) -> Any:
    def act() -> None:
        raise ValueError("the folder is taken")

    ranks.run_on_rank0(act)


def main() -> None:
    os.environ.update(TASK["environment"])
    setattr(trainer.run.build, "draw", lambda runs, path: None)  # noqa: B010  # pictures take longer than the runs
    torch.set_num_threads(1)
    result: Any
    try:
        ranks = join("cpu", timeout_minutes=1.0)
        result = globals()[TASK["scenario"]](ranks, **TASK["arguments"])
        ranks.barrier()
        leave()
    except Exception as error:
        import traceback

        traceback.print_exc()
        result = (type(error).__name__, str(error))
    Path(TASK["result"]).write_bytes(pickle.dumps(result))


if TASK:
    main()
