"""The contracts of a mixer; each is a function of its spec.

``check_mixer(MySpec(...))`` runs all; ``MIXER_CONTRACTS`` names them, to write one test each:

```python
@pytest.mark.parametrize("contract", MIXER_CONTRACTS)
def test_shift(contract):
    MIXER_CONTRACTS[contract](ShiftSpec(distance=2))
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing import mixer_modules as modules
from implicit_blocks.testing import mixer_slots as further
from implicit_blocks.testing import mixer_windows as windows
from implicit_blocks.testing.contract import named
from implicit_blocks.testing.mixer_runs import D_MODEL

MIXER_CONTRACTS: dict[str, Callable[..., Any]] = named(
    (
        windows.state_untouched,
        windows.causality,
        windows.window_splits,
        windows.batch_independence,
        windows.padding,
        windows.padded_windows,
        windows.documents,
        windows.padded_documents,
        windows.max_seq_len,
        further.truncate,
        further.slots,
        further.slot_windows,
        modules.gradients,
        modules.low_precision,
        modules.copies,
        modules.meta_build,
        modules.injection_width,
        modules.costs,
    )
)


def check_mixer(spec: MixerSpec, *, d_model: int = D_MODEL) -> None:
    """Run every contract on the mixer that the spec builds.

    Args:
        spec: a registered mixer spec that fits ``d_model``; small widths are faster.
        d_model: width of the residual stream.

    Raises:
        ContractError: names the mixer, its plugin, the broken contract and a remedy.

    """
    for contract in MIXER_CONTRACTS.values():
        contract(spec, d_model)
