"""A served model: what requests ask of it, checked against its limits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from implicit_blocks.serving.bodies import ChatBody, CommonBody, CompletionBody, choice_of, prompts_of
from implicit_blocks.serving.engine import Engine
from implicit_blocks.serving.errors import ApiError, shown
from implicit_blocks.serving.formats import ChatFormat, CompletionFormat, Format
from implicit_blocks.serving.inspect_api import MOST_INSPECTED, InspectionBody
from implicit_blocks.serving.jobs import Events, Job, ModelDescription, Order
from implicit_blocks.serving.language import Language
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.texts import Text, Texts
from implicit_blocks.serving.word_problem import WordProblem, group_card

_DEFAULT_TOKENS = 16
"""``max_tokens`` of completions, as in OpenAI's API."""

_MOST_CHARACTERS = 128
"""Longer texts per token of ``max_seq_len`` are refused without being encoded."""


@dataclass(frozen=True)
class Prompt:
    """A prompt: its tokens, and its text."""

    tokens: Sequence[int]
    text: str


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the HTTP side needs to serve a model, in this process or another one."""

    name: str
    description: ModelDescription
    language: Language
    options: ServerOptions
    problem: WordProblem | None = None


class ServedModel:
    """A model with its name, language and engine.

    Args:
        setup: the name by which requests ask for it, what they can ask, its language and limits.
        engine: runs its texts.

    """

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.name, self.description, self.language = setup.name, setup.description, setup.language
        self.options, self.problem, self.engine = setup.options, setup.problem, engine

    def card(self) -> dict[str, Any]:
        """Return the model's entry in ``/v1/models``."""
        description = self.description
        card: dict[str, Any] = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "implicit_blocks",
            "kind": description.kind,
            "max_seq_len": self.options.max_seq_len,
            "vocab_size": description.vocab_size,
            "accepts_limits": description.accepts_limits,
        }
        if description.max_iterations is not None:
            card["tolerance"], card["max_iterations"] = description.tolerance, description.max_iterations
        if self.problem is not None:
            card["word_problem"] = group_card(self.problem)
        return card

    def completion(self, body: CompletionBody) -> tuple[Texts, Format]:
        """Return the texts of a completion request, and the format of its responses.

        Raises:
            ApiError: 400 for a request that the model cannot serve.

        """
        self._check(body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise ApiError(
                400, f"best_of is {body.best_of} and n {body.n or 1}; omit best_of", param="best_of"
            )
        prompts = [self._prompt(prompt) for prompt in prompts_of(body.prompt)]
        echo = bool(body.echo)
        tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        name = f"cmpl-{secrets.token_hex(12)}"
        texts = self._texts(name, body, prompts, tokens, logprobs=body.logprobs, echo=echo)
        format = CompletionFormat(name, self.name, self.language, iterations=bool(body.return_iterations))
        return texts, format

    def chat(self, body: ChatBody) -> tuple[Texts, Format]:
        """Return the text of a chat request, and the format of its responses.

        Raises:
            ApiError: 400 for a request that the model cannot serve.

        """
        self._check(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs requires logprobs: true", param="top_logprobs")
        try:
            ids = self.language.chat([message.plain for message in body.messages])
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from None
        prompt = self._checked(Prompt(ids, ""), "messages")
        tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        if tokens is None:
            tokens = max(1, self.options.max_seq_len - len(ids))
        name = f"chatcmpl-{secrets.token_hex(12)}"
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        texts = self._texts(name, body, [prompt], tokens, logprobs=logprobs, echo=False)
        return texts, ChatFormat(name, self.name, self.language, iterations=bool(body.return_iterations))

    def checked_text(self, body: InspectionBody) -> tuple[Sequence[int], Sequence[int]]:
        """Return the tokens of a prompt and of its continuation, of which the model reports.

        Raises:
            ApiError: 400 for a text or limits that the model cannot take.

        """
        _check_limits(self, body)
        prompts = prompts_of(body.prompt)
        if len(prompts) > 1:
            raise ApiError(400, f"prompt has {len(prompts)} texts; inspect one at a time", param="prompt")
        prompt = self._prompt(prompts[0]).tokens
        continuation = body.continuation or []
        if continuation:
            self._checked(Prompt(continuation, ""), "continuation")
        _check_inspected(self, len(prompt), len(continuation))
        return prompt, continuation

    def _check(self, body: CommonBody) -> None:
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options requires stream: true", param="stream_options")
        _check_limits(self, body)

    def _prompt(self, value: str | list[int]) -> Prompt:
        if isinstance(value, str):
            if len(value) > _MOST_CHARACTERS * self.options.max_seq_len:
                raise self._too_long(f"prompt has {len(value)} characters, which are more tokens", "prompt")
            try:
                prompt = Prompt(self.language.encode(value), value)
            except ValueError as error:
                raise ApiError(400, str(error), param="prompt") from None
            return self._checked(prompt, "prompt")
        checked = self._checked(Prompt(value, ""), "prompt")
        return Prompt(checked.tokens, self.language.decode(value))

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        tokens = prompt.tokens
        if not tokens:
            raise ApiError(
                400, f"{param} is empty; give at least one token, such as a beginning of a text", param=param
            )
        if len(tokens) > self.options.max_seq_len:
            raise self._too_long(f"{param} has {len(tokens)} tokens", param)
        size = self.description.vocab_size
        unknown = next((token for token in tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise ApiError(
                400,
                f"{param} has token {shown(unknown)}, and the model knows 0 to {size - 1}; use "
                "the model's own tokenizer",
                param=param,
            )
        return prompt

    def _too_long(self, what: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"{what}, more than the {self.options.max_seq_len} of the server; shorten it, or serve with a "
            "larger --max-seq-len",
            param=param,
            code="context_length_exceeded",
        )

    def _texts(
        self,
        name: str,
        body: CommonBody,
        prompts: Sequence[Prompt],
        tokens: int,
        *,
        logprobs: int | None,
        echo: bool,
    ) -> Texts:
        count = body.n or 1
        if count * len(prompts) > self.options.max_choices:
            raise ApiError(
                400,
                f"{len(prompts)} prompts with n {count} are {count * len(prompts)} texts; ask for at most "
                f"{self.options.max_choices} in one request",
                param="n",
            )
        for prompt in prompts:
            if len(prompt.tokens) + tokens > self.options.max_seq_len:
                what = f"the prompt's {len(prompt.tokens)} tokens and max_tokens {tokens} are together"
                raise self._too_long(f"{what} {len(prompt.tokens) + tokens}", "max_tokens")
        seed = secrets.randbits(62) if body.seed is None else body.seed
        choice = choice_of(body, vocab_size=self.description.vocab_size)
        events = Events()
        ends = [token for token in self.language.stop_token_ids if token < self.description.vocab_size]
        texts = []
        for index in range(count * len(prompts)):
            prompt = prompts[index // count]
            order = Order(
                number=self.engine.number(),
                name=name,
                prompt=prompt.tokens,
                max_tokens=tokens,
                choice=choice,
                seed=seed + index,
                stop_token_ids=ends,
                tolerance=body.tolerance,
                max_iterations=body.max_iterations,
                logprobs=logprobs,
                score_prompt=echo and logprobs is not None,
            )
            job = Job(order=order, index=index, events=events)
            shown_prompt = prompt.text if echo else None
            texts.append(Text(job, self.language, stops=body.stops, echo=shown_prompt))
        return Texts(self.engine, texts, timeout=self.options.timeout)


def _check_limits(served: ServedModel, body: CommonBody | InspectionBody) -> None:
    """Check the tolerance and the maximum number of iterations of a request."""
    for name, value in (("tolerance", body.tolerance), ("max_iterations", body.max_iterations)):
        if value is not None and not served.description.accepts_limits:
            raise ApiError(
                400,
                f"{name} is {value}, but no search of this model ends by its residual: it is explicit, or "
                f"has a fixed number of loops or another exit criterion; omit {name}",
                param=name,
            )
    if body.max_iterations is not None and body.max_iterations > served.options.max_iterations:
        raise ApiError(
            400,
            f"max_iterations is {body.max_iterations}; choose at most {served.options.max_iterations}",
            param="max_iterations",
        )


def _check_inspected(served: ServedModel, prompt: int, continuation: int) -> None:
    """Check the number of tokens of a text to inspect."""
    most = min(served.options.max_seq_len, MOST_INSPECTED)
    if prompt + continuation > most:
        raise ApiError(
            400,
            f"prompt and continuation have {prompt + continuation} tokens; inspect at most {most} at a time",
            param="continuation" if continuation else "prompt",
            code="context_length_exceeded",
        )
