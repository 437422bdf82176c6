"""Duration of checkpoints: blocking copies, writing and reading.

    python benchmarks/checkpointing.py [--specs llama_1.3b_bounded] [--copies pinned plain] [--saves 3]
    torchrun --nproc-per-node 4 benchmarks/checkpointing.py --layout fsdp

Uses the trainer's writer and reader on the state of a run (float32 weights and AdamW moments) without
training. *Staging* is the copy to host memory, which blocks training: ``pinned`` copies to page-locked memory
that is reused between saves, as the trainer does on a GPU; ``plain`` copies to new memory. *Writing* does not
block training: files, fsync, and checksums. *Reading* verifies the checksums and loads model and optimizer.
``--staging-only`` skips writing and reading.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import machine, write
from torch.distributed.checkpoint.staging import BlockingAsyncStager

import implicit_blocks as ib
from implicit_blocks import registry
from trainer.checkpoint.folder import TrainingProgress
from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.staging import Staging, own_share
from trainer.checkpoint.writer import Checkpointer, named_tensors
from trainer.distributed import join, lay_out, leave
from trainer.optim.optimizers import optimizer_state
from trainer.specs.distributed import DistributedSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--specs", nargs="+", default=["llama_1.3b_bounded"])
    parser.add_argument("--copies", nargs="+", default=["pinned", "plain"], choices=["pinned", "plain"])
    parser.add_argument("--layout", default="auto", choices=["auto", "ddp", "fsdp"])
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="output folder (default: a temporary folder)"
    )
    parser.add_argument("--staging-only", action="store_true", help="only copy; do not write or read")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE", help="changes to the specs")
    parser.add_argument("--output", default="checkpointing")
    arguments = parser.parse_args()
    ranks = join(arguments.device)
    folder = Path(ranks.broadcast(tempfile.mkdtemp(dir=arguments.folder)))
    rows: list[dict[str, Any]] = []
    try:
        for name in arguments.specs:
            rows += measure(name, folder, ranks, arguments)
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    if ranks.is_main:
        show(rows)
        named = {name: str(value) if name == "folder" else value for name, value in vars(arguments).items()}
        print("written to", write(arguments.output, {"machine": machine(), "arguments": named, "rows": rows}))
    leave()


def measure(name: str, folder: Path, ranks: Any, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Save a spec's state several times with each kind of copies, and load it once."""
    run: Any = ib.load_spec(name, arguments.set)
    torch.manual_seed(0)
    with ranks.device:
        model = ib.build(run.model)
    layout = lay_out(model, DistributedSpec.model_validate({"kind": arguments.layout}), ranks)
    optimizer = registry.build(run.training.optimizer, model=model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the moments
    optimizer.zero_grad(set_to_none=True)
    rows = []
    for copies in arguments.copies:
        if arguments.staging_only:
            share = own_share({**named_tensors(model)[0], **optimizer_state(optimizer, model)[0]}, ranks)
            rows.append(
                {
                    "spec": name,
                    "ranks": ranks.world_size,
                    "layout": layout.resolved.kind,
                    "copies": copies,
                    "gb": round(sum(tensor.nbytes for tensor in share.values()) / 1e9, 3),
                    "staging_seconds": [round(s, 4) for s in staged(share, copies, arguments.saves, ranks)],
                }
            )
            continue
        checkpointer = Checkpointer(
            folder / f"{name}-{copies}",
            model=model,
            optimizer=optimizer,
            spec_digest="",
            keep=1,
            ranks=ranks,
            pin=copies == "pinned",
        )
        for step in range(1, arguments.saves + 1):
            ranks.barrier()
            checkpointer.save(TrainingProgress(step=step))
            checkpointer.wait()
        began = time.perf_counter()
        load_checkpoint(
            checkpointer.folder / f"step-{arguments.saves:08d}", model=model, optimizer=optimizer, ranks=ranks
        )
        reading = time.perf_counter() - began
        saves = checkpointer.saves
        rows.append(
            {
                "spec": name,
                "ranks": ranks.world_size,
                "layout": layout.resolved.kind,
                "copies": copies,
                "gb": round(saves[0].size / 1e9, 3),
                "staging_seconds": [round(ranks.max([save.staging_seconds])[0], 4) for save in saves],
                "writing_seconds": [
                    round(ranks.max([save.seconds - save.staging_seconds])[0], 3) for save in saves
                ],
                "reading_seconds": round(ranks.max([reading])[0], 3),
            }
        )
        if ranks.is_main:
            shutil.rmtree(checkpointer.folder)
        del checkpointer
    return rows


def staged(share: dict[str, Any], copies: str, times: int, ranks: Any) -> list[float]:
    """Return the duration of each copy of a rank's share, on the slowest rank."""
    staging = Staging(ranks.device, pin=copies == "pinned")
    plain = BlockingAsyncStager()
    seconds = []
    for _ in range(times):
        ranks.barrier()
        began = time.perf_counter()
        if staging.kept:
            staging.stage(share)
        else:
            plain.stage(share)
        seconds.append(ranks.max([time.perf_counter() - began])[0])
    return seconds


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table; the first save locks pages and is listed separately."""
    print(
        f"{'spec':<24}{'layout':<8}{'ranks':>6}{'copies':>8}{'GB':>8}"
        f"{'staging, first':>16}{'then':>8}{'writing':>9}{'reading':>9}"
    )
    for row in rows:
        first, *others = row["staging_seconds"]
        rest = ""
        if "writing_seconds" in row:
            rest = f"{min(row['writing_seconds']):>9.1f}{row['reading_seconds']:>9.1f}"
        print(
            f"{row['spec']:<24}{row['layout']:<8}{row['ranks']:>6}{row['copies']:>8}{row['gb']:>8.2f}"
            f"{first:>16.2f}{min(others, default=first):>8.2f}{rest}"
        )


if __name__ == "__main__":
    main()
