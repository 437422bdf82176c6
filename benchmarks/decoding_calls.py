"""Sequential decoding beside others: calls per token, tokens per second of a user, and equal texts.

    python benchmarks/decoding_calls.py runs/books_5m runs/books_5m_mamba2 --prompts 100
    python benchmarks/decoding_calls.py --tiny              # random weights: check that it runs
    python benchmarks/decoding_calls.py RUN --times-only --modes wavefront default --max-batch-size 16

Prompts are consecutive parts of ``--data``, a folder of tokens (default: that of the run), or random tokens.
Each is continued by ``--tokens`` tokens, for each tolerance, greedily and sampled. Counts are those of texts
that are decoded one by one (``--timed`` of them, which are timed: tokens per second of one user, from the
first new token on, without the time of the prompt); texts of all prompts are compared. Where two texts part,
the program prints the margin in the logits of the sequential text between its token and the next best, noise
included when sampling: a margin below the error of the solution is a near tie. ``logits_error`` is the mean
over tokens of the largest error of a logit, compared with sequential decoding at a hundredth of the
tolerance, up to the token where the texts part.

Modes: *wavefront*, each number of tokens ``--in-flight``; *int8*, sequential, with searches that begin with
weights in 8 bits; *default*, the decoder's number of tokens in flight. The texts that are timed are alone in
a decoder for ``--max-batch-size`` texts. A call is one call of the core on the tokens in flight; sequential
decoding commits a token with a further call.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from report import machine, write

import implicit_blocks as ib
from implicit_blocks.checkpoints.load_model import load_model
from implicit_blocks.decoding import ContinuousDecoder, NewToken, Request, Sampling
from implicit_blocks.decoding.sampling import noise_keys
from implicit_blocks.ops.noise import gumbel_at

MODES = ("sequential", "wavefront", "int8", "default")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path, help="folders of runs")
    parser.add_argument("--tiny", action="store_true", help="small models with random weights")
    parser.add_argument("--data", type=Path, help="folder of tokens")
    parser.add_argument("--prompts", type=int, default=100, help="number of texts that are compared")
    parser.add_argument("--timed", type=int, default=8, help="number of texts that are timed one by one")
    parser.add_argument("--times-only", action="store_true", help="compare no texts")
    parser.add_argument("--context", type=int, default=64, help="prompt length in tokens")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens per text")
    parser.add_argument("--tolerances", nargs="+", type=float, default=[1e-2, 1e-3])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=MODES[:3], help="modes to measure; sequential first"
    )
    parser.add_argument("--in-flight", nargs="+", type=int, default=[8], help="tokens in flight per text")
    parser.add_argument("--max-batch-size", type=int, default=1, help="slots of decoders that are timed")
    parser.add_argument("--bfloat16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--rows", type=int, default=4, help="texts decoded together, to compare")
    parser.add_argument("--max-iterations", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", default="decoding_calls", help="name in benchmarks/results, or a path")
    arguments = parser.parse_args()
    rows = []
    for name, model, data in models(arguments):
        prompts = tokens_of(data, model.spec.vocab_size, arguments)
        for tolerance in arguments.tolerances:
            for temperature in arguments.temperatures:
                work = {"model": name, "tolerance": tolerance, "temperature": temperature}
                rows.append(work | measure(model, prompts, tolerance, temperature, arguments))
                print(rows[-1], flush=True)
                given = {key: str(value) for key, value in vars(arguments).items()}
                write(arguments.output, {"machine": machine(), "arguments": given, "rows": rows})
    table(rows)


def models(arguments: argparse.Namespace) -> list[tuple[str, Any, Path | None]]:
    """Return names, models and folders of tokens."""
    if not arguments.tiny:
        found = []
        for folder in arguments.models:
            data = arguments.data or Path(run_of(folder).data.path)
            found.append((folder.name, load_model(folder).to(arguments.device).eval(), data))
        return found
    torch.manual_seed(0)
    mixers = {"attention": ib.AttentionSpec(n_heads=4), "mamba2": ib.Mamba2Spec(d_state=16, head_dim=16)}
    return [(name, contracting(mixer), None) for name, mixer in mixers.items()]


@torch.no_grad()
def contracting(mixer: Any) -> Any:
    """Return a small model with random weights, scaled so that its searches converge to different tokens."""
    model = ib.build(ib.ImplicitLMSpec(vocab_size=61, d_model=64, n_layers=2, mixer=mixer)).eval()
    model.embedding.weight.mul_(20)
    for block in model.backbone.blocks():
        block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
        block.mixer.out_proj.parametrizations.weight.original0.mul_(10.0)
    return model


def run_of(folder: Path) -> Any:
    """Return the spec of a run, whose type depends on its task."""
    return ib.load_spec(str(folder / "spec.yaml"))


def tokens_of(data: Path | None, vocabulary: int, arguments: argparse.Namespace) -> list[list[int]]:
    """Return the prompts."""
    count, length = arguments.prompts, arguments.context
    if data is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, (count, length), generator=generator).tolist()
    shard = next((data / "validation").glob("*.bin"))
    tokens = torch.from_numpy(numpy.fromfile(shard, dtype=numpy.uint16).astype(numpy.int64))
    return tokens[: len(tokens) // length * length].view(-1, length)[:count].tolist()


def measure(
    model: Any, prompts: list[list[int]], tolerance: float, temperature: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    modes = {
        name: (
            None if mode == "default" else int(name.split()[1]) if mode == "wavefront" else 1,
            torch.int8 if mode == "int8" else None,
        )
        for mode in dict.fromkeys(("sequential", *arguments.modes))
        for name in ([f"{mode} {count}" for count in arguments.in_flight] if mode == "wavefront" else [mode])
    }
    found = timed_alone(model, modes, prompts[: arguments.timed], tolerance, temperature, arguments)
    if arguments.times_only:
        return found
    numbers, texts = list(range(len(prompts))), {}
    tight = decoder_of(model, arguments.rows, 1, None, tolerance / 100, arguments)
    exact = decoded(tight, prompts, numbers, temperature, arguments)
    for mode, (in_flight, search_dtype) in modes.items():
        rows = 1 if mode == "int8" else arguments.rows  # kernels for 8 bits serve one or two rows
        together = decoder_of(model, rows, in_flight, search_dtype, tolerance, arguments)
        texts[mode] = decoded(together, prompts, numbers, temperature, arguments)
        found[mode] |= {
            "converged": round(_share(texts[mode]), 4),
            "logits_error": error_of(texts[mode], exact),
        }
        if mode != "sequential":
            found[mode]["equal_texts"], found[mode]["parted"] = compare(
                texts["sequential"], texts[mode], temperature
            )
    return found


def timed_alone(
    model: Any,
    modes: dict[str, tuple[int | None, torch.dtype | None]],
    prompts: list[list[int]],
    tolerance: float,
    temperature: float,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Time the texts one by one, each in every mode before the next."""
    slots = arguments.max_batch_size
    decoders = {
        mode: decoder_of(model, slots, *how, tolerance, arguments, buckets=[1, slots])
        for mode, how in modes.items()
    }
    for decoder in decoders.values():
        decoded(decoder, prompts[-1:], [0], temperature, arguments)  # compiles and captures
    before = {mode: decoder.calls for mode, decoder in decoders.items()}
    seconds = dict.fromkeys(modes, 0.0)
    for seed, prompt in enumerate(prompts):
        for mode, decoder in decoders.items():
            seconds[mode] += seconds_of(decoder, prompt, seed, temperature, arguments)
    tokens, found = len(prompts) * (arguments.tokens - 1), {}
    for mode, decoder in decoders.items():
        statistics = decoder.statistics
        found[mode] = {
            "calls_per_token": round((decoder.calls - before[mode]) / tokens, 2),
            "tokens_per_second": round(tokens / seconds[mode], 1),
            "tokens_in_flight": round(statistics.tokens_in_flight, 2),
            "restarts_per_token": round(statistics.restarts / (tokens + arguments.tokens - 1), 2),
        }
        if decoder.quantized is not None:
            found[mode]["calls_in_8_bits"] = round(decoder.quantized.calls / decoder.calls, 2)
    return found


def error_of(texts: list[list[NewToken]], exact: list[list[NewToken]]) -> float:
    """Return the mean over tokens of the largest error of a logit."""
    errors = []
    for news, olds in zip(texts, exact, strict=True):
        for new, old in zip(news, olds, strict=True):
            if new.token != old.token:
                break
            errors.append(float((new.logits - old.logits).abs().max()))
    return round(sum(errors) / max(1, len(errors)), 6)


def _share(texts: list[list[NewToken]]) -> float:
    flags = [bool(new.converged) for text in texts for new in text[1:]]
    return sum(flags) / max(1, len(flags))


def decoder_of(
    model: Any,
    rows: int,
    in_flight: int | None,
    search_dtype: torch.dtype | None,
    tolerance: float,
    arguments: argparse.Namespace,
    buckets: list[int] | None = None,
) -> ContinuousDecoder:
    """Return a decoder of at most ``rows`` texts at a time."""
    low = getattr(arguments, "bfloat16", False)
    with torch.autocast(torch.device(arguments.device).type, dtype=torch.bfloat16, enabled=low):
        return ContinuousDecoder(
            model,
            max_batch_size=rows,
            buckets=buckets or [rows],
            max_seq_len=arguments.context + arguments.tokens,
            max_in_flight=in_flight,
            search_dtype=search_dtype,
            tolerance=tolerance,
            max_iterations=arguments.max_iterations,
        )


def decoded(
    decoder: ContinuousDecoder,
    prompts: list[list[int]],
    seeds: list[int],
    temperature: float,
    arguments: argparse.Namespace,
) -> list[list[NewToken]]:
    """Return the new tokens of each prompt; those of a full batch enter, and are solved, together."""
    first, sampling = decoder.submitted, Sampling(temperature=temperature)
    texts: list[list[NewToken]] = [[] for _ in prompts]
    for begin in range(0, len(prompts), decoder.batch.max_batch_size):
        part = slice(begin, begin + decoder.batch.max_batch_size)
        for prompt, seed in zip(prompts[part], seeds[part], strict=True):
            decoder.submit(
                Request(prompt=prompt, max_new_tokens=arguments.tokens, sampling=sampling, seed=seed)
            )
        for new in decoder.run():
            texts[new.request - first].append(new)
    return texts


def seconds_of(
    decoder: ContinuousDecoder,
    prompt: list[int],
    seed: int,
    temperature: float,
    arguments: argparse.Namespace,
) -> float:
    """Return the seconds from the first new token of a text to its last."""
    sampling = Sampling(temperature=temperature)
    decoder.submit(Request(prompt=prompt, max_new_tokens=arguments.tokens, sampling=sampling, seed=seed))
    while not decoder.step():
        pass
    synchronize(arguments.device)
    start = time.perf_counter()
    for _ in decoder.run():
        pass
    synchronize(arguments.device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(
    sequential: list[list[NewToken]],
    others: list[list[NewToken]],
    temperature: float,
) -> tuple[str, list[dict[str, Any]]]:
    """Return how many texts are equal, and where the others part."""
    parted = []
    for seed, (olds, news) in enumerate(zip(sequential, others, strict=True)):
        for number, (old, new) in enumerate(zip(olds, news, strict=True)):
            if old.token == new.token:
                continue
            scores = old.logits.double().cpu()
            if temperature:
                key = noise_keys([seed], number + 1, device=torch.device("cpu"))[0, -1:]
                scores = scores / temperature + gumbel_at(key, len(scores))[0]
            best = scores.topk(2).values
            error = float((old.logits - new.logits).abs().max())
            margin = float(best[0] - best[1])
            parted.append(
                {"text": seed, "token": number, "margin": round(margin, 5), "logits": round(error, 5)}
            )
            break
    return f"{len(sequential) - len(parted)} of {len(sequential)}", parted


def table(rows: list[dict[str, Any]]) -> None:
    described = machine()
    print(f"\n{described.get('gpu', described['cpu'])}, torch {described['torch']}, {described['date']}")
    titles = {
        "calls_per_token": "calls per token",
        "tokens_per_second": "tokens/s",
        "tokens_in_flight": "in flight",
        "restarts_per_token": "restarts",
        "converged": "converged",
        "logits_error": "logits error",
        "equal_texts": "equal texts",
    }
    print(f"| model | tolerance | temperature | decoding | {' | '.join(titles.values())} |")
    print(f"| {' | '.join(['---'] * 11)} |")
    for row in rows:
        for mode in (name for name, found in row.items() if isinstance(found, dict)):
            cells = (row["model"], row["tolerance"], row["temperature"], mode)
            numbers = (row[mode].get(title, "") for title in titles)
            print("| " + " | ".join(map(str, (*cells, *numbers))) + " |")
            for each in row[mode].get("parted", ()):
                print(f"  differs: {each}")


if __name__ == "__main__":
    main()
