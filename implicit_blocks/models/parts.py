"""What implicit and explicit language models share outside their forward passes: parameters, state, head.

Shape legend: B batch, L tokens, D model width, C core width, V vocabulary (padded).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks.depths.depth import Depth
from implicit_blocks.injections.base import Injection
from implicit_blocks.interfaces import State
from implicit_blocks.layers import (
    Linear,
    RMSNorm,
    assign_weight,
    at_least_float32,
    plain_weight,
    reset_parameters_,
)
from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.models.specs import Stack as StackLayout
from implicit_blocks.models.stack import Block, BoundMap, Stack
from implicit_blocks.models.training import TrainingMethods
from implicit_blocks.ops.cross_entropy import linear_cross_entropy
from implicit_blocks.search.agreement import Agreement
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.windows import Inputs, SequenceState, Window


class ModelWeights(WeightCache):
    """The weights of a model, prepared for any number of calls: the core's, and those of prelude and coda."""

    def __init__(self, *core: nn.Module, prelude: nn.Module | None, coda: nn.Module | None) -> None:
        super().__init__(*core)
        self.prelude = None if prelude is None else WeightCache(prelude)
        self.coda = None if coda is None else WeightCache(coda)


class Prepared(NamedTuple):
    """A window whose prelude has run."""

    window: Window
    state: SequenceState
    """The state before the window."""
    x_BLD: Tensor
    """The embedded tokens."""
    c_BLD: Tensor
    """The prelude's output; the embedded tokens where there is no prelude."""
    prelude: tuple[State, ...]
    """The states of the prelude's layers after the window, if it is committed."""
    core: tuple[State, ...]
    """The states of the core's layers before the window."""
    coda: tuple[State, ...]
    """The states of the coda's layers before the window."""


@dataclass(frozen=True)
class OutputMap:
    """``[C z] (+ prelude's output) → (norm →) coda → norm`` in one window; each part may be missing.

    Args:
        projection: the linear map from the core's width to the model's.
        c_BLD: the prelude's output, if it is added.
        norm: the final norm.
        norm_before: whether the final norm is also applied before the coda.
        coda: the map of the coda's layers.
        dtype: of the residual stream.

    """

    projection: nn.Module | None
    c_BLD: Tensor | None
    norm: nn.Module | None
    norm_before: bool
    coda: BoundMap | None
    dtype: torch.dtype

    @classmethod
    def of(cls, model: ModelParts, c_BLD: Tensor | None = None, coda: BoundMap | None = None) -> OutputMap:
        """Return the map of a model, given the prelude's output and the coda's map, where it has them."""
        spec = model.spec
        return cls(
            model.core_projection,
            c_BLD if spec.core_residual else None,
            model.norm,
            spec.norm_before_coda,
            coda,
            model.stream_dtype,
        )

    @property
    def pointwise(self) -> bool:
        """Whether the output at a token is a function of the point at that token alone."""
        return self.coda is None and self.c_BLD is None

    def __call__(self, z_BLC: Tensor) -> Tensor:
        """Return the head's input, (B, L, D)."""
        h_BLD = self.enter(z_BLC)
        return self.leave(h_BLD if self.coda is None else self.coda(h_BLD))

    def commit(self, z_BLC: Tensor) -> tuple[Tensor, tuple[State, ...]]:
        """Return the head's input, and the states of the coda's layers after the window."""
        h_BLD = self.enter(z_BLC)
        if self.coda is None:
            return self.leave(h_BLD), ()
        h_BLD, states = self.coda.commit(h_BLD)
        return self.leave(h_BLD), states

    def select_rows(self, rows: Tensor) -> OutputMap:
        """Return the map of these rows, (R,) int64 indices."""
        return self._part(
            None if self.coda is None else self.coda.select_rows(rows), lambda of_all: of_all[rows]
        )

    def first(self, tokens: int) -> OutputMap:
        """Return the map of the window's first tokens."""
        coda = None if self.coda is None else self.coda.first(tokens)
        return self._part(coda, lambda of_all: of_all[:, :tokens])

    def after(self, z_BLC: Tensor) -> OutputMap:
        """Commit the first tokens, whose core outputs are ``z``, and return the map of the others."""
        taken = z_BLC.shape[1]
        coda = self.coda
        if coda is not None:
            coda = coda.after(self.first(taken).enter(z_BLC))
        return self._part(coda, lambda of_all: of_all[:, taken:])

    def _part(self, coda: BoundMap | None, take: Callable[[Tensor], Tensor]) -> OutputMap:
        return replace(self, coda=coda, c_BLD=None if self.c_BLD is None else take(self.c_BLD))

    def enter(self, z_BLC: Tensor) -> Tensor:
        """Return the coda's input, (B, L, D)."""
        h: Tensor = z_BLC
        if self.projection is not None:
            h = self.projection(h).to(self.dtype)
        if self.c_BLD is not None:
            h = h + self.c_BLD
        return self.norm(h) if self.norm_before and self.norm is not None else h

    def leave(self, h_BLD: Tensor) -> Tensor:
        """Return the head's input, given the coda's output."""
        normed: Tensor = h_BLD if self.norm is None else self.norm(h_BLD)
        return normed


class ModelParts(TrainingMethods, nn.Module):
    """Embedding, layers and head of a language model, and the state between its windows.

    ``ImplicitLM`` and ``ExplicitLM`` define the forward pass. Only one thread at a time may call a model,
    because the weights are cached on the layers during a call. A call from a second thread raises; make a
    copy for each thread beforehand (``copy.deepcopy``).
    """

    def __init__(self, spec: ImplicitLMSpec | ExplicitLMSpec) -> None:
        super().__init__()
        self.spec = spec
        self.core_loops = 1
        """The number of states that each layer of the core keeps of a token: 1, or one per loop."""

        def stack(layout: StackLayout, *, norm: bool = False) -> Stack:
            return Stack(
                layout,
                norm=norm,
                norm_eps=spec.norm_eps,
                dropout=spec.dropout,
                weight_norm=spec.weight_norm,
            )

        def norm(wanted: bool) -> RMSNorm | None:
            return RMSNorm(spec.d_model, eps=spec.norm_eps) if wanted else None

        stacks = spec.stacks
        self.embedding = nn.Embedding(spec.padded_vocab_size, spec.d_model)
        self.backbone = stack(stacks["core"], norm=spec.norm_in_core)
        self.head = None if spec.tie_embeddings else Linear(spec.d_model, spec.padded_vocab_size, bias=False)
        self.prelude = stack(stacks["prelude"]) if "prelude" in stacks else None
        self.prelude_norm = norm(spec.prelude_norm)
        self.core_projection = (
            Linear(spec.core_width, spec.d_model, bias=spec.core_projection_bias)
            if spec.core_projection
            else None
        )
        self.coda = stack(stacks["coda"]) if "coda" in stacks else None
        self.norm = norm(spec.final_norm)
        self.needs_token_ids = any(stack.needs_token_ids for stack in self.stacks())
        """Whether a mixer reads the token IDs of a window, as value embeddings do."""
        self.bidirectional = spec.bidirectional
        """Whether a mixer sees later tokens."""
        self.injection: Injection | None = None
        self.depth: Depth | None = None
        """The number of loops in training; None: the stopping rule ends them."""
        self.agree: Agreement | None = None
        """How ranks that must make equally many iterations agree to stop; None: each rank stops alone."""

    @property
    def stream_dtype(self) -> torch.dtype:
        """The dtype of the residual stream: float32, or float64 in a float64 model."""
        return torch.promote_types(self.embedding.weight.dtype, torch.float32)

    @property
    def head_weight(self) -> Tensor:
        """``E``, (V, D): the head's weight, or the embedding's where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def stacks(self) -> list[Stack]:
        """Return the stacks that the model has, in the order in which they run."""
        return [stack for stack in (self.prelude, self.backbone, self.coda) if stack is not None]

    def state_blocks(self) -> list[Block]:
        """Return the layers in the order of ``SequenceState.layers``: prelude, core, coda.

        With one state per loop the layers of the core are repeated, loop after loop.
        """
        stacks = [(self.prelude, 1), (self.backbone, self.core_loops), (self.coda, 1)]
        layers: list[Any] = [
            layer for stack, times in stacks if stack is not None for layer in [*stack.layers] * times
        ]
        return layers

    @property
    def truncates(self) -> bool:
        """Whether every mixer can remove committed tokens (``Mixer.truncate``)."""
        return all(block.mixer.truncates for block in self.state_blocks())

    def initial_state(self, batch_size: int, *, max_seq_len: int | None = None) -> SequenceState:
        """Return the state before the first token; caches reserve room for ``max_seq_len`` tokens.

        Layers of equal mixers share one state, unless it reserves room.
        """
        weight, layers, known = self.embedding.weight, list[State](), dict[Hashable, State]()
        for block in self.state_blocks():
            kind = block.mixer.initial_state_kind if max_seq_len is None else None
            state = known.get(kind) if kind is not None else None
            if state is None:
                state = block.mixer.initial_state(
                    batch_size, device=weight.device, dtype=weight.dtype, max_seq_len=max_seq_len
                )
                known[kind] = state
            layers.append(state)
        position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return SequenceState(batch_size, 0, position, tuple(layers))

    def cache_weights(self) -> ModelWeights:
        """Return the current weights of the layers, prepared for any number of calls of ``encode``.

        For calls without gradients, in the autocast mode of this call. The head casts its own weight.
        """
        core = [self.embedding, self.backbone, *([] if self.injection is None else [self.injection])]
        return ModelWeights(*core, prelude=self.prelude, coda=self.coda)

    def prepare(
        self, inputs: Inputs, state: SequenceState | None, *, weights: ModelWeights, commit: bool = False
    ) -> Prepared:
        """Begin the next window: embed its tokens, run the prelude, and with ``commit`` keep its states.

        ``state`` is that before the window; None: at the beginning.
        """
        x_BLD, dtype = scaled(inputs.x_BLD, self.spec.embedding_scale), self.stream_dtype
        state = state if state is not None else self.initial_state(len(x_BLD))
        window = state.window(
            inputs.length,
            valid_BL=inputs.valid_BL,
            documents_BL=inputs.documents_BL,
            gaps=inputs.gaps,
            trailing=inputs.trailing,
            dtype=dtype,
        )
        if self.needs_token_ids:
            window = replace(window, ids_BL=inputs.ids_BL)
        first = 0 if self.prelude is None else len(self.prelude.layers)
        last = len(state.layers) - (0 if self.coda is None else len(self.coda.layers))
        before, core, coda = state.layers[:first], state.layers[first:last], state.layers[last:]
        c_BLD = x_BLD
        if self.prelude is not None and weights.prelude is not None:
            stream_BLD = x_BLD.to(dtype)
            f = self.prelude.bind(window, states=before, start_BLD=stream_BLD, weights=weights.prelude)
            c_BLD, before = f.commit(stream_BLD) if commit else (f(stream_BLD), before)
        if self.prelude_norm is not None:
            c_BLD = self.prelude_norm(c_BLD)
        return Prepared(window, state, x_BLD, c_BLD, before, core, coda)

    def bind(
        self,
        x_BLD: Tensor,
        state: SequenceState,
        *,
        weights: ModelWeights,
        ids_BL: Tensor | None = None,
        warm_start: bool = False,
        valid_BL: Tensor | None = None,
        documents_BL: Tensor | None = None,
        gaps: bool = True,
    ) -> tuple[BoundMap, Tensor]:
        """Return the core's map of the next window and its start, (B, L, C), given embedded tokens."""
        inputs = Inputs(x_BLD, ids_BL, valid_BL, documents_BL, gaps)
        prepared = self.prepare(inputs, state, weights=weights)
        search = SearchOptions(warm_start=warm_start)
        return self.bind_core(prepared, weights=weights, ids_BL=ids_BL, search=search)

    @abstractmethod
    def bind_core(
        self,
        prepared: Prepared,
        *,
        weights: ModelWeights,
        ids_BL: Tensor | None = None,
        search: SearchOptions | None = None,
    ) -> tuple[BoundMap, Tensor]:
        """Return the core's map of a prepared window and its start, (B, L, C)."""

    def output_map(self, prepared: Prepared, weights: ModelWeights) -> OutputMap:
        """Return the map from the core's output to the head's input in a prepared window."""
        coda = None
        if self.coda is not None and weights.coda is not None:
            like = prepared.c_BLD.to(self.stream_dtype)
            coda = self.coda.bind(prepared.window, states=prepared.coda, start_BLD=like, weights=weights.coda)
        return OutputMap.of(self, prepared.c_BLD, coda)

    def predict(self, z_BLD: Tensor) -> Tensor:
        """Return the logits ``E z``, (…, V), in float32 or better, of the output of ``encode``, (…, D).

        With ``logit_scale`` s and ``logit_softcap`` c they are ``c · tanh(s E z / c)``.
        """
        weight = self.head_weight
        return self.scale_logits(at_least_float32(F.linear(z_BLD.to(weight.dtype), weight)))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Return logits ``E z`` with the model's scale and soft cap: ``c · tanh(s E z / c)``."""
        logits, cap = scaled(logits, self.spec.logit_scale), self.spec.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        if self.depth is None:  # the weights may come from a model with a random depth
            state_dict.pop(f"{prefix}depth.draws", None)
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)

    def check_tokens(self, input_ids: Tensor) -> None:
        """Raise ValueError for tensors other than token IDs of this model, (B, L)."""
        check_token_ids(input_ids, vocab_size=self.embedding.weight.shape[0])

    def check_label_ids(self, labels: Tensor) -> None:
        """Raise ValueError for labels, (B, L), that are neither token IDs of this model nor -100."""
        check_label_ids(labels, vocab_size=self.embedding.weight.shape[0])

    def reset_parameters(self) -> None:
        """Initialize all parameters: embedding N(0, σ²), linear layers as in torch, mixers by their own rule.

        With ``scale_residual_init`` the projections that write into the residual stream are divided by the
        square root of their number, so that its variance does not grow with depth. The published code intends
        the same, but its weight norm undoes the scaling in implicit models. Parameters on the meta device,
        which have no values, are left alone.
        """
        if self.embedding.weight.is_meta:
            return  # the operations would take longer than the construction of the model
        reset_parameters_(self)
        nn.init.normal_(self.embedding.weight, std=self.spec.embedding_std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=self.spec.embedding_std)
        if self.spec.scale_residual_init:
            blocks = [block for stack in self.stacks() for block in stack.blocks()]
            projections = [p for block in blocks for p in block.output_projections()]
            for projection in projections:
                assign_weight(projection, plain_weight(projection) / math.sqrt(len(projections)))


def check_forward(input_ids: Tensor, labels: Tensor | None, *, vocab_size: int, return_logits: bool) -> None:
    """Check the tokens and labels of a forward pass, both (B, L).

    Raises:
        ValueError: for other shapes or dtypes, unknown IDs (checked on a CPU only), or no output requested.

    """
    check_token_ids(input_ids, vocab_size=vocab_size)
    if labels is not None:
        if not isinstance(labels, Tensor):
            raise ValueError(f"labels is a {type(labels).__name__}; give a tensor, torch.tensor(…)")
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, input_ids {tuple(input_ids.shape)}; give one "
                "label per token, aligned with it"
            )
        check_label_ids(labels, vocab_size=vocab_size)
    if labels is None and not return_logits:
        raise ValueError("return_logits=False requires labels; without them nothing would be returned")


def check_token_ids(input_ids: Tensor, *, vocab_size: int) -> None:
    """Raise ValueError for anything but integers (B, L) below ``vocab_size``; values on a CPU only."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids is a {type(input_ids).__name__}; give a tensor, torch.tensor(…)")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; give (batch, tokens), neither of them 0"
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids are {input_ids.dtype}; give token IDs as int64")
    if (unknown := _unknown(input_ids, vocab_size)) is not None:
        raise ValueError(f"input_ids have token {unknown}; use the model's own tokenizer")


def check_label_ids(labels: Tensor, *, vocab_size: int) -> None:
    """Raise ValueError for labels other than -100 or integers below ``vocab_size``; values on a CPU only."""
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels are {labels.dtype}; give token IDs as int64")
    if (unknown := _unknown(labels, vocab_size, but=-100)) is not None:
        raise ValueError(f"labels have {unknown}; -100 marks an ignored position")


def _unknown(ids: Tensor, vocab_size: int, *, but: int | None = None) -> str | None:
    """Describe the first ID outside the embedding; None where reading the values would synchronize."""
    if ids.device.type != "cpu" or torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(ids):
        return None
    known = (ids >= 0) & (ids < vocab_size)
    known = known if but is None else known | (ids == but)
    if bool(known.all()):
        return None
    return f"{int(ids[~known][0])}, and the model knows 0 to {vocab_size - 1}"


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor multiplied by a factor; itself for the factor 1."""
    return tensor if factor == 1 else factor * tensor


def read_out(model: ModelParts, encoded: Encoded, *, labels: Tensor | None, return_logits: bool) -> LMOutput:
    """Return the logits ``E z`` of encoded tokens, and with labels the mean cross-entropy, in nats.

    ``return_logits=False`` computes the loss in chunks of tokens, so that (B, L, V) is never allocated.
    """
    labels = None if labels is None else labels.long()
    output = LMOutput(None, solution=encoded.solution, state=encoded.state, trajectory=encoded.iterates)
    if labels is not None and not return_logits and model.spec.logit_softcap is None:
        hidden = scaled(encoded.hidden_BLD.flatten(0, 1), model.spec.logit_scale)
        total, predictions = linear_cross_entropy(hidden, model.head_weight, labels.flatten())
        loss = total / (labels != -100).sum().clamp(min=1)
        return replace(output, loss=loss, predictions=predictions.view_as(labels))
    logits = model.predict(encoded.hidden_BLD)
    output = replace(output, loss=None if labels is None else mean_cross_entropy(logits, labels))
    return replace(output, logits=logits) if return_logits else replace(output, predictions=logits.argmax(-1))


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of logits (B, L, V) over the labels (B, L) that are not −100.

    It is 0 if there are none.
    """
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)
