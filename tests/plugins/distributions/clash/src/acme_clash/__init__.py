"""A plugin with a new kind and a kind that is already registered."""

from __future__ import annotations

from typing import Literal

import implicit_blocks as ib


class OwnSpec(ib.SolverSpec):
    """A new kind."""

    kind: Literal["acme.own"] = "acme.own"


class PicardSpec(ib.SolverSpec):
    """A built-in kind."""

    kind: Literal["picard"] = "picard"


@ib.hookimpl
def register_components(add):
    add("solver", OwnSpec, "acme_clash:Nothing")
    add("solver", PicardSpec, "acme_clash:Nothing")
