"""Peak FLOP/s of known devices for utilization: dense matrix products, from data sheets."""

from __future__ import annotations

_PEAKS: tuple[tuple[str, float, float], ...] = (
    # substring of the device name, bfloat16 and float32 (without TF32) FLOP/s; the first match applies
    ("B200", 2.25e15, 75e12),
    ("H200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("GH200", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("A40", 150e12, 37e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 31e12),
    ("L40S", 362e12, 92e12),
    ("L40", 181e12, 91e12),
    ("L4", 121e12, 30e12),
    ("RTX 4090", 165e12, 83e12),
    ("RTX 3090", 71e12, 36e12),
    ("MI300X", 1307e12, 163e12),
    ("MI250X", 383e12, 48e12),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device by its name, such as ``NVIDIA H100 80GB HBM3``; None if unknown.

    Args:
        device_name: name of the device as reported by torch.
        precision: ``bfloat16`` or ``float32``, the spec's `training.precision`.

    """
    for part, bfloat16, float32 in _PEAKS:
        if part in device_name:
            return bfloat16 if precision == "bfloat16" else float32
    return None
