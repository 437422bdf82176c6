"""What a row of jsonl, parquet or a dataset contributes: a text, or a conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
ASSISTANT = "assistant"
"""Role of the messages that a model is trained to write."""


class Fields(Protocol):
    """Selects the fields of a row and reads them."""

    def select(self, names: Sequence[str], place: str) -> list[str]:
        """Return the needed fields among those of a row or file.

        Raises:
            ValueError: needed fields are missing.

        """

    def read(self, row: Mapping[str, Any], place: str) -> str:
        """Return the text of a row.

        Raises:
            ValueError: a field has an invalid value.

        """


@dataclass(frozen=True)
class TextField:
    """The text in one field."""

    name: str

    def select(self, names: Sequence[str], place: str) -> list[str]:
        """See `Fields.select`."""
        if self.name not in names:
            raise ValueError(
                f"{place} has no field {self.name!r}, only {', '.join(names)}; select the text field by "
                "--text-field, or read conversations by --chat"
            )
        return [self.name]

    def read(self, row: Mapping[str, Any], place: str) -> str:
        """See `Fields.read`."""
        value = row[self.name]
        if not isinstance(value, str):
            raise ValueError(
                f"{self.name!r} in {place} is {type(value).__name__}, not text; set another --text-field"
            )
        return _encodable(value)


@dataclass(frozen=True)
class Conversations:
    """A conversation in ``messages``, or in ``prompt`` and ``completion``, as TRL reads them.

    Messages are objects with a ``role`` and a ``content``. ``prompt`` and ``completion`` are both texts, or
    both lists of messages. The text of a row is a JSON object for `trainer.data.tokenizing.chat`:
    ``{"messages": […], "first": n}``, where only answers from message n on are targets, or ``{"prompt": …,
    "completion": …}``. Equal conversations have equal texts.
    """

    def select(self, names: Sequence[str], place: str) -> list[str]:
        """See `Fields.select`."""
        if MESSAGES in names:
            return [MESSAGES]
        if PROMPT in names and COMPLETION in names:
            return [PROMPT, COMPLETION]
        raise ValueError(
            f"{place} has neither {MESSAGES!r} nor both {PROMPT!r} and {COMPLETION!r}, only "
            f"{', '.join(names)}; rename its fields, or omit --chat to read plain text"
        )

    def read(self, row: Mapping[str, Any], place: str) -> str:
        """See `Fields.read`."""
        if MESSAGES in row:
            return _as_text({MESSAGES: _messages(row[MESSAGES], MESSAGES, place), "first": 0}, place)
        prompt, completion = row[PROMPT], row[COMPLETION]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion.strip():
                raise ValueError(
                    f"the {COMPLETION} in {place} is empty, so none of its tokens is a target; remove the row"
                )
            return _as_text({PROMPT: prompt, COMPLETION: completion}, place)
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise ValueError(
                f"{PROMPT} and {COMPLETION} in {place} are {type(prompt).__name__} and "
                f"{type(completion).__name__}; both must be texts, or both lists of messages"
            )
        messages = _messages(prompt, PROMPT, place) + _messages(completion, COMPLETION, place)
        return _as_text({MESSAGES: messages, "first": len(prompt)}, place)


def _messages(value: Any, field: str, place: str) -> list[dict[str, Any]]:
    """Return messages without empty fields."""
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{field!r} in {place} is {_shown(value)}; expected a list of messages with a role and a content"
        )
    for number, message in enumerate(value):
        where = f"message {number} of {field!r} in {place}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} is {_shown(message)}; expected an object with a role and a content")
        for key, other in (("role", "from"), ("content", "value")):
            if message.get(key) is None:
                hint = f" (rename {other!r})" if other in message else ""
                raise ValueError(
                    f"{where} has no {key}, only {', '.join(message) or 'no fields'}; every message needs a "
                    f"role (such as system, user or {ASSISTANT}) and a content{hint}"
                )
            if not isinstance(message[key], str):
                raise ValueError(f"the {key} of {where} is {_shown(message[key])}; it must be text")
    return [{key: value for key, value in message.items() if value is not None} for message in value]


def _as_text(conversation: dict[str, Any], place: str) -> str:
    first = conversation.get("first")
    if first is not None:
        answers = [one for one in conversation[MESSAGES][first:] if one["role"] == ASSISTANT]
        if not any(one["content"].strip() for one in answers):
            roles = ", ".join(dict.fromkeys(one["role"] for one in conversation[MESSAGES][first:]))
            raise ValueError(
                f"the conversation in {place} has no answer, so none of its tokens is a target: no message "
                f"with the role {ASSISTANT!r} and a content (roles: {roles}); rename the roles, or remove "
                "the row"
            )
    return _encodable(json.dumps(conversation, ensure_ascii=False, sort_keys=True, default=str))


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '…'}"


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate, which JSON allows
        return text.encode("utf-8", "replace").decode("utf-8")
    return text
