"""The explicit twin of the implicit language model: the same layers, applied once.

Shape legend: B batch, L tokens, D model width, V vocabulary (padded).
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from implicit_blocks.models.backbone import BoundMap
from implicit_blocks.models.inputs import check_forward, check_inputs
from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.models.parts import ModelParts, read_out
from implicit_blocks.models.sequence_state import SequenceState
from implicit_blocks.search.options import SearchKwargs, SearchOptions
from implicit_blocks.specs import ExplicitLMSpec
from implicit_blocks.weights.cache import WeightCache


class ExplicitLM(ModelParts):
    """The layers of an implicit model applied once to the embedding, without injection.

    ``x = embed(tokens)``; ``z = f(x)``; ``logits = E z``.

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
        encoded = self.encode(  # z = f(x)
            x_BLD,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            return_state=return_state,
            window_length=window_length,
            search=SearchOptions(**search),
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
        weights: WeightCache | None = None,
    ) -> Encoded:
        """Return ``f(x)`` of embedded tokens (B, L, D); arguments as for ``ImplicitLM.encode``.

        Raises:
            ValueError: where shapes or state do not fit, or the window is shorter than a token.

        """
        inputs = check_inputs(
            x_BLD,
            ids_BL=None,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            window_length=window_length,
        )
        batch, length = x_BLD.shape[:2]
        state = state if state is not None else self.initial_state(batch)
        weights = weights if weights is not None else self.cache_weights()
        step = length if window_length is None else min(window_length, length)
        commit = return_state or step < length
        outputs = []
        for window in inputs.windows(step):
            f, start_BLD = self.bind(
                window.x_BLD,
                state,
                weights=weights,
                valid_BL=window.valid_BL,
                documents_BL=window.documents_BL,
                gaps=window.gaps,
            )
            if commit:
                z_BLD, layers = f.commit(start_BLD)
                state = state.after(f.window, layers, z_BLD)
            else:
                z_BLD = f(start_BLD)
            outputs.append(z_BLD)
        hidden_BLD = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return Encoded(hidden_BLD, None, state if return_state else None)

    def bind(
        self,
        x_BLD: Tensor,
        state: SequenceState,
        *,
        weights: WeightCache,
        ids_BL: Tensor | None = None,
        warm_start: bool = False,
        valid_BL: Tensor | None = None,
        documents_BL: Tensor | None = None,
        gaps: bool = True,
    ) -> tuple[BoundMap, Tensor]:
        """Return the map of the next window and its input, (B, L, D); no warm start and no injection."""
        window = state.window(
            x_BLD.shape[1], valid_BL=valid_BL, documents_BL=documents_BL, gaps=gaps, dtype=self.stream_dtype
        )
        start_BLD = self.start(x_BLD)
        f = self.backbone.bind(window, u_BLU=None, states=state.layers, start_BLD=start_BLD, weights=weights)
        return f, start_BLD

    def inject(self, x_BLD: Tensor, weights: WeightCache) -> Tensor | None:
        """Return None: there is no injection."""
        return None

    def start(self, x_BLD: Tensor) -> Tensor:
        """Return the embedded tokens in the dtype of the residual stream."""
        return x_BLD.to(self.stream_dtype)

    def search_config(self, options: SearchOptions | None = None) -> tuple[None, None]:
        """Return no solver and no stopping rule: there is no search."""
        return None, None
