"""The bodies of requests: their fields, and how errors in them are reported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks._utils.own_packages import install_extra
from implicit_blocks.serving.errors import ApiError, shown
from implicit_blocks.serving.jobs import Choice

MOST_TOKENS = 1 << 24
"""Larger numbers of tokens are refused before any limit of a model is known."""
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 256
MOST_LOGPROBS = 20
MOST_BIASES = 1024

Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]

Body = TypeVar("Body", bound=BaseModel)


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CommonBody(BaseModel):
    """The fields of both kinds of requests; null is the same as leaving a field out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    n: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-(2**62), le=2**62)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)] | None
    ) = None
    # Extensions.
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    tolerance: Annotated[float, Field(gt=0, le=1e6)] | None = None
    max_iterations: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    return_iterations: bool | None = None

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(CommonBody):
    """The body of ``/v1/completions``."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_TOKENS)] | None = None
    suffix: str | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, suffix: str | None) -> str | None:
        if suffix is not None:
            raise ValueError("the model continues text and cannot insert before a suffix; omit it")
        return suffix


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        """The message as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)
        return {"role": self.role, "content": text}


class ChatBody(CommonBody):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None


def read(kind: type[Body], body: bytes) -> Body:
    """Return the body of a request.

    Raises:
        ApiError: 400 for anything but a JSON object with these fields; the message names the first error.

    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _reported(kind, error) from None
    except (ValueError, RecursionError) as error:
        raise _not_json(str(error)) from None


def _reported(kind: type[BaseModel], error: ValidationError) -> ApiError:
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    if "str" in str(first["loc"][-1:]) and isinstance(first["input"], list):  # a text, or a list of texts
        first = next(found for found in reversed(errors) if found["loc"][:1] == first["loc"][:1])
    place = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return _not_json(first["msg"].removeprefix("Invalid JSON: "))
    if not place:
        return ApiError(400, "the body is not a JSON object; send an object with the request's fields")
    name = _name(place)
    if first["type"] == "extra_forbidden":
        known = kind.model_fields if len(place) == 1 else ()
        hint = f"; {did_you_mean(place[0], known)}" if known else "; omit it"
        return ApiError(400, f"unknown parameter {shown(name)}{hint}", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing; send it", param=name, code="missing_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{name} is {shown(first['input'])}: {_lower(message)}", param=place[0])


def _not_json(why: str) -> ApiError:
    message = f"the body is not valid JSON: {why}; send a JSON object, encoded as UTF-8"
    return ApiError(400, message, code="invalid_json")


def _name(place: Sequence[str]) -> str:
    """Return a place in the body, without the names that pydantic gives to alternatives of a type."""
    parts = [part for part in place if part != "str" and not any(mark in part for mark in "[(-")]
    return ".".join(parts)[:100]


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def prompts_of(value: Any) -> list[str] | list[list[int]]:
    """Return the prompts of a request: texts, or lists of tokens.

    Raises:
        ApiError: 400 for another type, or no prompt.

    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if all(_is_token(item) for item in value):
            return [value]
        if all(isinstance(item, list) and all(map(_is_token, item)) for item in value):
            return value
    raise ApiError(
        400,
        f"prompt is {shown(value)}; send a text, a list of token IDs, or a list of either, at least one",
        param="prompt",
    )


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def choice_of(body: CommonBody, *, vocab_size: int) -> Choice:
    """Return how the tokens of a request are chosen; the default temperature is 1, as in OpenAI's API.

    Raises:
        ApiError: 400 for a biased token outside the vocabulary, or if transformers is required and missing.

    """
    bias = []
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) < 20 and int(name) < vocab_size):
            raise ApiError(
                400,
                f"logit_bias has the token {shown(name)}; the model knows 0 to {vocab_size - 1}",
                param="logit_bias",
            )
        bias.append((int(name), value))
    temperature = 1.0 if body.temperature is None else float(body.temperature)
    draws = temperature > 0
    choice = Choice(
        temperature=temperature,
        top_k=None if body.top_k in (None, 0, -1) or not draws else body.top_k,
        top_p=None if body.top_p in (None, 1) or not draws else body.top_p,
        min_p=body.min_p or None if draws else None,
        repetition_penalty=None if body.repetition_penalty == 1 else body.repetition_penalty,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        bias=tuple(bias),
    )
    for field in ("min_p", "repetition_penalty"):
        if getattr(choice, field) is not None and find_spec("transformers") is None:
            raise ApiError(
                400,
                f"{field} needs transformers 5.17 or newer; {install_extra('hf')}, or omit {field}",
                param=field,
            )
    return choice
