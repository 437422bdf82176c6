"""A served model in the process that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from implicit_blocks.decoding import ContinuousDecoder
from implicit_blocks.models.explicit import ExplicitLM
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.serving.baseline import TransformersDecoder
from implicit_blocks.serving.decoded_texts import Decoder
from implicit_blocks.serving.inspections import Inspections
from implicit_blocks.serving.jobs import ModelDescription
from implicit_blocks.serving.language import Language
from implicit_blocks.serving.options import ServerOptions
from implicit_blocks.serving.served import Setup
from implicit_blocks.serving.word_problem import WordProblem
from implicit_blocks.serving.worker import Worker

GATHER_SECONDS = 0.1
"""The longest time for which a text waits for others on a GPU, so that their prompts are solved together."""


class Host:
    """A model with its worker.

    Args:
        name: the name by which requests ask for the model.
        model: an ``ImplicitLM`` or ``ExplicitLM``, or a model of transformers, in evaluation mode.
        language: converts between text and tokens.
        options: slots and limits.
        problem: the word problem that the model was trained on.
        make_decoder: creates the decoder, also after a failure; None: a ``ContinuousDecoder`` of the model,
            or a ``TransformersDecoder``.

    Raises:
        ValueError: as for ``ContinuousDecoder``.

    """

    def __init__(
        self,
        name: str,
        model: Any,
        language: Language,
        options: ServerOptions,
        *,
        problem: WordProblem | None = None,
        make_decoder: Callable[[], Decoder] | None = None,
    ) -> None:
        self.model, self.options = model, options
        self.worker = Worker(
            model,
            make_decoder or self.new_decoder,
            Inspections(language, problem),
            beat_seconds=options.stall_seconds / 4,
        )
        self.setup = Setup(
            name=name, description=self._description(), language=language, options=options, problem=problem
        )

    def new_decoder(self) -> Decoder:
        """Return a decoder of the model, with the server's options."""
        if not isinstance(self.model, LanguageModel):
            return TransformersDecoder(self.model, max_batch_size=self.options.max_batch_size)
        return ContinuousDecoder(
            self.model,
            max_batch_size=self.options.max_batch_size,
            max_seq_len=self.options.max_seq_len,
            max_in_flight=self.options.max_in_flight,
            # On a CPU prompts take as long together as one after the other.
            gather_seconds=GATHER_SECONDS if self.model.embedding.weight.is_cuda else 0.0,
        )

    def _description(self) -> ModelDescription:
        model, decoder = self.model, self.worker.decoder
        if not isinstance(model, LanguageModel):
            vocab_size = int(model.config.get_text_config().vocab_size)
            return ModelDescription(kind="transformers", vocab_size=vocab_size)
        stopping = None
        if isinstance(model, ImplicitLM) and isinstance(decoder, ContinuousDecoder):
            stopping = decoder.batch.search.stopping
        return ModelDescription(
            kind="explicit" if isinstance(model, ExplicitLM) else "implicit",
            vocab_size=model.spec.vocab_size,
            accepts_limits=decoder.accepts_limits,
            tolerance=None if stopping is None else stopping.tolerance,
            max_iterations=None if stopping is None else stopping.max_iterations,
        )
