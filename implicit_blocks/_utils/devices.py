"""Selection of a device by name."""

from __future__ import annotations

import platform

import torch


def choose_device(name: str) -> torch.device:
    """Return the device called ``name``; ``auto`` is CUDA if available, else the CPU.

    Raises:
        ValueError: the device is not available; the message lists those that are.

    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r} is not a device's name; use {_available()}") from error
    if device.type == "cpu":
        return device
    if (
        device.type == "cuda"
        and torch.cuda.is_available()
        and (device.index or 0) < torch.cuda.device_count()
    ):
        return device
    if device.type == "mps" and torch.backends.mps.is_available():
        return device
    raise ValueError(
        f"device {name!r} is not available (available devices: {_available()}); choose one with --device"
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device with that of its hardware."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"
    return str(device)


def _available() -> str:
    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    names += ["mps"] if torch.backends.mps.is_available() else []
    return ", ".join(names)
