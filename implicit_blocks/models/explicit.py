"""The explicit twin of the implicit language model: the same layers, applied once.

Shape legend: B batch, L tokens, D model width, V vocabulary (padded).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from torch import Tensor

from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.models.parts import ModelParts, ModelWeights, Prepared, check_forward, read_out
from implicit_blocks.models.stack import BoundMap
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.specs import ExplicitLMSpec
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.windows import SequenceState, check_inputs, check_windows


class ExplicitLM(ModelParts):
    """The layers of an implicit model, each applied once, without injection.

    ``x = embed(tokens)``; ``z = coda(core(prelude(x)))``; ``logits = E z``.

    Args:
        spec: the configuration of the model.

    """

    def __init__(self, spec: ExplicitLMSpec) -> None:
        super().__init__(spec)
        self.reset_parameters()

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        state: SequenceState | None = None,
        return_state: bool = False,
        window_length: int | None = None,
        trace: bool = False,
        return_logits: bool = True,
        **search: Unpack[SearchKwargs],
    ) -> LMOutput:
        """Predict from tokens (B, L); arguments as for ``ImplicitLM.forward``.

        The options of a search (``search``, ``trace``) are validated and have no effect.

        Raises:
            ValueError: as for ``ImplicitLM.forward``.

        """
        check_forward(input_ids, labels, vocab_size=len(self.embedding.weight), return_logits=return_logits)
        x_BLD = self.embedding(input_ids)  # x = embed(tokens)
        encoded = self.encode(  # z = coda(core(prelude(x)))
            x_BLD,
            ids_BL=input_ids,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            return_state=return_state,
            window_length=window_length,
            search=SearchOptions.of_call(self.forward, search),
            weights=self.cache_weights(),
        )
        return read_out(self, encoded, labels=labels, return_logits=return_logits)  # logits = E z

    def encode(
        self,
        x_BLD: Tensor,
        *,
        ids_BL: Tensor | None = None,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        state: SequenceState | None = None,
        return_state: bool = False,
        window_length: int | None = None,
        search: SearchOptions | None = None,
        trace: bool = False,
        weights: ModelWeights | None = None,
    ) -> Encoded:
        """Return the head's input for embedded tokens (B, L, D); arguments as for ``ImplicitLM.encode``.

        Raises:
            ValueError: where shapes or state do not fit, or the window is shorter than a token.

        """
        inputs = check_inputs(
            x_BLD,
            ids_BL=ids_BL,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            window_length=window_length,
        )
        windows = inputs.windows(window_length)
        commit = return_state or len(windows) > 1
        check_windows(commit=commit, bidirectional=self.bidirectional)
        weights = weights if weights is not None else self.cache_weights()
        parts: list[Encoded] = []
        for window in windows:
            prepared = self.prepare(window, state, weights=weights, commit=commit)
            f, start_BLC = self.bind_core(prepared, weights=weights)
            z_BLC, core = f.commit(start_BLC) if commit else (f(start_BLC), prepared.core)
            output = self.output_map(prepared, weights)
            if commit:
                hidden_BLD, coda = output.commit(z_BLC)
                state = prepared.state.after(prepared.window, (*prepared.prelude, *core, *coda), z_BLC)
            else:
                hidden_BLD = output(z_BLC)
            parts.append(Encoded(hidden_BLD))
        whole = parts[0] if len(parts) == 1 else Encoded.concatenate(parts)
        return replace(whole, state=state if return_state else None)

    def bind_core(
        self,
        prepared: Prepared,
        *,
        weights: ModelWeights,
        ids_BL: Tensor | None = None,
        search: SearchOptions | None = None,
    ) -> tuple[BoundMap, Tensor]:
        """Return the map of a prepared window and its input, (B, L, C)."""
        start_BLC = self.initial_point(prepared.x_BLD, prepared.c_BLD, prepared.window.positions_BL)
        f = self.backbone.bind(prepared.window, states=prepared.core, start_BLD=start_BLC, weights=weights)
        return f, start_BLC

    def inject(self, c_BLD: Tensor, weights: WeightCache) -> tuple[None, None]:
        """Return None: there is no injection."""
        return None, None

    def initial_point(self, x_BLD: Tensor, c_BLD: Tensor, positions_BL: Tensor) -> Tensor:
        """Return the prelude's output in the dtype of the residual stream."""
        return c_BLD.to(self.stream_dtype)

    def search_config(self, options: SearchOptions | None = None) -> tuple[None, None]:
        """Return no solver and no stopping rule: there is no search."""
        return None, None
