"""Ranks that were started differently are told so before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.distributed.ranks import Ranks
from trainer.storage.files import digest
from trainer.storage.run_folder import differences

SHOWN = 8


def require_same_spec(ranks: Ranks, spec: Mapping[str, Any], *, options: Mapping[str, Any]) -> None:
    """Refuse, on every rank, to go on where one has another spec, or other options of the command line.

    Raises:
        ValueError: each rank that differs from rank 0, with both values of what differs.

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
    """Refuse, on every rank, to train where one reads other data, such as another copy on its machine.

    Raises:
        ValueError: the ranks whose data are not those of rank 0.

    """
    every = ranks.gather_objects(digest(list(map(dict, identities))))
    others = [str(rank) for rank, found in enumerate(every) if found != every[0]]
    if others:
        raise ValueError(
            f"the data at the same path are not the same: rank {', '.join(others)} found others than rank 0; "
            "copy them to every machine again, or give a path that all machines share"
        )
