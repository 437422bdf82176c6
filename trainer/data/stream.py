"""A dataset tokenized as it comes, for those who accept an approximate resume.

The documents are the dataset's, shuffled in a buffer, tokenized, put in a row and cut into samples as those
of `trainer.data.tokens`; at its end the dataset begins anew, in another order. Nothing of that is on the
disk, so a position can only be reached by reading on. Up to `EXACT` samples are tokenized and dropped, which
is exact; a longer way is gone by skipping documents, their tokens estimated from their characters: a resumed
run then sees some samples again, or misses some. Every rank reads the whole stream. Write the tokens first,
by `python -m trainer.tokenize`, for an exact resume and for many ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.describing import check_vocabulary
from trainer.data.source import IGNORED, Batch, DataSource, EvaluationSet, check_range
from trainer.data.tokenizing.documents import load_dataset
from trainer.data.tokenizing.tokenizers import Tokenizer, load_tokenizer
from trainer.data.tokens import TokenData

if TYPE_CHECKING:
    from trainer.specs.data import StreamSpec
    from trainer.specs.run import EvaluationSpec

EXACT = 4096
"""Samples that are read and dropped to reach a position; more are skipped by estimate."""
_SAMPLED = 64  # documents whose tokens a character are measured
_AT_ONCE = 64  # documents tokenized together

Documents = Literal["ignore", "reset"]


class ApproximateResumeWarning(UserWarning):
    """A run on a stream does not go on exactly where it stopped."""


class StreamData(DataSource):
    """Samples of a dataset as they come.

    Args:
        dataset: iterable Hugging Face dataset.
        name: what to call it.
        text_field: of its rows.
        tokenizer: makes the ids.
        length: L, tokens in a sample's inputs.
        seed: of the order.
        shuffle_buffer: documents among which the next one is drawn; 0: as they stand.
        documents: see `TokenData`.
        validation: where the evaluation sets come from; None: there are none.

    """

    def __init__(
        self,
        dataset: Any,
        *,
        name: str,
        text_field: str,
        tokenizer: Tokenizer,
        length: int,
        seed: int = 0,
        shuffle_buffer: int = 0,
        documents: Documents = "ignore",
        validation: TokenData | None = None,
    ) -> None:
        self._name, self._text_field = name, text_field
        if shuffle_buffer:
            dataset = dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
        self._dataset, self._tokenizer = dataset, tokenizer
        self._length, self._documents, self._validation = length, documents, validation
        self._restart()

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self._tokenizer.vocab_size

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return self._length

    @property
    def samples(self) -> None:
        """None: how much there is isn't known."""
        return None

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`; a position other than the next one costs time, far ones are approximate.

        Raises:
            ValueError: the dataset can't be read, or holds no text.

        """
        check_range(position, count)
        if position < self._position:
            self._restart()
        if self._begins and position > EXACT:
            self._skip(position)
        while self._position < position:
            self._next()
        rows = [self._next() for _ in range(count)]
        inputs, labels, documents = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
        return Batch(
            inputs=inputs, labels=labels, documents=None if self._documents == "ignore" else documents
        )

    def identity(self) -> Mapping[str, Any]:
        """See `DataSource.identity`: the tokenizer's content, which the spec names by its path alone."""
        return {"tokenizer": self._tokenizer.identity["sha256"]}

    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Those of the validation tokens, if there are any."""
        return {} if self._validation is None else self._validation.evaluation_sets(evaluation)

    def _restart(self) -> None:
        self._texts = self._read()
        self._position = 0
        self._begins = True  # once it is on its way, what other ranks take is read and dropped, however much
        # Tokens read but not yet given, and which document each is of.
        self._ids: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._numbers: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._ended = 0

    def _read(self) -> Iterator[str]:
        """Texts without end, epoch after epoch."""
        epoch = 0
        while True:
            self._dataset.set_epoch(epoch)
            found = False
            for row in self._rows():
                text = row.get(self._text_field)
                if not isinstance(text, str):
                    raise ValueError(
                        f"a row of dataset {self._name} has no text in field {self._text_field!r}; it has "
                        f"{', '.join(row)}; set data.text_field"
                    )
                if text.strip():
                    found = True
                    yield text
            if not found:
                raise ValueError(f"dataset {self._name} holds no text; check data.split and data.text_field")
            epoch += 1

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        try:
            yield from self._dataset
        except Exception as error:  # the package raises whatever reading and downloading raise
            raise ValueError(
                f"dataset {self._name} can't be read further ({type(error).__name__}: {error}); resume the "
                "run when it can"
            ) from error

    def _next(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Give inputs, labels and documents of the next sample."""
        parts, numbers = [self._ids], [self._numbers]
        held = len(self._ids)
        while held < self._length + 1:
            for ids in self._tokenizer.encode([next(self._texts) for _ in range(_AT_ONCE)]):
                parts += [ids.astype(np.int64), np.array([self._tokenizer.end_of_document])]
                numbers.append(np.full(len(ids) + 1, self._ended, dtype=np.int64))
                self._ended += 1
                held += len(ids) + 1
        self._ids, self._numbers = np.concatenate(parts), np.concatenate(numbers)
        self._begins = False
        tokens, of = self._ids[: self._length + 1].copy(), self._numbers[: self._length + 1].copy()
        self._ids, self._numbers = self._ids[self._length :], self._numbers[self._length :]
        self._position += 1
        labels = tokens[1:].copy()
        if self._documents == "reset":
            labels[of[1:] != of[:-1]] = IGNORED
        return tokens[:-1], labels, of[:-1] - of[0]

    def _skip(self, position: int) -> None:
        """Read on without tokenizing, until about as many tokens have gone by as the position says."""
        warnings.warn(
            f"going on with dataset {self._name} near sample {position}, not exactly there: it is streamed, "
            "so documents are skipped by an estimate of their tokens; some samples come again or are missed",
            ApproximateResumeWarning,
            stacklevel=3,
        )
        wanted = (position - self._position) * self._length - len(self._ids)
        texts = [next(self._texts) for _ in range(_SAMPLED)]
        tokens = sum(len(ids) + 1 for ids in self._tokenizer.encode(texts))
        characters = sum(map(len, texts))
        gone, wanted = characters, int(wanted * characters / max(1, tokens))
        while gone < wanted:
            gone += len(next(self._texts))
        self._ids, self._numbers = self._ids[:0], self._numbers[:0]
        self._position, self._begins = position, False


def build(spec: StreamSpec, *, seed: int = 0, vocab_size: int | None = None) -> StreamData:
    """Open the dataset that a `data` section names, and warn that a resume will be approximate.

    Args:
        spec: the section.
        seed: of the order.
        vocab_size: the model's; must hold the tokenizer's.

    Raises:
        ValueError: no such dataset or tokenizer, a vocabulary that is too small, other held-out tokens.

    """
    tokenizer = load_tokenizer(spec.tokenizer, end_of_document=spec.end_of_document)
    check_vocabulary(tokenizer.vocab_size, vocab_size, what=f"tokenizer {spec.tokenizer}")
    validation = None
    if spec.validation_path is not None:
        # A view of itself: what it would train on is what is evaluated on.
        validation = TokenData(
            spec.validation_path,
            length=spec.seq_len,
            vocab_size=vocab_size,
            validation_path=spec.validation_path,
            documents=spec.documents,
            tokenizer=spec.tokenizer,
            check_sums=True,
        )
    dataset = load_dataset(spec.dataset, split=spec.split, config=spec.config, streaming=True)
    warnings.warn(
        f"dataset {spec.dataset} is streamed: a resumed run goes on near where it stopped, not exactly "
        "there; write the tokens by python -m trainer.tokenize for an exact resume",
        ApproximateResumeWarning,
        stacklevel=2,
    )
    return StreamData(
        dataset,
        name=spec.dataset,
        text_field=spec.text_field,
        tokenizer=tokenizer,
        length=spec.seq_len,
        seed=seed,
        shuffle_buffer=spec.shuffle_buffer,
        documents=spec.documents,
        validation=validation,
    )
