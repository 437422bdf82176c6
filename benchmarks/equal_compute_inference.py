"""Inference of the models compared at equal compute: FLOPs, bytes and time per scored and generated token.

    python benchmarks/equal_compute_inference.py [--loops 2 3 8] [--output equal_compute_inference_gates]
    python benchmarks/equal_compute_inference.py --table       # the tables of docs/equal_compute.md

The models are those with gates on the other text and the explicit ones beside them (`IMPLICIT`, `EXPLICIT`).
Weights are new: neither FLOPs nor time depend on them, because the number of loops is fixed. Scoring solves
64 sequences of 512 tokens in one forward pass; generation continues prompts of 512 tokens with continuous
batching, whose steps are captured as CUDA graphs on a GPU. Both use bfloat16 autocast. *Bytes* are those of
the weights and of the state of one sequence after 512 tokens, all in bfloat16.
``equal_compute_inference.json`` has earlier models, without gates, and a second run under ``before``: when
each loop was a launch of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from equal_compute_averaged import model_of as words_of
from equal_compute_averaged import several_seeds
from equal_compute_parts import ABLATED, GATED, MAMBA2_FOUR, MAMBA2_STAGES, STAGED
from equal_compute_seeds import mean_perplexity
from report import RESULTS, machine, write

import implicit_blocks as ib
from implicit_blocks.decoding import ContinuousDecoder, Request
from implicit_blocks.models.counting import count_flops, count_parameters
from implicit_blocks.models.implicit_spec import ImplicitLMSpec
from implicit_blocks.models.specs import LanguageModelSpec
from trainer.experiments.equal_compute.recipes import Recipe, model_of

IMPLICIT = (GATED, MAMBA2_STAGES)
EXPLICIT = (STAGED, ABLATED, MAMBA2_STAGES, MAMBA2_FOUR)
"""Parts of the comparison with implicit and explicit models on the other text."""
LENGTH = 512
SCORED = 64  # sequences
NEW_TOKENS = 64
ROWS = (1, 64)
HEAD = (
    "model", "loops", "parameters", "weights and state, MB", "MFLOP per token", "scored tokens/s",
    "ms per generated token", "generated tokens/s, 64 texts", "perplexity",
)  # fmt: skip


def recipes() -> list[tuple[Recipe, list[Mapping[str, Any]]]]:
    """Return the best recipe of each size of model, and its runs.

    Best on the text of the choice, over the reported seeds.
    """
    best: dict[Any, tuple[Recipe, list[Mapping[str, Any]]]] = {}
    for side, parts in (("implicit", IMPLICIT), ("explicit", EXPLICIT)):
        for recipe, rows in several_seeds(*parts):
            key = size_of(recipe)
            if recipe.side != side or recipe.injection != "residual":
                continue
            if key not in best or mean_perplexity(rows, "choice") < mean_perplexity(best[key][1], "choice"):
                best[key] = recipe, rows
    return sorted(best.values(), key=lambda one: (one[0].family, one[0].side, one[1][0]["parameters"]))


def size_of(recipe: Recipe) -> tuple[Any, ...]:
    """Return the family, layers and width of a recipe's model."""
    return recipe.family, recipe.layers, recipe.width


def perplexity_at(rows: Sequence[Mapping[str, Any]], loops: int | None) -> float:
    """Return the mean perplexity on the reported books with a number of loops.

    Other numbers of loops than that at the end of training were measured on a part of these books: their
    ratio to the perplexity with the trained number there is applied to that on all books.
    """
    trained = rows[0]["recipe"]["end_loops"] or rows[0]["recipe"]["loops"]
    ratios = []
    if loops is not None and loops != trained:
        few = [{one["loops"]: one["perplexity"] for one in row["few_loops"]} for row in rows]
        ratios = [found[loops] / found[trained] for found in few]
    return mean_perplexity(rows) * statistics.geometric_mean(ratios or [1.0])


def counted(spec: LanguageModelSpec, loops: int | None) -> dict[str, Any]:
    """Return parameters, bytes of weights and state, and FLOPs per token of a forward pass."""
    parameters, flops = count_parameters(spec), count_flops(spec, length=LENGTH)
    assert parameters is not None
    assert flops is not None
    parts = (flops.prelude, flops.injection, flops.coda, flops.head)
    once = sum(part or 0.0 for part in parts)
    states = [
        layer.mixer.state_bytes(stack.d_model, tokens=LENGTH, itemsize=2) or 0
        for stack in spec.stacks.values()
        for layer in stack.layers
    ]
    return {
        "parameters": parameters.total,
        "weight_bytes": 2 * (parameters.total or 0),
        "state_bytes": sum(states),
        "flops_per_token": once + (loops or 1) * (flops.layers or 0.0),
    }


def seconds(run: Callable[[], Any], *, repeats: int, device: str) -> float:
    """Return the median duration of a call, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


@torch.no_grad()
def timed(spec: LanguageModelSpec, loops: int | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return scored tokens per second, and seconds per generated token by the number of texts."""
    device = arguments.device
    torch.manual_seed(0)
    model = ib.build(spec).to(device).eval()
    search: dict[str, Any] = {} if loops is None else {"loops": loops}
    scored, length = (4, 32) if arguments.tiny else (SCORED, LENGTH)
    tokens_BL = torch.randint(spec.vocab_size, (scored, length), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        took = seconds(
            lambda: model(tokens_BL, labels=tokens_BL, return_logits=False, **search),
            repeats=arguments.repeats,
            device=device,
        )
    found: dict[str, Any] = {"scored_tokens_per_second": tokens_BL.numel() / took, "generated": {}}
    for rows in (1, 2) if arguments.tiny else ROWS:
        found["generated"][rows] = _generation(model, rows, length, search, arguments)
    return found


def _generation(
    model: Any, rows: int, length: int, search: dict[str, Any], arguments: argparse.Namespace
) -> float:
    """Return seconds per token and text."""
    new = 4 if arguments.tiny else NEW_TOKENS
    with torch.autocast(arguments.device, dtype=torch.bfloat16):
        decoder = ContinuousDecoder(
            model, max_batch_size=rows, buckets=[rows], max_seq_len=length + 2 * new + 8, **search
        )
    prompts = torch.randint(model.spec.vocab_size, (rows, length)).tolist()
    for prompt in prompts:
        decoder.submit(Request(prompt=prompt, max_new_tokens=2 * new))
    made = 0
    began = time.perf_counter()
    first = 0
    for _ in decoder.run():
        made += 1
        if not first and made >= rows * new:  # prompts, capture and the first tokens are not counted
            first, began = made, time.perf_counter()
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / (made - first)


def table(rows: Sequence[dict[str, Any]], family: str) -> str:
    """Return the rows of a family as a Markdown table."""
    lines = [HEAD, ("---",) * len(HEAD)]
    known = {size_of(recipe): (recipe, runs) for recipe, runs in recipes()}
    for row in rows:
        if row["recipe"]["family"] != family:
            continue
        generated = {int(count): took for count, took in row["generated"].items()}
        recipe, runs = known[size_of(Recipe.of(row["recipe"]))]
        perplexity = perplexity_at(runs, row["loops"])
        lines.append((
            words_of(recipe),
            "" if row["loops"] is None else str(row["loops"]),
            f"{row['parameters'] / 1e6:.1f} M",
            f"{(row['weight_bytes'] + row['state_bytes']) / 1e6:.1f}",
            f"{row['flops_per_token'] / 1e6:.1f}",
            f"{row['scored_tokens_per_second']:,.0f}",
            f"{1e3 * generated[1]:.2f}" if generated else "",
            f"{1 / generated[64]:,.0f}" if generated else "",
            f"{perplexity:.2f}",
        ))  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    """Run the command."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--loops", type=int, nargs="+", default=[2, 3, 8], help="of looped models (2 3 8)")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--tiny", action="store_true", help="short texts, to test the program")
    made.add_argument(
        "--output", default="equal_compute_inference_gates", help="name in benchmarks/results, or a path"
    )
    made.add_argument("--table", action="store_true", help="print the tables of the stored results")
    given = made.parse_args()
    if given.table:
        stored = json.loads(Path(RESULTS / f"{given.output}.json").read_text())["rows"]
        print(table(stored, "llama"), table(stored, "mamba2"), sep="\n\n")
        return
    rows: list[dict[str, Any]] = []
    for recipe, _ in recipes():
        spec = model_of(recipe)
        assert isinstance(spec, LanguageModelSpec)
        for loops in given.loops if isinstance(spec, ImplicitLMSpec) else [None]:
            row = {"recipe": recipe.as_row(), "loops": loops}
            row |= counted(spec, loops) | timed(spec, loops, given)
            rows.append(row)
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "recipe"}), flush=True)
            write(given.output, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
