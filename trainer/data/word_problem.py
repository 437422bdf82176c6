"""Word problems: track the product of a sequence of group elements, generated on the fly.

Token j is an element x_j; the label at j is the prefix product ``t_1 = x_1``, ``t_j = t_{j-1} ∘ x_j``,
aligned with the inputs, without a shift. With a monoid M beside the group G a token is a pair with ID
``|M|·g + m`` (for the published monoid ``4·g + m``). A token's group element is the identity with
probability p and otherwise uniform over G, including the identity: p = 0.9 is the paper's "10 % hard
tokens". Its monoid element is always uniform.

Task and conventions: Schöne et al., "Implicit Language Models are RNNs" (ICML 2025), Figs. 1 and 3, after
Merrill et al., "The Illusion of State in State-Space Models" (2024). Shapes: B sequences, L tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.describing import check_vocabulary
from trainer.data.generated import BLOCK, EVALUATION, TRAINING
from trainer.data.prefix_products import PrefixProducts
from trainer.data.published_order import PublishedSequence, draw
from trainer.data.random_tokens import Categorical
from trainer.data.source import Batch, EndlessSource, EvaluationSet, check_range
from trainer.specs import groups

if TYPE_CHECKING:
    from trainer.specs.groups import WordProblemSpec
    from trainer.specs.run import EvaluationSpec

DrawOrder = Literal["fast", "published"]
Sequences = tuple[torch.Tensor, torch.Tensor]
"""Inputs and labels, (B, L), of the same integer type."""

_JOINT_LIMIT = 1024  # maximum order for a joint table of G × M: 8 MB, and half the look-ups of two tables
_DTYPES = {torch.uint8: 8, torch.int16: 15, torch.int32: 31, torch.int64: 63}


class WordProblem:
    """A word problem over a group, optionally times a monoid.

    Args:
        group: a name such as ``"S5"``, ``"A5"``, ``"A5xZ2"``, generators, or a multiplication table; see
            `trainer.specs.groups.group`.
        monoid: None, ``"EABX"`` (the published one), or a multiplication table; see
            `trainer.specs.groups.monoid`.
        identity_probability: p, from 0 to 1; several: they alternate from sequence to sequence.
        draw_order: ``"fast"``, or ``"published"`` to reproduce the published generator's numbers exactly, at
            about a third of the speed; p is then resolved to 2^-24, as by torch's `rand`.

    Raises:
        ValueError: an unknown group, monoid or order; a probability outside [0, 1]; none, or several in the
            published order.

    """

    def __init__(
        self,
        *,
        group: groups.Definition,
        monoid: str | Sequence[Sequence[int]] | None = None,
        identity_probability: float | Sequence[float],
        draw_order: DrawOrder = "fast",
    ) -> None:
        several = (
            identity_probability if isinstance(identity_probability, Sequence) else [identity_probability]
        )
        if not several or not all(0 <= p <= 1 for p in several):
            raise ValueError(f"identity_probability must be from 0 to 1, got {identity_probability}")
        if draw_order == "published" and len(several) > 1:
            raise ValueError(
                f"the published order has one identity_probability, got {list(several)}; use "
                "draw_order 'fast'"
            )
        if draw_order not in get_args(DrawOrder):
            raise ValueError(f"draw_order {draw_order!r} is unknown; use 'fast' or 'published'")
        self.group = groups.group(group)
        self.monoid = None if monoid is None else groups.monoid(monoid)
        self.identity_probabilities = tuple(float(p) for p in several)
        self.draw_order: DrawOrder = draw_order
        self._definition = group, monoid
        self._monoid_order = 1 if self.monoid is None else self.monoid.order
        self._categorical = (
            [Categorical(self._probabilities(p)) for p in self.identity_probabilities]
            if draw_order == "fast"
            else []
        )
        self._scans: tuple[PrefixProducts, ...]
        if self.monoid is None:
            self._scans = (PrefixProducts(self.group),)
        elif self.vocab_size <= _JOINT_LIMIT:
            self._scans = (PrefixProducts(groups.product(self.group, self.monoid)),)
        else:
            self._scans = (PrefixProducts(self.group), PrefixProducts(self.monoid))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, |G|·|M|."""
        return self.group.order * self._monoid_order

    def with_identity_probability(self, identity_probability: float) -> WordProblem:
        """Return the same problem with another p."""
        group, monoid = self._definition
        return WordProblem(
            group=group, monoid=monoid, identity_probability=identity_probability, draw_order=self.draw_order
        )

    def sample(
        self,
        n: int,
        length: int,
        generator: torch.Generator | None = None,
        *,
        dtype: torch.dtype = torch.int64,
    ) -> Sequences:
        """Draw `n` sequences of `length` tokens.

        The published order draws all numbers from `generator`. The fast order draws a single 64-bit number
        from it as the key of a counter-based stream, so the sequences do not depend on the number of threads.

        Args:
            n: number of sequences, at least 1.
            length: tokens per sequence, at least 1.
            generator: a CPU generator; None uses torch's default one.
            dtype: int64, or a smaller type that fits the vocabulary (uint8, int16, int32), which saves memory
                and a little time.

        Returns:
            Inputs and labels, (n, length), on the CPU.

        Raises:
            ValueError: `n` or `length` is below 1, the dtype is too small, or the generator is not on the
                CPU.

        """
        check_range(0, n)
        _check_length(length)
        self._check_dtype(dtype)
        if generator is not None and generator.device.type != "cpu":
            raise ValueError(
                f"the generator is on {generator.device} but word problems are drawn on the CPU; "
                "use torch.Generator()"
            )
        if self.draw_order == "published":
            tokens = draw(
                n,
                length,
                group_order=self.group.order,
                monoid_order=self._monoid_order,
                p=self.identity_probabilities[0],
                generator=generator,
            )
            return self._compose(tokens, dtype=dtype)
        seed = int(torch.randint(2**63 - 1, (), generator=generator))
        return self._fast(0, n, length, key=(seed, TRAINING), dtype=dtype)

    def _probabilities(self, identity_probability: float) -> list[Fraction]:
        p = Fraction(identity_probability)  # exact: a float is a dyadic fraction
        other = (1 - p) / self.group.order / self._monoid_order
        identity = other + p / self._monoid_order
        return [identity] * self._monoid_order + [other] * (self.vocab_size - self._monoid_order)

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in _DTYPES or self.vocab_size > 1 << _DTYPES[dtype]:
            fitting = [str(d) for d, bits in _DTYPES.items() if self.vocab_size <= 1 << bits]
            raise ValueError(
                f"dtype {dtype} is too small for a vocabulary of {self.vocab_size}; use {', '.join(fitting)}"
            )

    def _fast(
        self,
        position: int,
        count: int,
        length: int,
        *,
        key: tuple[int, int],
        dtype: torch.dtype = torch.int64,
    ) -> Sequences:
        """Draw positions [position, position + count) of the stream with this key, block by block."""
        inputs, labels = _empty(count, length, dtype)
        into_inputs, into_labels = inputs.numpy(), labels.numpy()
        done = 0
        while done < count:
            block, skipped = divmod(position + done, BLOCK)
            taken = min(BLOCK - skipped, count - done)
            tokens_LB = self._block(key, block, length)[:, skipped : skipped + taken]
            into_inputs[done : done + taken] = tokens_LB.T
            self._products(tokens_LB, into_labels[done : done + taken])
            done += taken
        return inputs, labels

    def _block(self, key: tuple[int, int], index: int, length: int) -> npt.NDArray[np.unsignedinteger]:
        """Draw the tokens of a block, (length, BLOCK); probabilities alternate from column to column."""
        count = len(self._categorical)
        drawn = [
            one.draw(key, index=index, count=length * BLOCK).reshape(length, BLOCK)
            for one in self._categorical
        ]
        for number, tokens_LB in enumerate(drawn[1:], 1):
            drawn[0][:, number::count] = tokens_LB[:, number::count]
        return drawn[0]

    def _compose(self, tokens_BL: npt.NDArray[np.int64], *, dtype: torch.dtype = torch.int64) -> Sequences:
        """Compute inputs and labels of drawn tokens, in blocks that fit the cache."""
        inputs, labels = _empty(len(tokens_BL), tokens_BL.shape[1], dtype)
        inputs.numpy()[:] = tokens_BL
        into_labels = labels.numpy()
        for start in range(0, len(tokens_BL), BLOCK):
            rows = slice(start, start + BLOCK)
            self._products(tokens_BL[rows].T, into_labels[rows])
        return inputs, labels

    def _products(self, tokens_LB: npt.NDArray[np.integer], into_BL: npt.NDArray[np.integer]) -> None:
        if len(self._scans) == 1:
            into_BL[:] = self._scans[0](tokens_LB).T
        else:
            of_group, of_monoid = self._scans
            group_LB, monoid_LB = np.divmod(tokens_LB, self._monoid_order)
            into_BL[:] = (of_group(group_LB) * self._monoid_order + of_monoid(monoid_LB)).T


class WordProblemStream(EndlessSource):
    """An endless, reproducible stream of a word problem's sequences at numbered positions.

    Fast order: position i is in block ``i // 128``, whose random numbers are Philox's for the key (seed,
    domain) and the counter (block), so any range costs only its own blocks and does not depend on batches,
    ranks or restarts. A block is drawn time first, so the sequences of a longer stream begin with those of a
    shorter one of the same seed and p. Training and evaluation are different domains and never share data,
    even with equal seeds.

    Published order: position i is the i-th sample that the published generator draws after
    ``torch.manual_seed(seed)``. Jumps take time (see `PublishedSequence`), and evaluation needs a different
    seed than training, otherwise it evaluates on training data.

    Args:
        problem: the word problem.
        length: tokens per sequence.
        seed: 0 to 2^64 - 1.

    """

    def __init__(self, problem: WordProblem, *, length: int, seed: int, _domain: int = TRAINING) -> None:
        _check_length(length)
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed {seed} is out of range; use 0 to 2**64 - 1")
        super().__init__(length=length)
        self.problem = problem
        self._key = seed, _domain
        self._published: PublishedSequence | None = None
        if problem.draw_order == "published":
            self._published = PublishedSequence(
                length,
                group_order=problem.group.order,
                monoid_order=problem.vocab_size // problem.group.order,
                p=problem.identity_probabilities[0],
                seed=seed,
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, |G|·|M|."""
        return self.problem.vocab_size

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`."""
        check_range(position, count)
        if self._published is not None:
            inputs, labels = self.problem._compose(self._published.tokens(position, count))
        else:
            inputs, labels = self.problem._fast(position, count, self._length, key=self._key)
        return Batch(inputs=inputs, labels=labels)

    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Return one set per identity probability and length, named like ``p0.5_L64``.

        All sets use the evaluation seed, so in the fast order the sets of one p begin with the same tokens at
        every length.

        Raises:
            ValueError: the published order with equal seeds for evaluation and training.

        """
        if self._published is not None and evaluation.seed == self._key[0]:
            raise ValueError(
                f"in the published order, evaluation with the training seed {evaluation.seed} would "
                "use training data; change evaluation.seed or training.seed, or set "
                "data.draw_order=fast"
            )
        sets = {}
        for p in evaluation.identity_probabilities or self.problem.identity_probabilities:
            problem = self.problem.with_identity_probability(p)
            for length in evaluation.lengths or (self._length,):
                name = f"p{p:g}_L{length}"
                sets[name] = EvaluationSet(
                    name=name,
                    source=WordProblemStream(
                        problem, length=length, seed=evaluation.seed, _domain=EVALUATION
                    ),
                    sequences=evaluation.sequences,
                    settings={"identity_probability": p, "length": length},
                )
        return sets


def build(spec: WordProblemSpec, *, seed: int = 0, vocab_size: int | None = None) -> WordProblemStream:
    """Build the training stream of a `data` section.

    Args:
        spec: the section.
        seed: seed of the training sequences.
        vocab_size: vocabulary size of the model, checked if given.

    Raises:
        ValueError: as `WordProblem`; the model's vocabulary is too small.

    """
    problem = WordProblem(
        group=spec.group,
        monoid=spec.monoid,
        identity_probability=spec.identity_probability,
        draw_order=spec.draw_order,
    )
    check_vocabulary(problem.vocab_size, vocab_size, what="the word problem")
    return WordProblemStream(problem, length=spec.seq_len, seed=seed)


def _empty(count: int, length: int, dtype: torch.dtype) -> Sequences:
    return torch.empty((count, length), dtype=dtype), torch.empty((count, length), dtype=dtype)


def _check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
