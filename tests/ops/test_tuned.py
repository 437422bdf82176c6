"""Measured configurations are given to mamba-ssm's tuners that list them, on the measured GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_blocks.ops.ssd import tuned


def tuner(*configs: dict[str, int]) -> Any:
    return SimpleNamespace(
        configs=[
            SimpleNamespace(
                kwargs={name: value for name, value in config.items() if not name.startswith("num_")},
                num_warps=config["num_warps"],
                num_stages=config.get("num_stages", 3),
            )
            for config in configs
        ],
        cache={},
    )


NAME, KEY = next(at for at in tuned.FOUND if at[0] == "_bmm_chunk_fwd_kernel")
WANTED = tuned.FOUND[NAME, KEY]


def test_a_tuner_uses_the_measured_configuration() -> None:
    other = {**WANTED, "BLOCK_SIZE_M": 16}
    found = tuner(other, WANTED, {**WANTED, "num_stages": 2})
    assert tuned.configure({NAME: found}) == [NAME]
    assert found.cache == {KEY: found.configs[1]}


def test_a_configuration_that_the_tuner_found_itself_is_kept() -> None:
    found = tuner(WANTED)
    found.cache[KEY] = "its own"
    tuned.configure({NAME: found})
    assert found.cache == {KEY: "its own"}


def test_a_tuner_without_the_measured_configuration_is_unchanged() -> None:
    found = tuner({**WANTED, "BLOCK_SIZE_K": 16})
    assert tuned.configure({NAME: found}) == []
    assert found.cache == {}
    assert tuned.configure({NAME: SimpleNamespace(configs=found.configs)}) == []


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_only_the_measured_gpu_is_configured(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    module = ModuleType("scans.kernels")
    module._bmm_chunk_fwd_kernel = tuner(WANTED)  # type: ignore[attr-defined]  # a module without types
    monkeypatch.setitem(sys.modules, "scans.kernels", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    tuned.configure_loaded("scans")
    assert bool(module._bmm_chunk_fwd_kernel.cache) is expected


def test_kernels_that_depend_on_the_state_width_have_entries_for_64_and_128() -> None:
    narrower = {128: 64, 64 * 128: 64 * 64}
    wide = [(name, key) for name, key in tuned.FOUND if not narrower.keys().isdisjoint(key)]
    assert len(wide) == 11
    for name, key in wide:
        assert (name, tuple(narrower.get(size, size) for size in key)) in tuned.FOUND, name
