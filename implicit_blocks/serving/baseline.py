"""Decoding of transformers' own models, which have no slots: ``generate``, interleaved token by token.

Shape legend: L tokens, V vocabulary.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.decoding import NewToken, Request
from implicit_blocks.decoding.processors import each
from implicit_blocks.solution import Solution


class TransformersDecoder:
    """Continues prompts with transformers' ``generate``, with the interface of ``ContinuousDecoder``.

    Each text runs ``generate`` in a thread of its own and waits after every token until all others have one
    more. One thread runs at a time, and samples with the text's own random numbers: a text is that of
    ``generate`` alone after ``torch.manual_seed(seed)``. Any architecture works. Texts are not batched: a
    token costs a call of the model.

    Args:
        model: a causal language model of transformers in evaluation mode.
        max_batch_size: number of texts that take turns.

    """

    accepts_limits = False

    def __init__(self, model: Any, *, max_batch_size: int) -> None:
        self.model = model
        self.texts: list[_Text | None] = [None] * max_batch_size
        self.waiting: deque[_Text] = deque()
        self.on_prompts: Callable[[list[int], Solution | None], None] | None = None
        """Called with the numbers of requests whose prompts are being solved."""
        self.before_prompts: Callable[[], None] | None = None
        self._submitted = 0

    def submit(self, request: Request) -> int:
        """Queue a prompt and return its number, counted from 0."""
        self.waiting.append(_Text(self._submitted, request, self.model))
        self._submitted += 1
        return self._submitted - 1

    def cancel(self, number: int) -> bool:
        """End a text early, and free its slot; return False if it has ended before."""
        for text in self.waiting:
            if text.number == number:
                self.waiting.remove(text)
                return True
        for slot, active in enumerate(self.texts):
            if active is not None and active.number == number:
                self._leave(slot)
                return True
        return False

    @property
    def busy(self) -> bool:
        """Whether a text is active or queued."""
        return bool(self.waiting) or any(text is not None for text in self.texts)

    def step(self) -> list[NewToken]:
        """Fill free slots, and return the next token of every active text."""
        for slot, active in enumerate(self.texts):
            if active is None and self.waiting:
                entering = self.texts[slot] = self.waiting.popleft()
                if self.on_prompts is not None:
                    self.on_prompts([entering.number], None)
        new_tokens: list[NewToken] = []
        try:
            for slot, text in enumerate(self.texts):
                if text is None:
                    continue
                new_tokens.append(text.advance())
                if new_tokens[-1].last:
                    self._leave(slot)
        except BaseException:  # the decoder is replaced
            for slot in range(len(self.texts)):
                self._leave(slot)
            raise
        return new_tokens

    def _leave(self, slot: int) -> None:
        if (text := self.texts[slot]) is not None:
            self.texts[slot] = None
            text.leave()


class _LeftError(Exception):
    """Ends the ``generate`` of a cancelled text."""


class _Text:
    """A text, and its ``generate`` in a thread, which runs only within ``advance`` and ``leave``.

    It is also the streamer of its ``generate``. The two semaphores hand control to the thread and back.
    """

    def __init__(self, number: int, request: Request, model: Any) -> None:
        self.number, self.request, self.model = number, request, model
        self.generated = 0
        self.left = False
        self._device: torch.device = model.device
        self._random = torch.Generator(self._device).manual_seed(request.seed).get_state()
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
        self._new: tuple[int, Tensor] | None = None
        self._logits_V = torch.empty(0)
        self._error: BaseException | None = None

    def advance(self) -> NewToken:
        """Run ``generate`` up to the next token, with the random numbers of this text.

        Raises:
            Exception: ``generate`` failed.

        """
        self._new = None
        on_cpu = self._device.type == "cpu"
        module = torch if on_cpu else torch.get_device_module(self._device)
        with torch.random.fork_rng([] if on_cpu else [self._device], device_type=self._device.type):
            module.set_rng_state(self._random)
            self._switch()
            self._random = module.get_rng_state()
        if self._error is not None:
            raise self._error
        assert self._new is not None
        token, logits_V = self._new
        self.generated += 1
        last = self.generated == self.request.max_new_tokens or token in self.request.stop_token_ids
        return NewToken(self.number, token, last, logits_V)

    def leave(self) -> None:
        """End ``generate``, whether or not the text is complete."""
        self.left = True
        if self._thread.is_alive():
            self._switch()

    def _switch(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._back.acquire()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self._generate()
        except _LeftError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._back.release()

    def _generate(self) -> None:
        from transformers import GenerationConfig, LogitsProcessorList

        request, sampling = self.request, self.request.sampling
        ids = torch.as_tensor(request.prompt, device=self._device)[None]
        ends, processors = list(request.stop_token_ids), each(request.logits_processor)
        # A rule of its own, since transformers fills what is missing from the model's generation_config.
        rule: dict[str, Any] = {"do_sample": sampling.draws}
        if sampling.draws:
            rule["temperature"] = sampling.temperature
            rule |= {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        config = GenerationConfig(
            max_new_tokens=request.max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **rule,
        )
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([self._keep, *processors]),
            streamer=self,
        )

    def _keep(self, ids_1L: Tensor, logits_1V: Tensor) -> Tensor:
        """Keep the logits of the next token, before temperature, ``top_k`` and ``top_p``."""
        self._logits_V = logits_1V[0].clone()
        return logits_1V

    def put(self, tokens: Tensor) -> None:
        """Receive the prompt, (1, L), and then each token, (1,); wait after each token for the next turn."""
        if tokens.ndim > 1:
            return
        self._new = int(tokens), self._logits_V
        self._back.release()
        self._go.acquire()
        if self.left:
            raise _LeftError

    def end(self) -> None:
        """Receive the end of the text."""
