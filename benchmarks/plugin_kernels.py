"""Time of the plugins' mixers with flash-linear-attention's kernels and with plain scans, on a GPU.

    python benchmarks/plugin_kernels.py

One layer, bfloat16 autocast, no search. The first calls tune the kernels, which takes minutes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing.mixer_runs import begin

SETTINGS = {
    "gated_deltanet": {"n_heads": 6, "head_dim": 128, "expand_v": 2},
    "rwkv7": {"n_heads": 12, "head_dim": 64, "decay_rank": 64, "rate_rank": 64, "gate_rank": 128},
}


def milliseconds(call: Callable[[], object], *, rounds: int) -> tuple[float, float]:
    """Return the time of a call and the peak memory in GB."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(rounds):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds * 1e3, torch.cuda.max_memory_allocated() / 1e9


def measure(spec: MixerSpec, *, rows: int, length: int, d_model: int, rounds: int) -> list[float]:
    """Return milliseconds and GB, of forward, and of forward and backward."""
    torch.manual_seed(0)
    mixer = ib.build(spec, d_model=d_model).cuda()
    z = torch.randn(rows, length, d_model, device="cuda", requires_grad=True)
    u = torch.randn(rows, length, mixer.injection_width, device="cuda", dtype=torch.bfloat16)
    start = begin(mixer, rows, dtype=torch.float32, device=z.device)
    window = start.window(length, valid_BL=None, documents_BL=None, dtype=torch.float32)
    context = mixer.prepare(window)

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y: torch.Tensor = mixer(z, u, start.layers[0], context)
            return y

    with torch.no_grad():
        alone = milliseconds(forward, rounds=rounds)
    return [*alone, *milliseconds(lambda: forward().float().square().mean().backward(), rounds=rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--d-model", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark requires a CUDA GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| mixer | backend | forward ms | GB | forward and backward ms | GB |\n|---|---|---|---|---|---|")
    for kind, settings in SETTINGS.items():
        for backend in ("fla", "plain"):
            spec = registry.entry("mixer", kind).spec(backend=backend, **settings)
            numbers = measure(
                spec,
                rows=options.rows,
                length=options.length,
                d_model=options.d_model,
                rounds=options.rounds,
            )
            print(f"| {kind} | {backend} | {' | '.join(f'{number:.2f}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
