"""Checks that all ranks were started with the same spec, options and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.distributed.ranks import Ranks
from trainer.storage.files import digest
from trainer.storage.run_folder import differences

SHOWN = 8


def require_same_spec(ranks: Ranks, spec: Mapping[str, Any], *, options: Mapping[str, Any]) -> None:
    """Raise on every rank if a rank has another spec or other options of the command line.

    Raises:
        ValueError: names each rank that differs from rank 0, with both values.

    """
    own = {"spec": spec, "options": options}
    if len(set(ranks.gather_objects(digest(own)))) == 1:
        return
    every = ranks.gather_objects(own)
    problems = []
    for rank, other in enumerate(every):
        found = [change.removeprefix("spec.") for change in differences(every[0], other)]
        if found:
            more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            problems.append(f"rank 0 → rank {rank}: {'; '.join(found[:SHOWN])}{more}")
    raise ValueError(
        "the ranks were not started with the same spec and options; give every one the same command "
        f"({' | '.join(problems)})"
    )


def require_same_data(ranks: Ranks, identities: Sequence[Mapping[str, Any]]) -> None:
    """Raise on every rank if a rank reads other data, such as another copy on its machine.

    Raises:
        ValueError: names the ranks whose data differ from those of rank 0.

    """
    every = ranks.gather_objects(digest(list(map(dict, identities))))
    others = [str(rank) for rank, found in enumerate(every) if found != every[0]]
    if others:
        raise ValueError(
            f"the data at the same path differ: rank {', '.join(others)} reads other data than rank 0; "
            "copy them to every machine again, or use a path that all machines share"
        )
