"""bAbI's twenty tasks as one stream of words: catbAbI.

J. Weston et al., "Towards AI-complete question answering", 2015; concatenated: I. Schlag, T. Munkhdalai and
J. Schmidhuber, "Learning associative inference using fast weight memory", ICLR 2021.

Supporting facts are removed, words are in lower case, "." and "?" are tokens, the answer stands after "?" as
one token ("s,e" too). Every story is kept: of each file the last one too, and of an epoch the last
row, filled up.
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
    """The tokens of a story, and which of them are answers."""

    task: int
    words: tuple[str, ...]
    answers: tuple[bool, ...]


class Stories(NamedTuple):
    """All stories by split, and the words of all of them in order, padding first."""

    by_split: Mapping[str, Sequence[Story]]
    vocabulary: tuple[str, ...]
    stand_ins: Mapping[str, int]
    """Files for which those of the set ``en`` stand in, and how many stories they give."""


def read_stories(path: Path) -> Stories:
    """Read the archive (``en-valid-10k.tar.xz``) or a folder it was unpacked into.

    A task's file that is missing may be stood in for by that of the set ``en``; those of its stories that are
    also in the task's other splits are left out.

    Raises:
        DataError: nothing there, files missing or empty (all are named), or a line that is not bAbI's.

    """
    if not path.exists():
        raise DataError(f"there is no bAbI archive at {path}; give en-valid-10k.tar.xz, or its folder")
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
            f"{path} lacks {len(missing)} of bAbI's {len(expected)} files: {named}; give the whole archive"
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
                raise DataError(f"{file} is no text in UTF-8 ({error}); fetch the file anew") from error
            yield f"{path.name}/{file.relative_to(path).as_posix()}", text
        return
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if _NAME.search(member.name) else None
                if content is not None:
                    yield member.name, content.read().decode("utf-8")
    except (tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, OSError, UnicodeDecodeError) as error:
        why = str(error).partition(":\n")[0]  # tarfile lists, line by line, all that it tried
        raise DataError(f"{path} is no archive that can be read ({why}); fetch it anew") from error


def parse(text: str, *, task: int) -> list[Story]:
    """Cut a file into stories: one begins wherever the numbers of its lines begin again at 1.

    Raises:
        DataError: a line without a number, or a first line whose number isn't 1.

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
                f"qa{task}, line {number}: {line[:40]!r} is no line of a story; fetch the file anew"
            )
        if index == "1" and words:
            stories.append(Story(task, tuple(words), tuple(answers)))
            words, answers = [], []
        sentence, *asked = rest.lower().split("\t")
        spoken = _WORDS.findall(sentence)
        words += spoken
        answers += [False] * len(spoken)
        if asked:
            words.append(asked[0].strip())
            answers.append(True)
    if words:
        stories.append(Story(task, tuple(words), tuple(answers)))
    return stories


class CatbAbI(DataSource):
    """A split's stories, shuffled anew each epoch by the seed, put one behind the other and cut into rows.

    The label of a token is the next one: at "?" the answer. Scoring ``answers`` ignores all other labels,
    ``all`` none. The last row of an epoch is filled up with padding that isn't scored.

    Args:
        stories: of one split.
        vocabulary: words by their ids.
        length: tokens in a row.
        seed: of the order of the stories.
        scoring: which labels count.
        held_out: where evaluation sets come from; None: there are none.
        stand_ins: what `Stories` says of them; None: there are none.

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
        """Files of the archive for which others stand in, and how many stories those give."""
        ids = {word: number for number, word in enumerate(vocabulary)}
        # All stories one behind the other in two arrays: an epoch takes them in its order at one stroke.
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
        """Return the same stories with this task's answers alone scored, in the rows that have some."""
        other = copy(self)
        other._only_task = task
        other._kept = np.flatnonzero((self._rows(0)[1][:, 1:] == task).any(1))
        return other

    @property
    def vocab_size(self) -> int:
        """Words, and padding."""
        return len(self._vocabulary)

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self._length

    @property
    def samples(self) -> int:
        """Rows in an epoch."""
        return len(self._kept)

    def _rows(self, epoch: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int8]]:
        """Return words and the tasks of answers (0 elsewhere), (rows, length + 1)."""
        kept = self._epoch
        if kept is None or kept[0] != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._lengths))
            lengths = self._lengths[order]
            # Where each word of the epoch stands among all: its story's first word there, and so many on.
            behind = (np.cumsum(self._lengths) - self._lengths)[order] - (np.cumsum(lengths) - lengths)
            places = np.repeat(behind, lengths) + np.arange(self.total)
            kept = self._epoch = epoch, self._cut(self._words[places]), self._cut(self._tasks[places])
        return kept[1], kept[2]

    def _cut(self, stream: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """Return rows (rows, length + 1) of a stream, each beginning with the last one's last token."""
        rows = -(-self.total // self._length)
        whole = np.zeros(rows * self._length + 1, dtype=stream.dtype)
        whole[: self.total] = stream
        return np.lib.stride_tricks.sliding_window_view(whole, self._length + 1)[:: self._length]

    def _taken(self, position: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return words and tasks of the rows at positions [position, position + count), copies."""
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
        words, tasks = self._taken(position, count)
        labels, answered = words[:, 1:].copy(), tasks[:, 1:]
        if self._only_task is not None:
            scored = answered == self._only_task
        else:
            scored = answered > 0 if self._scoring == "answers" else labels > 0
        labels[~scored] = IGNORED
        return Batch(inputs=torch.from_numpy(words[:, :-1].copy()), labels=torch.from_numpy(labels))

    def tasks(self, position: int, count: int) -> torch.Tensor:
        """Give the task that each label of `batch` answers, int64 (count, L), 0 where it answers none."""
        check_range(position, count)
        return torch.from_numpy(self._taken(position, count)[1][:, 1:].copy())

    def evaluation_sets(self, evaluation: EvaluationSpec) -> Mapping[str, EvaluationSet]:
        """One set of all answers, ``L200``, and one a task, ``qa1_L200``: its answers in the same rows.

        Raises:
            ValueError: there is nothing held out.

        """
        if self._held_out is None:
            raise ValueError("a set that is held out already has none of its own; ask the training source")
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
    """Make the training source that a `data` section describes.

    Args:
        spec: the section.
        seed: of the order of the stories.
        vocab_size: the model's, if it is to be checked.

    Raises:
        ValueError: no path, or a vocabulary that is too small; as `read_stories`.

    """
    if spec.path is None:
        raise ValueError("the bAbI archive is not named; give it by data.path=en-valid-10k.tar.xz")
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
