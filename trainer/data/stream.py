"""A dataset tokenized on the fly, for runs that accept an approximate resume.

Documents are shuffled in a buffer, tokenized, concatenated and cut into samples like those of
`trainer.data.tokens`; at its end the dataset restarts in another order. Nothing is stored on disk, so a
position can only be reached by reading up to it. Up to `EXACT` samples are tokenized and dropped, which is
exact. Larger distances skip documents whose token counts are estimated from their characters: a resumed run
then repeats or misses some samples. Every rank reads the whole stream. For an exact resume or many ranks,
write tokens first by `python -m trainer.tokenize`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.describing import check_vocabulary
from trainer.data.source import IGNORED, Batch, EndlessSource, EvaluationSet, check_range
from trainer.data.tokenizing.reading import load_dataset
from trainer.data.tokenizing.tokenizers import Tokenizer, load_tokenizer
from trainer.data.tokens import TokenData

if TYPE_CHECKING:
    from trainer.specs.data import StreamSpec
    from trainer.specs.run import EvaluationSpec

EXACT = 4096
"""Maximum number of samples that are read and dropped to reach a position; beyond it, documents are
skipped."""
_SAMPLED = 64  # documents for estimating tokens per character
_AT_ONCE = 64  # documents tokenized together

Documents = Literal["ignore", "reset"]


class ApproximateResumeWarning(UserWarning):
    """Resuming a run on a stream is not exact."""


class StreamData(EndlessSource):
    """Samples of a streamed dataset.

    Args:
        dataset: iterable Hugging Face dataset.
        name: name used in messages.
        text_field: field that contains the text.
        tokenizer: the tokenizer.
        length: L, number of input tokens per sample.
        seed: seed of the order.
        shuffle_buffer: size of the shuffle buffer in documents; 0: no shuffling.
        documents: see `TokenData`.
        validation: source of the evaluation sets; None: no evaluation sets.

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
        super().__init__(length=length)
        self._name, self._text_field = name, text_field
        if shuffle_buffer:
            dataset = dataset.shuffle(seed=seed, buffer_size=shuffle_buffer)
        self._dataset, self._tokenizer = dataset, tokenizer
        self._documents, self._validation = documents, validation
        self._restart()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self._tokenizer.vocab_size

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`; jumps take time, and large jumps are approximate.

        Raises:
            ValueError: the dataset cannot be read, or contains no text.

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
        """See `DataSource.identity`: the tokenizer's content, which the spec references only by path."""
        return {"tokenizer": self._tokenizer.identity["sha256"]}

    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Return the sets of the validation tokens, if any."""
        return {} if self._validation is None else self._validation.evaluation_sets(evaluation)

    def _restart(self) -> None:
        self._texts = self._read()
        self._position = 0
        self._begins = True  # later, the samples of other ranks are always read and dropped
        # Tokens that are read but not yet returned, and the document of each.
        self._ids: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._numbers: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._ended = 0

    def _read(self) -> Iterator[str]:
        """Yield texts endlessly, epoch after epoch."""
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
                raise ValueError(
                    f"dataset {self._name} contains no text; check data.split and data.text_field"
                )
            epoch += 1

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        try:
            yield from self._dataset
        except Exception as error:  # the package raises whatever reading and downloading raise
            raise ValueError(
                f"dataset {self._name} cannot be read further ({type(error).__name__}: {error}); resume the "
                "run when it is available"
            ) from error

    def _next(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return inputs, labels and documents of the next sample."""
        parts, numbers = [self._ids], [self._numbers]
        buffered = len(self._ids)
        while buffered < self._length + 1:
            for ids in self._tokenizer.encode([next(self._texts) for _ in range(_AT_ONCE)]):
                parts += [ids.astype(np.int64), np.array([self._tokenizer.end_of_document])]
                numbers.append(np.full(len(ids) + 1, self._ended, dtype=np.int64))
                self._ended += 1
                buffered += len(ids) + 1
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
        """Skip documents without tokenizing until about the given position."""
        warnings.warn(
            f"resuming dataset {self._name} near sample {position}, not exactly at it: the dataset is "
            "streamed, so documents are skipped by estimated token counts; some samples are repeated or "
            "missed",
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
    """Open the dataset of a `data` section and warn that resuming is approximate.

    Args:
        spec: the section.
        seed: seed of the order.
        vocab_size: vocabulary size of the model; must cover the tokenizer's.

    Raises:
        ValueError: the dataset or tokenizer does not exist, the vocabulary is too small, or the held-out
            tokens have another tokenizer.

    """
    tokenizer = load_tokenizer(spec.tokenizer, end_of_document=spec.end_of_document)
    check_vocabulary(tokenizer.vocab_size, vocab_size, what=f"tokenizer {spec.tokenizer}")
    validation = None
    if spec.validation_path is not None:
        # Its own validation set: evaluation reads exactly these tokens.
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
        f"dataset {spec.dataset} is streamed: a resumed run continues near the point where it stopped, not "
        "exactly at it; write the tokens by python -m trainer.tokenize for an exact resume",
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
