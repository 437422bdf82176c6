"""Models of the zoo and batches with published figures of an H100. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """A model of the zoo, a batch, and the published figures for the same on an H100."""

    spec: str
    rows: int
    length: int
    tokens_per_second: int
    iterations: int | None
    peak_gb: float
    search_dtypes: tuple[str, ...] = ("none",)
    """The types of the products in searches with which the work is measured."""


BOTH = ("none", "float8_e4m3fn")


WORKS = {
    "llama_130m_explicit": Work("llama_130m_explicit", 8, 2048, 135_233, None, 19.5),
    "llama_130m_bounded": Work("llama_130m_bounded", 8, 2048, 64_687, 4, 19.9, BOTH),
    "llama_130m_free": Work("llama_130m", 8, 2048, 22_108, 13, 41.4),
    "llama_1.3b_bounded": Work("llama_1.3b_bounded", 4, 2048, 6_133, 4, 46.1, BOTH),
    "mamba2_130m_explicit": Work("mamba2_130m_explicit", 8, 2048, 70_119, None, 17.9),
    "mamba2_130m_bounded": Work("mamba2_130m_bounded", 8, 2048, 48_638, 4, 18.4, BOTH),
    "mamba2_130m_free": Work("mamba2_130m", 8, 2048, 14_347, 14, 34.8),
    "mamba2_1.3b_bounded": Work("mamba2_1.3b_bounded", 4, 2048, 10_949, 4, 42.0, BOTH),
    "state_tracking": Work("mamba2_state_tracking", 512, 256, 642_693, 18, 8.2),
}
