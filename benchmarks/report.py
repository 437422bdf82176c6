"""Metadata that every benchmark records with its figures: date, machine, versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
# Packages that may run operators on a GPU, besides torch.
KERNEL_PACKAGES = ("triton", "mamba_ssm", "causal_conv1d", "fla-core", "flash_attn", "xformers")


def cpu_model() -> str:
    """Return the name of the processor, with family and model, because virtual machines may hide the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines[:30])}
    return (
        f"{fields.get('model name', platform.machine())} "
        f"(family {fields.get('cpu family')}, model {fields.get('model')}, stepping {fields.get('stepping')})"
    )


def machine() -> dict[str, Any]:
    """Describe the machine, its current load, and the versions."""
    described: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
        described["cuda"] = torch.version.cuda
        described |= {name: version for name in KERNEL_PACKAGES if (version := version_of(name))}
    return described


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write(name: str, result: dict[str, Any]) -> Path:
    """Write ``results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path
