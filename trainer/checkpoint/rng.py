"""The states of the random number generators of Python, NumPy and PyTorch, as JSON values."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch (every device) with ``seed``, modulo the size of their seeds."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**64)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def random_state() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and PyTorch, including CUDA devices."""
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)  # a tuple, where legacy
    name, keys, position, has_gauss, cached = numpy_state
    keys_text = base64.b64encode(keys.tobytes()).decode("ascii")
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), keys_text, position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = [_encode(device) for device in torch.cuda.get_rng_state_all()]
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore every generator to a state of :func:`random_state`.

    States of CUDA devices are restored for the devices that both machines have: a run can continue on another
    machine, but not bit by bit.
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(
        (name, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, cached)
    )
    torch.set_rng_state(_decode(state["torch"]))
    if torch.cuda.is_available():
        for index, device in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_decode(device), index)
