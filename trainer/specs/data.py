"""The `data` section of a run spec: training data sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from implicit_blocks.specs import ComponentSpec, Spec, field_error

Probability = Annotated[float, Field(ge=0, le=1)]
BabiTask = Annotated[int, Field(ge=1, le=20)]


class DataSpec(ComponentSpec):
    """Base class of all data source specs."""

    family: ClassVar[str] = "data"
    builds: ClassVar[str | None] = "trainer.data.source:DataSource"
    changeable: ClassVar[frozenset[str]] = frozenset()
    """Fields that a training phase may change. Every position must be readable with any of their values."""
    finite: ClassVar[bool] = False
    """Whether the data have epochs, whose size `epoch_sequences` returns."""

    seq_len: PositiveInt
    """Tokens per training sequence."""

    @property
    def vocab_size(self) -> int | None:
        """Number of token IDs, or None if the spec alone does not determine it."""
        return None

    @property
    def task(self) -> str | None:
        """Task that the data define, or None for general text.

        Weights trained on a different task are of no use for these data.

        """
        return None

    def epoch_sequences(self) -> int:
        """Return the number of sequences per epoch of `finite` data, which are read for it.

        Raises:
            ValueError: the data cannot be read.

        """
        raise NotImplementedError(f"data of kind {self.kind!r} are declared finite without epoch_sequences")

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """Describe the data for a dry run and check them as far as possible without torch.

        Args:
            sequences: number of sequences in the run.
            vocab_size: vocabulary size of the model, if it has one.

        Raises:
            ValueError: the data are specified but cannot be used.

        """
        return [f"{self.kind}, length {self.seq_len:,}"]


class CatbAbISpec(DataSpec):
    """bAbI's twenty tasks as one stream: stories are shuffled and concatenated."""

    changeable: ClassVar[frozenset[str]] = frozenset({"seq_len", "tasks"})
    finite: ClassVar[bool] = True

    kind: Literal["catbabi"] = "catbabi"
    path: str | None = None
    """The archive en-valid-10k.tar.xz or its extracted directory; null: set on the command line."""
    seq_len: PositiveInt = 200
    """Tokens per training sequence."""
    scoring: Literal["answers", "all"] = "answers"
    """Positions in the training loss: the answers only (QA mode), or every next word. Accuracy is always
    measured on the answers, overall and per task."""
    held_out: Literal["valid", "test"] = "valid"
    """Split to evaluate on. Do not tune on the test split."""
    tasks: Annotated[tuple[BabiTask, ...], Field(min_length=1)] | None = None
    """Tasks to train on; null: all twenty, once each. The stories of a task listed n times occur n times per
    epoch. The evaluation split always contains every task once."""

    @property
    def task(self) -> str:
        """Answers to the questions of bAbI."""
        return "answers in catbAbI"

    def epoch_sequences(self) -> int:
        """See `DataSpec.epoch_sequences`."""
        from trainer.data.babi import build  # imports torch

        return build(self).samples

    @field_validator("tasks")
    @classmethod
    def _in_order(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Sort the tasks, so that the same tasks give equal specs."""
        return None if value is None else tuple(sorted(value))

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        counts = Counter(self.tasks or ())
        named = (str(task) if times == 1 else f"{task} ({times} times)" for task, times in counts.items())
        tasks = "" if self.tasks is None else f", of tasks {', '.join(named)}"
        return [f"{self.kind}, length {self.seq_len:,}{tasks}"]


Documents = Literal["ignore", "reset"]


class TokensSpec(DataSpec):
    """Text as memory-mapped token IDs, as written by `python -m trainer.tokenize`."""

    finite: ClassVar[bool] = True

    kind: Literal["tokens"] = "tokens"
    path: str | None = None
    """File or directory of token IDs; null: set on the command line by `data.path=DIR`."""
    validation_path: str | None = None
    """File or directory of held-out token IDs; null: the validation split beside the training split, if
    any."""
    seq_len: PositiveInt = 2048
    """Tokens per training sequence."""
    documents: Documents = "ignore"
    """`reset` separates the documents in a row: states are reset, attention is masked across documents, and
    the first token of a document is not predicted."""
    tokenizer: str | None = None
    """Tokenizer that the files must have been written with: a tokenizer.json, a directory, or `bytes`; null:
    any."""
    check_sums: bool = True
    """Verify the files against the checksums in their manifest before training, once per unchanged file;
    sizes are always checked."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Integer type of the IDs in the files; null: as declared by the files."""

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        from trainer.data.describing import describe_tokens

        return describe_tokens(self, sequences=sequences, vocab_size=vocab_size)

    def epoch_sequences(self) -> int:
        """See `DataSpec.epoch_sequences`."""
        from trainer.data.describing import count_sequences

        return count_sequences(self)


class ChatSpec(DataSpec):
    """Conversations for fine-tuning, written by `python -m trainer.tokenize --chat`.

    Rows hold complete conversations, which are separate documents: no token sees another conversation.

    """

    finite: ClassVar[bool] = True

    kind: Literal["chat"] = "chat"
    path: str | None = None
    """Directory of conversations; null: set on the command line by `data.path=DIR`."""
    validation_path: str | None = None
    """Directory of held-out conversations; null: the validation split beside the training split, if any."""
    seq_len: PositiveInt = 2048
    """Tokens per row. Longer conversations are truncated, and left out if no answer remains."""
    packing: bool = True
    """Put several conversations into a row, as many as fit; false: one, and padding."""
    scoring: Literal["answers", "all"] = "answers"
    """Positions in the training loss: the answers, or all tokens. Evaluation always scores the answers."""
    tokenizer: str | None = None
    """As for `tokens`."""
    check_sums: bool = True
    """As for `tokens`."""

    @property
    def documents(self) -> Documents:
        """`reset`: conversations are separate documents."""
        return "reset"

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        from trainer.data.describing import describe_chat

        return describe_chat(self, sequences=sequences, vocab_size=vocab_size)

    def epoch_sequences(self) -> int:
        """See `DataSpec.epoch_sequences`."""
        from trainer.data.describing import open_chat

        return len(open_chat(self, vocab_size=None))


class MixtureSourceSpec(Spec):
    """One source of a mixture."""

    weight: float
    """Sampling weight relative to the other sources; must be positive."""
    name: str | None = None
    """Name in logs and metrics; null: `source0`, `source1`, … by index."""
    data: DataSpec
    """The data source. Its seq_len defaults to that of the mixture and must equal it."""

    @field_validator("weight")
    @classmethod
    def _above_zero(cls, weight: float) -> float:
        if weight <= 0:
            raise ValueError("weight must be positive; remove the source to exclude it")
        return weight


class MixtureSpec(DataSpec):
    """Samples from several sources in proportion to their weights, in an order determined by the seed."""

    kind: Literal["mixture"] = "mixture"
    sources: Annotated[tuple[MixtureSourceSpec, ...], Field(min_length=1)]
    """Sources of the mixture."""
    seq_len: PositiveInt = 2048
    """Tokens per training sequence, for all sources."""

    @property
    def vocab_size(self) -> int | None:
        """Largest vocabulary of the sources, or None if any is unknown."""
        sizes = [source.data.vocab_size for source in self.sources]
        known = [size for size in sizes if size is not None]
        return max(known) if len(known) == len(sizes) else None

    @property
    def task(self) -> str | None:
        """Task of the sources, or None if they differ."""
        tasks = {source.data.task for source in self.sources}
        return tasks.pop() if len(tasks) == 1 else None

    @property
    def documents(self) -> Documents:
        """`reset` if all sources with documents separate them."""
        found = {getattr(source.data, "documents", None) for source in self.sources} - {None}
        return "reset" if found == {"reset"} else "ignore"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources in logs and metrics."""
        return tuple(source.name or f"source{index}" for index, source in enumerate(self.sources))

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        from trainer.data.apportionment import BLOCK, apportion

        parts, lines = apportion([source.weight for source in self.sources]), []
        for name, source, part in zip(self.names, self.sources, parts, strict=True):
            share = part / BLOCK
            described = source.data.describe(sequences=round(sequences * share), vocab_size=vocab_size)
            lines += [f"{share:6.2%} {name}: {described[0]}", *(f"       {line}" for line in described[1:])]
        return lines

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, value: Any) -> Any:
        """Set the seq_len of sources that do not set it to that of the mixture."""
        if not isinstance(value, Mapping) or not isinstance(value.get("sources"), list | tuple):
            return value
        length = value.get("seq_len", cls.model_fields["seq_len"].default)
        sources = [
            {**source, "data": {"seq_len": length, **source["data"]}}
            if isinstance(source, Mapping) and isinstance(source.get("data"), Mapping)
            else source
            for source in value["sources"]
        ]
        return {**value, "sources": sources}

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        for index, source in enumerate(self.sources):
            if source.data.seq_len != self.seq_len:
                message = f"the seq_len of the mixture is {self.seq_len}; use the same value here, or omit it"
                raise field_error(message, "sources", index, "data", "seq_len", value=source.data.seq_len)
            if self.names.index(self.names[index]) != index:
                message = "source names must be unique; rename this source"
                raise field_error(message, "sources", index, "name", value=source.name)
        return self


class StreamSpec(DataSpec):
    """A Hugging Face dataset tokenized on the fly; resuming a run is approximate."""

    kind: Literal["stream"] = "stream"
    dataset: str
    """Dataset name on the Hugging Face Hub, or a directory of data files or of `save_to_disk`."""
    config: str | None = None
    """Configuration name of a Hub dataset."""
    split: str = "train"
    """Dataset split."""
    text_field: str = "text"
    """Field that contains the text."""
    tokenizer: str
    """A tokenizer.json, a directory that contains one, or `bytes`."""
    end_of_document: str | None = None
    """Token appended to each document; null: the tokenizer's end-of-text token."""
    shuffle_buffer: NonNegativeInt = 10_000
    """Size of the shuffle buffer in documents; 0: no shuffling."""
    seq_len: PositiveInt = 2048
    """Tokens per training sequence."""
    documents: Documents = "ignore"
    """As for `tokens`."""
    validation_path: str | None = None
    """Held-out token files; null: none."""

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        from trainer.data.describing import describe_stream

        return describe_stream(self, vocab_size=vocab_size)
