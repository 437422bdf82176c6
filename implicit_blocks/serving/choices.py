"""The fields of a request that say how tokens are chosen, checked against the vocabulary."""

from __future__ import annotations

from importlib.util import find_spec

from implicit_blocks._utils.own_parts import install_extra
from implicit_blocks.serving.bodies import CommonBody
from implicit_blocks.serving.errors import ApiError, shown
from implicit_blocks.serving.jobs import Choice


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
