"""What the model is trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from implicit_blocks.specs import ComponentSpec, Spec, field_error
from trainer.data import groups

Probability = Annotated[float, Field(ge=0, le=1)]
BabiTask = Annotated[int, Field(ge=1, le=20)]


class DataSpec(ComponentSpec):
    """Base of all data sources' specs."""

    family: ClassVar[str] = "data"
    builds: ClassVar[str | None] = "trainer.data.source:DataSource"
    changeable: ClassVar[frozenset[str]] = frozenset()
    """Fields that a phase of training may change; any position can then be read with any of their values."""

    seq_len: PositiveInt
    """Tokens in a training sequence."""

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids, where the spec alone tells it."""
        return None

    @property
    def task(self) -> str | None:
        """What is asked for, where answers to something else are of no use here; None: text, of any kind."""
        return None

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """Say in words what the data are, for a dry run, and check them as far as that takes no torch.

        Args:
            sequences: how many the run takes.
            vocab_size: the model's, where it has one.

        Raises:
            ValueError: the data are named but can't be used.

        """
        return [f"{self.kind}, length {self.seq_len:,}"]


class WordProblemSpec(DataSpec):
    """Prefix products in a finite group, optionally times a monoid: generated as they are needed."""

    changeable: ClassVar[frozenset[str]] = frozenset({"seq_len", "identity_probability"})

    kind: Literal["word_problem"] = "word_problem"
    group: str | tuple[tuple[int, ...], ...]
    """S_n, A_n, Z_n or a product: S3, A5, Z7, A5xZ2. Or a table of rows, the identity first."""
    monoid: str | tuple[tuple[int, ...], ...] | None = None
    """A monoid to multiply the group with: EABX (the published one), or a table of rows."""
    identity_probability: Probability = 0.5
    """Share of tokens forced to the group's identity; the others are uniform over the group."""
    draw_order: Literal["fast", "published"] = "fast"
    """`published` draws bit by bit what the published generator draws, at about a third of the speed."""

    @property
    def vocab_size(self) -> int:
        """|G|·|M|."""
        return groups.group_order(self.group) * (
            1 if self.monoid is None else groups.monoid(self.monoid).order
        )

    @property
    def group_name(self) -> str:
        """The group's name, or that it goes by a table."""
        return self.group if isinstance(self.group, str) else "a table"

    @property
    def task(self) -> str:
        """Products in the group, and in the monoid."""
        monoid = "EABX" if self.monoid == "published" else self.monoid
        return f"products in {self.group}" + ("" if monoid is None else f" times the monoid {monoid}")

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        named = self.monoid if isinstance(self.monoid, str) else "of a table"
        monoid = "" if self.monoid is None else f" x monoid {named}"
        return [
            f"word problem over {self.group_name}{monoid}: {self.vocab_size} tokens, "
            f"p = {self.identity_probability:g}, length {self.seq_len}, made on the fly"
        ]

    @field_validator("group", mode="before")
    @classmethod
    def _known_group(cls, group: object) -> object:
        if not isinstance(group, str | list | tuple):
            raise ValueError("a group is a name such as S5, or a table of rows")
        groups.group_order(group)
        return group

    @field_validator("monoid", mode="before")
    @classmethod
    def _known_monoid(cls, monoid: object) -> object:
        if monoid is not None:
            if not isinstance(monoid, str | list | tuple):
                raise ValueError("a monoid is a name such as EABX, or a table of rows")
            groups.monoid(monoid)
        return monoid


class CatbAbISpec(DataSpec):
    """bAbI's twenty tasks, their stories shuffled and put one behind the other."""

    changeable: ClassVar[frozenset[str]] = frozenset({"seq_len", "tasks"})

    kind: Literal["catbabi"] = "catbabi"
    path: str | None = None
    """The archive en-valid-10k.tar.xz, or its folder; null in specs that leave it to the command line."""
    seq_len: PositiveInt = 200
    """Tokens in a training sequence."""
    scoring: Literal["answers", "all"] = "answers"
    """What the loss of training is over: the answers alone (QA mode), or every next word. Accuracy is of the
    answers in either case, all together and by task."""
    held_out: Literal["valid", "test"] = "valid"
    """The split to evaluate on; nothing should be chosen by the test split."""
    tasks: Annotated[tuple[BabiTask, ...], Field(min_length=1)] | None = None
    """Whose stories are trained on, for a phase that begins with some of them; null: all twenty, once. A task
    that is named several times has its stories that often in an epoch. What is held out has all, once."""

    @property
    def task(self) -> str:
        """Answers to bAbI's questions."""
        return "answers in catbAbI"

    @field_validator("tasks")
    @classmethod
    def _in_order(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """So that the same tasks are the same spec."""
        return None if value is None else tuple(sorted(value))

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        counts = Counter(self.tasks or ())
        named = (str(task) if times == 1 else f"{task} ({times} times)" for task, times in counts.items())
        tasks = "" if self.tasks is None else f", of tasks {', '.join(named)}"
        return [f"{self.kind}, length {self.seq_len:,}{tasks}"]


Documents = Literal["ignore", "reset"]


class TokensSpec(DataSpec):
    """Text as memory-mapped token ids, such as `python -m trainer.tokenize` writes."""

    kind: Literal["tokens"] = "tokens"
    path: str | None = None
    """File or folder of token ids; null in specs that leave it to the command line: `data.path=DIR`."""
    validation_path: str | None = None
    """The same for held-out text; null: the validation split beside the training split, if there is one."""
    seq_len: PositiveInt = 2048
    """Tokens in a training sequence."""
    documents: Documents = "ignore"
    """`reset` keeps the documents that share a row apart: states begin anew, attention doesn't look across,
    and a document's first token is not predicted."""
    tokenizer: str | None = None
    """The tokenizer that must have made the tokens: a tokenizer.json, a folder, or `bytes`; null: any."""
    check_sums: bool = True
    """Compare files with the checksums in their manifest before training, once for files that don't change;
    their sizes are checked in any case."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the ids in the files; null: as the files say."""

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        from trainer.data.describing import describe_tokens

        return describe_tokens(self, sequences=sequences, vocab_size=vocab_size)


class MixtureSourceSpec(Spec):
    """One source of a mixture."""

    weight: float
    """Its share of the samples, in proportion to the others' weights; above 0."""
    name: str | None = None
    """What records call it; null: by its place, `source0` and so on."""
    data: DataSpec
    """What it is. Its length is the mixture's unless it says one, which must be the same."""

    @field_validator("weight")
    @classmethod
    def _above_zero(cls, weight: float) -> float:
        if weight <= 0:
            raise ValueError("a source's weight is above 0; leave a source out to take nothing of it")
        return weight


class MixtureSpec(DataSpec):
    """Samples of several sources, each as often as its weight says, in an order that the seed fixes."""

    kind: Literal["mixture"] = "mixture"
    sources: Annotated[tuple[MixtureSourceSpec, ...], Field(min_length=1)]
    """What is mixed."""
    seq_len: PositiveInt = 2048
    """Tokens in a training sequence, whatever its source."""

    @property
    def vocab_size(self) -> int | None:
        """The largest of the sources', where all tell it."""
        sizes = [source.data.vocab_size for source in self.sources]
        known = [size for size in sizes if size is not None]
        return max(known) if len(known) == len(sizes) else None

    @property
    def task(self) -> str | None:
        """The sources', where all have the same."""
        tasks = {source.data.task for source in self.sources}
        return tasks.pop() if len(tasks) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        """What records call the sources."""
        return tuple(source.name or f"source{index}" for index, source in enumerate(self.sources))

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        from trainer.data.quotas import quotas, scale

        parts, lines = quotas([source.weight for source in self.sources]), []
        for name, source, part in zip(self.names, self.sources, parts, strict=True):
            share = part / scale(parts)
            described = source.data.describe(sequences=round(sequences * share), vocab_size=vocab_size)
            lines += [f"{share:6.2%} {name}: {described[0]}", *(f"       {line}" for line in described[1:])]
        return lines

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, value: Any) -> Any:
        """Give sources that say no length the mixture's."""
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
                message = (
                    f"the mixture's length is {self.seq_len}; give this source the same, or leave it out"
                )
                raise field_error(message, "sources", index, "data", "seq_len", value=source.data.seq_len)
            if self.names.index(self.names[index]) != index:
                message = "another source has this name; give each its own"
                raise field_error(message, "sources", index, "name", value=source.name)
        return self


class StreamSpec(DataSpec):
    """Text of a Hugging Face dataset, tokenized as it comes; where a run is resumed is approximate."""

    kind: Literal["stream"] = "stream"
    dataset: str
    """A name on the hub, or a folder of data files or of `save_to_disk`."""
    config: str | None = None
    """Configuration of a dataset of the hub."""
    split: str = "train"
    """Which split."""
    text_field: str = "text"
    """The field that holds the text."""
    tokenizer: str
    """A tokenizer.json, a folder that holds one, or `bytes`."""
    end_of_document: str | None = None
    """The token appended to each document; null: the usual one."""
    shuffle_buffer: NonNegativeInt = 10_000
    """Documents among which the next one is drawn; 0: they come as they stand."""
    seq_len: PositiveInt = 2048
    """Tokens in a training sequence."""
    documents: Documents = "ignore"
    """See the kind `tokens`."""
    validation_path: str | None = None
    """Held-out text as token files; null: none."""

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        from trainer.data.describing import describe_stream

        return describe_stream(self, vocab_size=vocab_size)
