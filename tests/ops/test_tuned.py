"""What mamba-ssm's tuners are told: only what is among their own ways, and only where it was measured."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_blocks.ops.ssd import tuned


def tuner(*ways: dict[str, int]) -> Any:
    return SimpleNamespace(
        configs=[
            SimpleNamespace(
                kwargs={name: value for name, value in way.items() if not name.startswith("num_")},
                num_warps=way["num_warps"],
                num_stages=way.get("num_stages", 3),
            )
            for way in ways
        ],
        cache={},
    )


NAME, KEY = next(at for at in tuned.FOUND if at[0] == "_bmm_chunk_fwd_kernel")
WANTED = tuned.FOUND[NAME, KEY]


def test_a_tuner_takes_the_way_that_was_found() -> None:
    other = {**WANTED, "BLOCK_SIZE_M": 16}
    found = tuner(other, WANTED, {**WANTED, "num_stages": 2})
    assert tuned.tell({NAME: found}) == [NAME]
    assert found.cache == {KEY: found.configs[1]}


def test_what_it_has_found_itself_stays() -> None:
    found = tuner(WANTED)
    found.cache[KEY] = "its own"
    tuned.tell({NAME: found})
    assert found.cache == {KEY: "its own"}


def test_a_tuner_of_other_ways_is_left_to_look_for_itself() -> None:
    found = tuner({**WANTED, "BLOCK_SIZE_K": 16})
    assert tuned.tell({NAME: found}) == []
    assert found.cache == {}
    assert tuned.tell({NAME: SimpleNamespace(configs=found.configs)}) == []


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), True), ((8, 0), False), ((10, 0), False)])
def test_only_the_card_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    module = ModuleType("scans.kernels")
    module._bmm_chunk_fwd_kernel = tuner(WANTED)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "scans.kernels", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    tuned.tell_loaded("scans")
    assert bool(module._bmm_chunk_fwd_kernel.cache) is expected


def test_what_depends_on_the_states_is_known_for_64_as_for_128() -> None:
    narrower = {128: 64, 64 * 128: 64 * 64}
    wide = [(name, key) for name, key in tuned.FOUND if not narrower.keys().isdisjoint(key)]
    assert len(wide) == 11
    for name, key in wide:
        assert (name, tuple(narrower.get(size, size) for size in key)) in tuned.FOUND, name
