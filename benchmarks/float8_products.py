"""Matrix products in 8-bit floats beside bfloat16, at the widths of the zoo's models.

    python benchmarks/float8_products.py [--output float8_products]
    python benchmarks/float8_products.py --tiny          # check that it runs, on any device

The table has microseconds per product of M tokens (16,384 at 130M, 8,192 at 1.3B, 131,072 in state tracking)
with a weight (N, K), both factors quantized beforehand with one scale per row, and the relative error.
"""

from __future__ import annotations

import argparse

import torch
from on_device import device, seconds
from report import machine, write
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.ops.float8 import Float8Weight, float8_product, quantize_, quantized_rows

SHAPES = {  # M, K, N
    "llama1.3b qkv": (8192, 2048, 6144),
    "llama1.3b out": (8192, 2048, 2048),
    "llama1.3b gate": (8192, 2048, 5504),
    "llama1.3b down": (8192, 5504, 2048),
    "mamba1.3b in": (8192, 2048, 8512),
    "mamba1.3b out": (8192, 4096, 2048),
    "llama130m qkv": (16384, 768, 2304),
    "llama130m out": (16384, 768, 768),
    "llama130m gate": (16384, 768, 2048),
    "llama130m down": (16384, 2048, 768),
    "mamba130m in": (16384, 768, 3360),  # 3352 in the model, which is not a multiple of 16
    "mamba130m out": (16384, 1536, 768),
    "tracking in": (131072, 256, 2320),
    "tracking out": (131072, 1024, 256),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="64 tokens, to test the program")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--output", default="float8_products", help="name in benchmarks/results, or a path")
    arguments = parser.parse_args()
    found = {}
    for name, (tokens, inputs, outputs) in SHAPES.items():
        found[name] = measure(64 if arguments.tiny else tokens, inputs, outputs, arguments.repeats)
        print(name, found[name], flush=True)
    write(arguments.output, {"machine": machine(), "products_us": found})


@torch.no_grad()
def measure(tokens: int, inputs: int, outputs: int, repeats: int) -> dict[str, float]:
    """Return the microseconds of both products, and the relative error."""
    x = torch.randn(tokens, inputs, device=device(), dtype=torch.bfloat16)
    source = torch.randn(outputs, inputs, device=device(), dtype=torch.bfloat16) / inputs**0.5
    weight = Float8Weight.like(source)
    quantize_([weight], [source])
    codes, scales = quantized_rows(x)

    def plain() -> torch.Tensor:
        return F.linear(x, source)

    def quantized() -> torch.Tensor:
        return float8_product(codes, scales, weight, None)

    error = (quantized().float() - plain().float()).norm() / plain().float().norm()
    times = {}
    for name, call in (("bf16", plain), ("rowwise", quantized)):
        call()
        took = seconds(lambda call=call: [call() for _ in range(repeats)])  # type: ignore[misc]  # the default
        times[name] = round(1e6 * took / repeats, 1)
    return times | {"error": round(float(error), 4)}


if __name__ == "__main__":
    main()
