"""Named tensors of a published model and ours, in both directions.

A ``TensorMap`` is a list of rules between one or more of our tensors and one or more published ones. A rule
is linear and invertible, so that the same map reads weights and gradients, and writes them back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from implicit_blocks.checkpoints.folder import check_tensors

OWN = ("depth.draws",)
"""Buffers of ours that no published model has: the number of draws of random depths so far."""

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Rule:
    """How some of our tensors correspond to some published ones.

    Args:
        ours: names of our tensors.
        theirs: names of the published tensors.
        read: from the published tensors, in this order, to ours.
        write: the inverse of ``read``.
        write_gradients: from our gradients to the published ones; None: ``write``.

    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    read: Convert = tuple
    write: Convert = tuple
    write_gradients: Convert | None = None


@dataclass(frozen=True)
class Unused:
    """A published tensor without counterpart here, because no output depends on it.

    Args:
        name: the published name.
        make: returns the tensor that is written, on the device of the given tensor.
        reason: why no output depends on it; None if that needs no mention, as for a table of constants.

    """

    name: str
    make: Callable[[Tensor], Tensor]
    reason: str | None = None


@dataclass(frozen=True)
class TensorMap:
    """The correspondence of all tensors of one model.

    Args:
        rules: the rules; every tensor is in one of them.
        copies: published names of second copies, and the names of the first (a tied head).
        unused: published tensors without counterpart here; they may be missing in a file.

    """

    rules: tuple[Rule, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[Unused, ...] = ()

    @property
    def remarks(self) -> list[str]:
        """What a user should know of the tensors that are not read."""
        return [
            f"{unused.name} is not read, and written back as zeros: {unused.reason}"
            for unused in self.unused
            if unused.reason is not None
        ]

    def read(
        self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor], *, what: str
    ) -> dict[str, Tensor]:
        """Return our state dict of a published one.

        Args:
            tensors: the published tensors.
            like: our state dict, on the meta device, whose names and shapes are expected.
            what: the source of the tensors, for errors.

        Raises:
            ValueError: tensors are missing, unknown, or of another shape or type (all are listed);
                or a second copy differs from the first.

        """
        expected = self.write(like)
        given = dict(tensors)
        for unused in self.unused:
            if unused.reason is None:  # constants, of which a file may have more or fewer
                given.pop(unused.name, None)
            if unused.name not in given:
                del expected[unused.name]
        for copy, first in self.copies.items():
            del expected[copy]
            second = given.pop(copy, None)
            if second is None:
                continue
            if first in given and not _equal(given[first], second):
                raise ValueError(
                    f"{what}: the configuration ties {copy} to {first}, but the two tensors differ; "
                    "correct the configuration, or remove one of the tensors"
                )
            given.setdefault(first, second)
        check_tensors(given, expected, what=what)
        own = {name: torch.zeros_like(like[name], device="cpu") for name in OWN if name in like}
        return self.convert(given) | own

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return our tensors of published ones, unchecked; rules with missing tensors are left out."""
        found: dict[str, Tensor] = {}
        for rule in self.rules:
            if all(name in tensors for name in rule.theirs):
                found |= zip(rule.ours, rule.read([tensors[name] for name in rule.theirs]), strict=True)
        return found

    def write(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the published tensors of our state dict, which may be on the meta device.

        Raises:
            ValueError: our tensors are not those of the map (all differences are listed).

        """
        ours = {name for rule in self.rules for name in rule.ours}
        given = state.keys() - set(OWN)
        if ours != given:
            lines = [f"{name} has no counterpart in the published format" for name in given - ours]
            lines += [f"{name} is missing" for name in ours - given]
            raise ValueError(
                "the model's tensors cannot be written:" + "".join(f"\n  {x}" for x in sorted(lines))
            )
        found: dict[str, Tensor] = {}
        for rule in self.rules:
            converted = rule.write([state[name] for name in rule.ours])
            found |= zip(rule.theirs, converted, strict=True)
        for copy, first in self.copies.items():
            found[copy] = found[first]
        some = next(iter(state.values()))
        return found | {unused.name: unused.make(some) for unused in self.unused}

    def write_gradients(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of the published tensors, given those of ours.

        Tensors that no output depends on have the gradient 0; second copies have none of their own.
        """
        found: dict[str, Tensor] = {}
        for rule in self.rules:
            write = rule.write_gradients or rule.write
            found |= zip(rule.theirs, write([gradients[name] for name in rule.ours]), strict=True)
        some = next(iter(gradients.values()))
        return found | {unused.name: torch.zeros_like(unused.make(some)) for unused in self.unused}


def _equal(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


# ------------------------------------------------------------------------------------ rules


def rename(ours: str, theirs: str) -> Rule:
    """Return the rule of a tensor that only has another name."""
    return Rule((ours,), (theirs,))


def split_rows(ours: Sequence[str], theirs: str) -> Rule:
    """Return the rule of one published tensor whose rows are those of several of ours, in equal parts."""
    return Rule(
        tuple(ours), (theirs,), lambda whole: whole[0].chunk(len(ours)), lambda own: [torch.cat(list(own))]
    )


def halves_of_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of heads whose rotation pairs channels 2i and 2i + 1 to pairs i and i + P/2.

    ``rows`` (heads · P, …) are a weight, a bias, or their gradients.
    """
    heads: Tensor = rows.unflatten(0, (-1, head_dim // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2)


def pairs_of_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Undo ``halves_of_pairs``."""
    heads: Tensor = rows.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class Heads:
    """Sizes of the rows of queries, keys and values, and how the published rotation pairs the channels.

    Args:
        queries: number of query heads H.
        keys: number of key and value heads K.
        width: head width P.
        adjacent_pairs: whether channels 2i and 2i + 1 are rotated together; False: i and i + P/2, as here.

    """

    queries: int
    keys: int
    width: int
    adjacent_pairs: bool = True

    @property
    def rows(self) -> tuple[int, int, int]:
        """Numbers of rows of q, k and v."""
        return self.queries * self.width, self.keys * self.width, self.keys * self.width

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return our rows: of q, k and v."""
        if self.adjacent_pairs:
            q, k = halves_of_pairs(q, self.width), halves_of_pairs(k, self.width)
        return torch.cat((q, k, v))

    def write(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the published rows of q, k and v."""
        q, k, v = rows.split(self.rows)
        if self.adjacent_pairs:
            q, k = pairs_of_halves(q, self.width), pairs_of_halves(k, self.width)
        return q, k, v

    def joined(self, ours: str, theirs: Sequence[str]) -> Rule:
        """Return the rule of ``in_proj``, published as three tensors q, k and v."""
        return Rule((ours,), tuple(theirs), lambda qkv: [self.read(*qkv)], lambda own: self.write(own[0]))

    def fused(self, ours: str, theirs: str) -> Rule:
        """Return the rule of ``in_proj``, published as one tensor with the rows of q, k and v."""
        return Rule(
            (ours,),
            (theirs,),
            lambda whole: [self.read(*whole[0].split(self.rows))],
            lambda own: [torch.cat(self.write(own[0]))],
        )

    def qk_bias(self, ours: str, theirs: str) -> Rule:
        """Return the rule of the bias of q and k, published as (2, 1, H, P); the format needs K = H."""
        return Rule(
            (ours,), (theirs,), lambda whole: [self._read_qk(whole[0])], lambda own: [self._write_qk(own[0])]
        )

    def all_biases(self, ours: str, theirs: Sequence[str], qk_bias: str) -> Rule:
        """Return the rule of our one bias of q, k and v, published as three biases and one more of q and k.

        The published biases are summed; written back, the one of q and k is zero. The gradients of the two
        are equal.
        """

        def read(given: Sequence[Tensor]) -> list[Tensor]:
            *qkv, more = given
            values = more.new_zeros(self.rows[2])
            return [self.read(*qkv) + torch.cat((self._read_qk(more), values))]

        def write(own: Sequence[Tensor]) -> list[Tensor]:
            return [*self.write(own[0]), own[0].new_zeros(2, 1, self.queries, self.width)]

        def write_gradients(own: Sequence[Tensor]) -> list[Tensor]:
            return [*self.write(own[0]), self._write_qk(own[0][: sum(self.rows[:2])])]

        return Rule((ours,), (*theirs, qk_bias), read, write, write_gradients)

    def _read_qk(self, bias: Tensor) -> Tensor:
        rows = bias.flatten()
        return halves_of_pairs(rows, self.width) if self.adjacent_pairs else rows

    def _write_qk(self, rows: Tensor) -> Tensor:
        rows = pairs_of_halves(rows, self.width) if self.adjacent_pairs else rows
        return rows.view(2, 1, self.queries, self.width)


def rotation_table(
    length: int, *, width: int, base: float, condense: float = 1.0
) -> Callable[[Tensor], Tensor]:
    """Return a function that makes the published table of rotations (1, length, 1, P/2, 2), float32.

    The published codes store cosines and sines with the weights, computed in float32.
    """

    def make(like: Tensor) -> Tensor:
        exponent = torch.arange(0, width, 2, dtype=torch.float32, device=like.device) / width
        positions = torch.arange(length, dtype=torch.float32, device=like.device) / condense
        angles = torch.outer(positions, 1.0 / (base**exponent))
        return torch.stack((angles.cos(), angles.sin()), dim=-1)[None, :, None]

    return make


def zeros(*shape: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a tensor of zeros."""
    return lambda like: like.new_zeros(shape)
