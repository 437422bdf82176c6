"""catbAbI: bAbI's twenty tasks concatenated into one stream of words.

J. Weston et al., "Towards AI-complete question answering", 2015; concatenated: I. Schlag, T. Munkhdalai and
J. Schmidhuber, "Learning associative inference using fast weight memory", ICLR 2021.

Supporting facts are removed, words are lowercased, "." and "?" are tokens, and the answer follows "?" as a
single token (even "s,e"). No story is dropped, not even the last one of a file; the last row of an epoch is
padded.
"""

from __future__ import annotations

import lzma
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trainer.data.describing import check_vocabulary
from trainer.data.source import IGNORED, Batch, DataSource, EvaluationSet, check_range
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.specs.data import CatbAbISpec
    from trainer.specs.run import EvaluationSpec

TASKS = tuple(range(1, 21))
SPLITS = ("train", "valid", "test")
PADDING = "<pad>"
_NAME = re.compile(r"(?:^|/)(?P<set>[^/]*)/?qa(?P<task>\d+)_(?:[a-z-]+_)?(?P<split>train|valid|test)\.txt$")
_WORDS = re.compile(r"[^\s.?]+|[.?]")
_Number = TypeVar("_Number", np.int16, np.int8)


class Story(NamedTuple):
    """The tokens of a story, with a flag for each token that is an answer."""

    task: int
    words: tuple[str, ...]
    answers: tuple[bool, ...]


class Stories(NamedTuple):
    """All stories by split, and the sorted vocabulary of all splits, with the padding token first."""

    by_split: Mapping[str, Sequence[Story]]
    vocabulary: tuple[str, ...]
    stand_ins: Mapping[str, int]
    """Files replaced by files of the set ``en``, with the number of stories that each replacement
    provides."""


def read_stories(path: Path) -> Stories:
    """Read the archive (``en-valid-10k.tar.xz``) or its extracted directory.

    A missing task file is replaced by that of the set ``en`` if available; its stories that also occur in
    other splits of the task are dropped.

    Raises:
        DataError: the path does not exist, files are missing or empty (all are listed), or a line is not in
            bAbI's format.

    """
    if not path.exists():
        raise DataError(f"there is no bAbI archive at {path}; give en-valid-10k.tar.xz or its directory")
    files: dict[tuple[int, str], str] = {}
    stand_ins: dict[tuple[int, str], str] = {}
    for name, text in _files(path):
        if (match := _NAME.search(name)) is not None and text.strip():
            key = int(match["task"]), match["split"]
            (stand_ins if match["set"] == "en" else files)[key] = text
    expected = [(task, split) for task in TASKS for split in SPLITS]
    missing = [f"qa{t}_{s}.txt" for t, s in expected if (t, s) not in files and (t, s) not in stand_ins]
    if missing:
        named = ", ".join(missing) if len(missing) < len(expected) else f"{missing[0]} to {missing[-1]}"
        raise DataError(
            f"{path} lacks {len(missing)} of bAbI's {len(expected)} files: {named}; use the complete archive"
        )
    by_split: dict[str, list[Story]] = {split: [] for split in SPLITS}
    stood_in: dict[str, int] = {}
    for task, split in expected:
        own = (task, split) in files
        stories = parse(files[task, split] if own else stand_ins[task, split], task=task)
        if not own:
            others = [(task, other) for other in SPLITS if other != split and (task, other) in files]
            known = {story for key in others for story in parse(files[key], task=task)}
            stories = [story for story in stories if story not in known]
            stood_in[f"qa{task}_{split}.txt"] = len(stories)
        by_split[split] += stories
    words = {word for stories in by_split.values() for story in stories for word in story.words}
    return Stories(by_split, (PADDING, *sorted(words)), stood_in)


def _files(path: Path) -> Iterator[tuple[str, str]]:
    if path.is_dir():
        for file in sorted(path.rglob("qa*.txt")):
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{file} is not UTF-8 text ({error}); download the file again") from error
            yield f"{path.name}/{file.relative_to(path).as_posix()}", text
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if _NAME.search(member.name) else None
                if content is not None:
                    yield member.name, content.read().decode("utf-8")
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, UnicodeDecodeError) as error:
        why = str(error).partition(":\n")[0]  # tarfile lists every format that it tried, one per line
        raise DataError(f"{path} cannot be read as an archive ({why}); download it again") from error


def parse(text: str, *, task: int) -> list[Story]:
    """Split a file into stories; a story starts at each line with number 1.

    Raises:
        DataError: a line has no number, or the number of the first line is not 1.

    """
    stories: list[Story] = []
    words: list[str] = []
    answers: list[bool] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        index, _, rest = line.partition(" ")
        if not index.isdigit() or (not words and index != "1"):
            raise DataError(
                f"qa{task}, line {number}: {line[:40]!r} is not a line of a story; download the file again"
            )
        if index == "1" and words:
            stories.append(Story(task, tuple(words), tuple(answers)))
            words, answers = [], []
        sentence, *answer = rest.lower().split("\t")
        spoken = _WORDS.findall(sentence)
        words += spoken
        answers += [False] * len(spoken)
        if answer:
            words.append(answer[0].strip())
            answers.append(True)
    if words:
        stories.append(Story(task, tuple(words), tuple(answers)))
    return stories


class CatbAbI(DataSource):
    """The stories of a split, shuffled in every epoch, concatenated and cut into rows.

    The label of a token is the next token, so the label at "?" is the answer. With scoring ``answers`` only
    answers are scored; with ``all`` every token is. The last row of an epoch is padded; padding is never
    scored.

    Args:
        stories: stories of one split.
        vocabulary: words, indexed by their IDs.
        length: tokens per row.
        seed: seed of the story order.
        scoring: which labels are scored, ``"answers"`` or ``"all"``.
        held_out: stories for the evaluation sets; None: no evaluation sets.
        stand_ins: see `Stories`; None: no files are replaced.

    """

    concurrent = True

    def __init__(
        self,
        stories: Sequence[Story],
        vocabulary: Sequence[str],
        *,
        length: int,
        seed: int,
        scoring: str = "answers",
        held_out: Sequence[Story] | None = None,
        stand_ins: Mapping[str, int] | None = None,
    ) -> None:
        self.stand_ins: Mapping[str, int] = stand_ins or {}
        """Files of the archive that are replaced, with the number of stories that each replacement
        provides."""
        ids = {word: number for number, word in enumerate(vocabulary)}
        # All stories concatenated in two arrays, so that an epoch is assembled by one gather.
        self._words = np.array([ids[word] for story in stories for word in story.words], dtype=np.int16)
        self._tasks = np.array(
            [story.task if answer else 0 for story in stories for answer in story.answers], dtype=np.int8
        )
        self._lengths = np.array([len(story.words) for story in stories], dtype=np.int64)
        self._vocabulary, self._length, self._seed, self._scoring = vocabulary, length, seed, scoring
        self._held_out = held_out
        self._only_task: int | None = None
        self.total = len(self._words)
        self._epoch: tuple[int, npt.NDArray[np.int16], npt.NDArray[np.int8]] | None = None
        self._kept = np.arange(-(-self.total // length))

    def only(self, task: int) -> Self:
        """Return a copy that scores only this task's answers, in the rows that contain one."""
        other = copy(self)
        other._only_task = task
        other._kept = np.flatnonzero((self._rows(0)[1][:, 1:] == task).any(1))
        return other

    @property
    def vocab_size(self) -> int:
        """Number of words, including padding."""
        return len(self._vocabulary)

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self._length

    @property
    def samples(self) -> int:
        """Rows per epoch."""
        return len(self._kept)

    def _rows(self, epoch: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int8]]:
        """Return the words, and the task of each answer (0 elsewhere), (rows, length + 1)."""
        kept = self._epoch
        if kept is None or kept[0] != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._lengths))
            lengths = self._lengths[order]
            # Index of each word of the epoch in the concatenated stories: start of its story plus its offset.
            behind = (np.cumsum(self._lengths) - self._lengths)[order] - (np.cumsum(lengths) - lengths)
            places = np.repeat(behind, lengths) + np.arange(self.total)
            kept = self._epoch = epoch, self._cut(self._words[places]), self._cut(self._tasks[places])
        return kept[1], kept[2]

    def _cut(self, stream: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """Return a stream as rows (rows, length + 1); each starts with the previous row's last token."""
        rows = -(-self.total // self._length)
        whole = np.zeros(rows * self._length + 1, dtype=stream.dtype)
        whole[: self.total] = stream
        return np.lib.stride_tricks.sliding_window_view(whole, self._length + 1)[:: self._length]

    def _rows_at(self, position: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return copies of the words and tasks of the rows at positions [position, position + count)."""
        parts: list[tuple[npt.NDArray[np.int16], npt.NDArray[np.int8]]] = []
        while count > 0:
            epoch, index = divmod(position, self.samples)
            words, tasks = self._rows(epoch)
            lines = self._kept[index : index + count]
            parts.append((words[lines], tasks[lines]))
            position, count = position + len(lines), count - len(lines)
        words_of, tasks_of = zip(*parts, strict=True)
        return np.concatenate(words_of).astype(np.int64), np.concatenate(tasks_of).astype(np.int64)

    def batch(self, position: int, count: int) -> Batch:
        """See `DataSource.batch`."""
        check_range(position, count)
        words, tasks = self._rows_at(position, count)
        labels, answered = words[:, 1:].copy(), tasks[:, 1:]
        if self._only_task is not None:
            scored = answered == self._only_task
        else:
            scored = answered > 0 if self._scoring == "answers" else labels > 0
        labels[~scored] = IGNORED
        return Batch(inputs=torch.from_numpy(words[:, :-1].copy()), labels=torch.from_numpy(labels))

    def tasks(self, position: int, count: int) -> torch.Tensor:
        """Return the task that each label of `batch` answers, int64 (count, L), 0 for other labels."""
        check_range(position, count)
        return torch.from_numpy(self._rows_at(position, count)[1][:, 1:].copy())

    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """Return one set of all answers, ``L200``, and one per task, ``qa1_L200``.

        Raises:
            ValueError: this source is itself an evaluation set.

        """
        if self._held_out is None:
            raise ValueError("an evaluation set has no evaluation sets; use the training source")
        sets = {}
        for length in evaluation.lengths or (self._length,):
            whole = CatbAbI(self._held_out, self._vocabulary, length=length, seed=evaluation.seed)
            for task in (None, *sorted({story.task for story in self._held_out})):
                source = whole if task is None else whole.only(task)
                name = f"L{length}" if task is None else f"qa{task}_L{length}"
                settings = {"length": length} if task is None else {"length": length, "task": task}
                sets[name] = EvaluationSet(
                    name=name,
                    source=source,
                    sequences=min(evaluation.sequences, source.samples),
                    settings=settings,
                )
        return sets


def build(spec: CatbAbISpec, *, seed: int = 0, vocab_size: int | None = None) -> CatbAbI:
    """Build the training source of a `data` section.

    Args:
        spec: the section.
        seed: seed of the story order.
        vocab_size: vocabulary size of the model, checked if given.

    Raises:
        ValueError: the path is missing or the vocabulary is too small; as `read_stories`.

    """
    if spec.path is None:
        raise ValueError("data.path is not set; give the bAbI archive, data.path=en-valid-10k.tar.xz")
    try:
        stories = read_stories(Path(spec.path))
    except DataError as error:
        raise ValueError(str(error)) from error
    check_vocabulary(len(stories.vocabulary), vocab_size, what="bAbI")
    times = Counter(TASKS if spec.tasks is None else spec.tasks)
    return CatbAbI(
        [story for story in stories.by_split["train"] for _ in range(times[story.task])],
        stories.vocabulary,
        length=spec.seq_len,
        seed=seed,
        scoring=spec.scoring,
        held_out=stories.by_split[spec.held_out],
        stand_ins=stories.stand_ins,
    )
