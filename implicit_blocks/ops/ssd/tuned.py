"""Measured configurations of mamba-ssm's kernels, which save a minute of autotuning in the first step.

Each kernel compiles and times up to eleven configurations at its first call with new shapes. For the shapes
of the published models and of the books' models on Hopper the result is known, and is written to the cache of
Triton's tuner. Other shapes, dtypes and GPUs are tuned as usual; ``TRITON_CACHE_AUTOTUNING=1`` caches the
results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

HOPPER = (9, 0)

_F, _B = "torch.float32", "torch.bfloat16"


def _tiles(m: int, n: int, *, warps: int, stages: int, **sizes: int) -> dict[str, int]:
    """Return a configuration of a kernel that computes tiles of m rows and n columns."""
    blocks = {f"BLOCK_SIZE_{name}": size for name, size in {"M": m, "N": n, **sizes}.items()}
    return {**blocks, "num_warps": warps, "num_stages": stages}


FOUND: dict[tuple[str, tuple[Any, ...]], dict[str, int]] = {
    # Chunks of 256, heads 64 wide, 128 states; the types are those of the kernel's tensors, in order. H200.
    ("_state_passing_fwd_kernel", (8192, _F, _B, _F, _F)): {"BLOCK_SIZE": 2048, "num_warps": 4},
    ("_state_passing_fwd_kernel", (8192, _F, _F, _F, _F)): {"BLOCK_SIZE": 1024, "num_warps": 4},
    ("_bmm_chunk_fwd_kernel", (256, 128, False, _B, _B, _F)): _tiles(128, 64, K=32, warps=4, stages=4),
    ("_chunk_scan_fwd_kernel", (256, 64, 128, True, _F, _B, _B, _F, _F, _B, _B, _F)): _tiles(
        32, 64, K=32, warps=2, stages=5
    ),
    ("_chunk_scan_bwd_dstates_kernel", (64, 128, 256, _B, _B, _F, _F)): _tiles(
        64, 128, K=32, warps=4, stages=4
    ),
    ("_state_passing_bwd_kernel", (8192, _F, _F, _F, _B, _F, _B)): {"BLOCK_SIZE": 512, "num_warps": 4},
    (
        "_chunk_scan_chunk_state_bwd_dx_kernel",
        (256, 64, 128, _B, _F, _B, _F, _F, _F, _B, _B, _B, _F, _F),
    ): _tiles(32, 64, K=32, warps=4, stages=5),
    ("_chunk_state_bwd_db_kernel", (256, 128, 64, _B, _B, _B, _F, _F, _F, _F)): _tiles(
        64, 128, warps=4, stages=3
    ),
    ("_chunk_scan_bwd_dc_kernel", (256, 128, 64, _B, _B, _B, _F, _F, _F)): _tiles(64, 128, warps=4, stages=3),
    ("_chunk_scan_bwd_dcb_kernel", (256, 64, _B, _B, _F, _F, _F)): _tiles(64, 32, warps=4, stages=3),
    ("_bmm_chunk_bwd_kernel", (256, 128, _B, _F, _B, _F)): _tiles(64, 128, CS=32, warps=4, stages=4),
    ("_chunk_scan_bwd_ddAcs_stable_kernel", (256, 64, _B, _B, _F, _F, _F, _F)): _tiles(
        64, 32, warps=4, stages=3
    ),
    ("_chunk_state_fwd_kernel", (64, 128, 256, _B, _B, _F, _F, _F)): _tiles(64, 128, K=32, warps=4, stages=4),
    ("_chunk_cumsum_fwd_kernel", (256, 64, _F, _F, _F, _F)): {"BLOCK_SIZE_H": 8, "num_warps": 4},
    ("_chunk_cumsum_bwd_kernel", (256, 64, _F, _F, _F, _F, _F, _F)): {"BLOCK_SIZE_H": 8, "num_warps": 4},
    # The same with 64 states and 10 heads, the books' models. H200.
    ("_chunk_cumsum_fwd_kernel", (256, 10, _F, _F, _F, _F)): {"BLOCK_SIZE_H": 8, "num_warps": 4},
    ("_bmm_chunk_fwd_kernel", (256, 64, False, _B, _B, _F)): _tiles(128, 128, K=32, warps=4, stages=4),
    ("_chunk_state_fwd_kernel", (64, 64, 256, _B, _B, _F, _F, _F)): _tiles(64, 64, K=32, warps=2, stages=4),
    ("_state_passing_fwd_kernel", (4096, _F, _F, _F, _F)): {"BLOCK_SIZE": 1024, "num_warps": 4},
    ("_chunk_scan_bwd_dstates_kernel", (64, 64, 256, _B, _B, _F, _F)): _tiles(
        64, 64, K=32, warps=2, stages=4
    ),
    ("_state_passing_bwd_kernel", (4096, _F, _F, _F, _B, _F, _B)): {"BLOCK_SIZE": 1024, "num_warps": 4},
    (
        "_chunk_scan_chunk_state_bwd_dx_kernel",
        (256, 64, 64, _B, _F, _B, _F, _F, _F, _B, _B, _B, _F, _F),
    ): _tiles(64, 64, K=32, warps=4, stages=4),
    ("_chunk_state_bwd_db_kernel", (256, 64, 64, _B, _B, _B, _F, _F, _F, _F)): _tiles(
        128, 64, warps=4, stages=3
    ),
    ("_chunk_scan_bwd_dc_kernel", (256, 64, 64, _B, _B, _B, _F, _F, _F)): _tiles(128, 64, warps=4, stages=3),
    ("_bmm_chunk_bwd_kernel", (256, 64, _B, _F, _B, _F)): _tiles(128, 64, CS=32, warps=4, stages=4),
    ("_chunk_cumsum_bwd_kernel", (256, 10, _F, _F, _F, _F, _F, _F)): {"BLOCK_SIZE_H": 8, "num_warps": 4},
    ("_state_passing_fwd_kernel", (4096, _F, _B, _F, _F)): {"BLOCK_SIZE": 256, "num_warps": 4},
    ("_chunk_scan_fwd_kernel", (256, 64, 64, True, _F, _B, _B, _F, _F, _B, _B, _F)): _tiles(
        32, 64, K=32, warps=2, stages=5
    ),
}


def configure(kernels: dict[str, Any]) -> list[str]:
    """Write the measured configurations to the caches of these kernels' tuners; return the names changed.

    Only configurations that the tuner itself lists are used: another version of mamba-ssm may have others.
    """
    applied = []
    for (name, key), wanted in FOUND.items():
        tuner: Any = kernels.get(name)
        configs = [config for config in getattr(tuner, "configs", ()) if _fits(config, wanted)]
        if configs and isinstance(getattr(tuner, "cache", None), dict):
            tuner.cache.setdefault(key, configs[0])
            applied.append(name)
    return applied


def _fits(config: Any, wanted: dict[str, int]) -> bool:
    given = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return all(given.get(name) == value for name, value in wanted.items())


def configure_loaded(package: str) -> None:
    """Apply the measured configurations to a package's loaded modules, on GPUs that the table is for."""
    if torch.version.hip is None and torch.cuda.get_device_capability() == HOPPER:
        configure(dict(_tuners(package)))


def _tuners(package: str) -> Iterator[tuple[str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(package + "."):
            for name, value in vars(module).items():
                if hasattr(value, "configs") and hasattr(value, "cache"):
                    yield name, value
