"""What tests of kernels share that run on a GPU or, with ``TRITON_INTERPRET=1``, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="no CUDA device"),
    # of the interpreter
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
HALF = pytest.param(
    torch.bfloat16, marks=pytest.mark.skipif(INTERPRETED, reason="the interpreter has no bfloat16")
)


def random(*shape):
    return torch.randn(*shape, device=DEVICE)
