"""Conversations as token IDs, and which of them are targets: the answers.

A chat template (Jinja, as transformers applies it) renders the messages of a conversation as one text, which
is tokenized as a whole. Its targets are the tokens of the assistant's messages: those that the template marks
by ``{% generation %}``, or else what the template adds for an answer to the text of the messages before it
with the generation prompt. An end token follows the conversation, unless its last answer ends with it; it is
a target after an answer, so that the model learns to stop.

A prompt and a completion that are plain texts are concatenated without a template; the completion and the end
token are targets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from implicit_blocks.checkpoints.find import TOKENIZER
from implicit_blocks.checkpoints.tokenizer_names import tokenizer_path
from trainer.data.tokenizing.fields import ASSISTANT, COMPLETION, MESSAGES, PROMPT
from trainer.data.tokenizing.shards import Targets
from trainer.data.tokenizing.tokenizers import COMPANIONS, BytesTokenizer, FileTokenizer, Ids, Tokenizer
from trainer.storage.files import digest

CHATML = """\
{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""The template with the name ``chatml``: each message between ``<|im_start|>ROLE`` and ``<|im_end|>``."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_Span = tuple[int, int]


@dataclass(frozen=True)
class ChatTokenizer:
    """A tokenizer with a chat template; created by `load_chat_tokenizer`.

    Args:
        base: the tokenizer of plain text.
        template: the chat template; None: only plain prompts and completions can be encoded.
        inner: the same tokenizer as transformers loads it.

    """

    base: Tokenizer
    template: str | None = field(repr=False)
    inner: Any = field(repr=False, compare=False)

    @property
    def vocab_size(self) -> int:
        """See `Tokenizer.vocab_size`."""
        return self.base.vocab_size

    @property
    def end_of_document(self) -> int:
        """See `Tokenizer.end_of_document`."""
        return self.base.end_of_document

    @property
    def identity(self) -> dict[str, Any]:
        """See `Tokenizer.identity`: that of the base, and the template."""
        return {**self.base.identity, "chat_template": digest(self.template)}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """See `Tokenizer.encode`; for texts of `trainer.data.tokenizing.fields.Conversations`."""
        return [self.conversation(text, "the conversation")[0][:-1] for text in texts]

    def conversation(self, text: str, place: str) -> tuple[Ids, Targets]:
        """Return the IDs of a conversation with its end token, and which of them are targets.

        Args:
            text: see `trainer.data.tokenizing.fields.Conversations`.
            place: the row, for messages.

        Raises:
            ValueError: there is no template, or it fails, changes or drops a message, or marks no answer.

        """
        row = json.loads(text)
        if MESSAGES in row:
            rendered, spans = self._rendered(row[MESSAGES], row["first"], place)
        else:
            rendered = row[PROMPT] + row[COMPLETION]
            spans = [(len(row[PROMPT]), len(rendered))]
        encoded = self.inner(rendered, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = np.array(encoded["input_ids"], dtype=np.uint32)
        targets = _overlapping(np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2), spans)
        if not targets.any():
            raise ValueError(
                f"no token of {place} is a target: the chat template has no text for its answers; use "
                "another template (--chat-template), or remove the row"
            )
        answered = row.get(MESSAGES, [{"role": ASSISTANT}])[-1]["role"] == ASSISTANT
        last = int(np.flatnonzero(targets)[-1])
        if not answered or ids[last] != self.end_of_document:
            ids, targets = np.append(ids, self.end_of_document), np.append(targets, np.uint8(answered))
            if answered and not rendered[spans[-1][1] :].strip():
                targets[last:] = 1  # the line break after the answer, which the end token follows
        return ids.astype(np.uint32), targets.astype(np.uint8)

    def files(self) -> dict[str, str]:
        """Return the files that transformers loads the tokenizer and its template from, by name."""
        with TemporaryDirectory() as folder:
            self.inner.save_pretrained(folder)
            found = {
                name: (Path(folder) / name).read_text(encoding="utf-8")
                for name in (TOKENIZER, *COMPANIONS)
                if (Path(folder) / name).is_file()
            }
        if isinstance(self.base, FileTokenizer):
            found[TOKENIZER] = self.base.content  # the identity is that of the original content
        return found

    def _rendered(self, messages: list[dict[str, Any]], first: int, place: str) -> tuple[str, list[_Span]]:
        """Return the text of a conversation, and the spans of its answers from message ``first`` on."""
        if self.template is None:
            raise ValueError(
                f"the tokenizer has no chat template for the messages in {place}; give one by "
                "--chat-template FILE, or chatml"
            )
        whole, marked = self._render(messages, place)
        _require_every_message(messages, whole, place)
        answers = [n for n, one in enumerate(messages) if one["role"] == ASSISTANT and n >= first]
        if _GENERATION.search(self.template) is not None:
            every = sum(one["role"] == ASSISTANT for one in messages)
            if len(marked) != every:
                raise ValueError(
                    f"the chat template marks {len(marked)} answers by {{% generation %}} in {place}, which "
                    f"has {every} messages of the {ASSISTANT}; mark each of them, or use another template"
                )
            return whole, marked[every - len(answers) :]
        return whole, [self._answer(messages, number, whole, place) for number in answers]

    def _answer(self, messages: list[dict[str, Any]], number: int, whole: str, place: str) -> _Span:
        """Return the span of an answer: from the generation prompt to the end of the message."""
        if number == 0:  # templates need not render an empty conversation
            before = whole[: whole.find(messages[0]["content"])]
        else:
            before, _ = self._render(messages[:number], place, prompts=True)
        after, _ = self._render(messages[: number + 1], place)
        if not whole.startswith(after) or not after.startswith(before):
            raise ValueError(
                f"the chat template renders the messages up to {number} in {place} differently when others "
                "follow, so the tokens of this answer cannot be found; mark the answers in the template by "
                "{% generation %} and {% endgeneration %}"
            )
        return len(before), len(after)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], place: str, *, prompts: bool = False
    ) -> tuple[str, list[_Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        marks = _GENERATION.search(self.template or "") is not None
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompts,
                **self.inner.special_tokens_map,
            )
        except Exception as error:  # a template can raise anything
            raise ValueError(
                f"the chat template cannot render {place} ({type(error).__name__}: {error}); change the row "
                "or the template"
            ) from error
        return texts[0], [tuple(span) for span in spans[0]] if marks else []


def load_chat_tokenizer(base: Tokenizer, source: str | Path, *, template: str | None = None) -> ChatTokenizer:
    """Add a chat template to a tokenizer.

    Args:
        base: the tokenizer of ``source``.
        source: as for `trainer.data.tokenizing.load_tokenizer`.
        template: a file with a Jinja template, or ``chatml``; None: the tokenizer's own, if it has one.

    Raises:
        ValueError: the template's file does not exist.
        ImportError: transformers is not installed; the message gives the installation command.

    """
    from implicit_blocks.hf.tokenizer import load_tokenizer as load_inner

    inner = load_inner(source if isinstance(base, BytesTokenizer) else tokenizer_path(source))
    if template is not None:
        inner.chat_template = _read_template(template)
    if isinstance(inner.chat_template, dict):  # several templates by name
        inner.chat_template = inner.chat_template.get("default")
    end = inner.convert_ids_to_tokens(base.end_of_document)
    if inner.eos_token != end:
        inner.eos_token = end
    inner.model_max_length = int(1e30)  # rows are cut to the length of a run, not here
    return ChatTokenizer(base=base, template=inner.chat_template, inner=inner)


def _read_template(name: str) -> str:
    if name == "chatml":
        return CHATML
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"there is no chat template {path}; give a file with a Jinja template, or chatml")
    return path.read_text(encoding="utf-8")


def _require_every_message(messages: Sequence[Mapping[str, Any]], whole: str, place: str) -> None:
    """Reject a template that drops or changes a message.

    Raises:
        ValueError: names the message.

    """
    position = 0
    for number, message in enumerate(messages):
        content = message["content"].strip()
        found = whole.find(content, position)
        if found < 0:
            shown = content if len(content) <= 60 else content[:60] + "…"
            raise ValueError(
                f"the chat template drops or changes message {number} in {place} (role {message['role']!r}, "
                f"{shown!r}): its content is not in the rendered text, or not in order; remove such "
                "messages, or give a template with every role by --chat-template"
            )
        position = found + len(content)


def _overlapping(offsets: npt.NDArray[np.int64], spans: Sequence[_Span]) -> Targets:
    """Return which tokens, given their offsets (tokens, 2) in the text, have a character in a span."""
    targets = np.zeros(len(offsets), dtype=np.uint8)
    for start, stop in spans:
        targets |= ((offsets[:, 0] < stop) & (offsets[:, 1] > start)).astype(np.uint8)
    return targets
