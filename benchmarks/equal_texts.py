"""Texts decoded with several tokens in flight beside those of sequential decoding, for many prompts.

    python benchmarks/equal_texts.py runs/books_5m runs/books_5m_mamba2 --device cuda
    python benchmarks/equal_texts.py --tiny --context 16 --tokens 16 --rows 250 250     # random weights

``--prompts`` consecutive parts of the validation tokens are continued by ``--tokens`` tokens, greedily and at
temperature 1 (``--temperatures``), one token after the other and with ``--in-flight`` tokens, with the same
tolerance; in float32.
Texts that differ are listed with the first token where they do, and with its *margin*: the difference between
the two best logits, sampling noise included, in the sequential text. Margins below ``--tie`` are near ties:
there the error of a solution within the tolerance decides. ``converged``: all tokens before converged in both
texts. For each text that differs ``right`` names which
of the two agrees with sequential decoding at a hundredth of the tolerance, at that token.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from decoding_calls import compare, decoded, decoder_of, models, tokens_of
from report import machine, write

from implicit_blocks.decoding import NewToken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path, help="folders of runs")
    parser.add_argument("--tiny", action="store_true", help="small models with random weights")
    parser.add_argument("--data", type=Path, help="folder of tokens")
    parser.add_argument("--prompts", type=int, default=1000, help="number of prompts")
    parser.add_argument("--context", type=int, default=32, help="prompt length in tokens")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens per text")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument(
        "--tie", type=float, default=1e-3, help="margin below which a difference is a near tie"
    )
    parser.add_argument("--in-flight", type=int, default=4, help="tokens in flight per text")
    parser.add_argument("--rows", nargs=2, type=int, default=[64, 16], help="texts decoded together, of each")
    parser.add_argument("--max-iterations", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", default="equal_texts", help="name in benchmarks/results, or a path")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    rows: list[dict[str, Any]] = []
    for name, model, data in models(arguments):
        prompts = tokens_of(data, model.spec.vocab_size, arguments)
        for temperature in arguments.temperatures:
            work = {"model": name, "temperature": temperature, "prompts": len(prompts)}
            rows.append(work | measure(model, prompts, temperature, arguments))
            given = {key: str(value) for key, value in vars(arguments).items()}
            write(arguments.output, {"machine": machine(), "arguments": given, "rows": rows})
            print({key: value for key, value in rows[-1].items() if key != "parted"}, flush=True)
            for each in rows[-1]["parted"]:
                print(f"  differs: {each}", flush=True)


def measure(
    model: Any, prompts: list[list[int]], temperature: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    seeds = list(range(len(prompts)))
    found: dict[str, Any] = {}
    texts: list[list[list[NewToken]]] = []
    for in_flight, rows in zip((1, arguments.in_flight), arguments.rows, strict=True):
        decoder = decoder_of(model, rows, in_flight, None, arguments.tolerance, arguments)
        start = time.perf_counter()
        texts.append(decoded(decoder, prompts, seeds, temperature, arguments))
        found[f"seconds_{in_flight}"] = round(time.perf_counter() - start, 1)
        if in_flight > 1:
            assert decoder.wavefront is not None
            found["kernels"] = decoder.wavefront.whole is not None
            found["tokens_in_flight"] = round(decoder.statistics.tokens_in_flight, 2)
            found["restarts"] = decoder.statistics.restarts
    olds, news = texts
    equal, parted = compare(olds, news, temperature)
    exact = tight(model, prompts, [each["text"] for each in parted], temperature, arguments)
    for each, text in zip(parted, exact, strict=True):
        each["near_tie"] = each["margin"] < arguments.tie
        before = [new for made in texts for new in made[each["text"]][1 : each["token"] + 1]]
        each["converged"] = all(new.converged for new in before)
        each["right"] = right(each["text"], each["token"], olds, news, text)
    ties = sum(each["near_tie"] for each in parted)
    unconverged = [sum(not new.converged for text in each for new in text[1:]) for each in texts]
    return found | {"equal": equal, "near_ties": ties, "unconverged": unconverged, "parted": parted}


def tight(
    model: Any,
    prompts: list[list[int]],
    numbers: list[int],
    temperature: float,
    arguments: argparse.Namespace,
) -> list[list[NewToken]]:
    """Return the texts of these prompts at a hundredth of the tolerance."""
    if not numbers:
        return []
    decoder = decoder_of(model, min(len(numbers), 8), 1, None, arguments.tolerance / 100, arguments)
    return decoded(decoder, [prompts[number] for number in numbers], numbers, temperature, arguments)


def right(
    text: int,
    token: int,
    olds: list[list[NewToken]],
    news: list[list[NewToken]],
    exact: list[NewToken],
) -> str:
    """Return which text has the token of the exact one, if the exact text is the same before it."""
    if [new.token for new in exact[:token]] != [old.token for old in olds[text][:token]]:
        return "neither"
    names = {"sequential": olds[text][token].token, "in flight": news[text][token].token}
    return next((name for name, chosen in names.items() if chosen == exact[token].token), "neither")


if __name__ == "__main__":
    main()
