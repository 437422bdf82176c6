"""What all language models share: embedding, layers, head, and the walk over windows of tokens.

Shape legend: B batch, L tokens, D model width, U injection width, V vocabulary (padded).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name everyone uses

from implicit_blocks._utils.validation import require_count
from implicit_blocks.cuda.map_graphs import MapGraphs
from implicit_blocks.interfaces import Solver
from implicit_blocks.layers import Linear, at_least_float32, reset_parameters_
from implicit_blocks.models.backbone import Backbone, BoundMap
from implicit_blocks.models.injection import pays_by_token
from implicit_blocks.models.outputs import Encoded, LMOutput
from implicit_blocks.models.sequence_state import SequenceState
from implicit_blocks.ops.cross_entropy import linear_cross_entropy
from implicit_blocks.ops.transforms import is_vmapped
from implicit_blocks.search.agreement import Agreement
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.solution import Solution
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec, Stopping
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.weights.weight_norm import assign_weight

COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "realize_acc_reads_threshold": 40,  # a convolution over projection and injection stays one kernel
    "comprehensive_padding": False,  # padded strides are copied away again before operators of our own
}


class LanguageModel(nn.Module, ABC):
    """Embedding, layers, head, and the walk over windows; what happens within a window is the subclass's.

    One thread at a time may call a model: its weights are made ready on its layers for the length of a call.
    Another one meanwhile is refused; it takes a copy made beforehand (``copy.deepcopy``).
    """

    def __init__(self, spec: ImplicitLMSpec | ExplicitLMSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.padded_vocab_size, spec.d_model)
        self.backbone = Backbone(spec)
        self.head = None if spec.tie_embeddings else Linear(spec.d_model, spec.padded_vocab_size, bias=False)
        self.agree: Agreement | None = None
        """How processes that must iterate equally often agree to stop; None: each stops on its own."""

    @abstractmethod
    def inject(self, x_BLD: Tensor, weights: WeightCache) -> tuple[Tensor | None, Tensor]:
        """Return what embedded tokens add to the layers, (B, L, U) or None, and where their search begins."""

    @abstractmethod
    def search_config(self, options: SearchOptions) -> tuple[Solver, Stopping] | None:
        """Return the solver and the stopping rule in force with these options; None: there is no search."""

    @abstractmethod
    def solve_window(
        self, f: BoundMap, start_BLD: Tensor, *, search: SearchOptions, trace: bool
    ) -> tuple[Tensor, Solution | None]:
        """Return the point that the head reads (while gradients are recorded) or that is mapped once more."""

    # ------------------------------------------------------------------------------------ forward

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
        tolerance: float | None = None,
        max_iterations: int | None = None,
        damping: float | None = None,
        warm_start: bool = False,
        moving_average: float | None = None,
        trace: bool = False,
        return_logits: bool = True,
    ) -> LMOutput:
        """Predict from tokens (B, L).

        Args:
            input_ids: (B, L) int64, L at least 1.
            labels: (B, L) int64, aligned with the inputs position by position; −100 is ignored. The loss is
                the mean cross-entropy over the others, in nats.
            attention_mask: (B, L), 0 or False at padding, wherever it stands.
            documents: (B, L) int64, non-decreasing: no token sees those of another document.
            state: what the tokens before left, from an earlier output; None: these are the first.
            return_state: commit the tokens and return the state after them.
            window_length: solve this many tokens at a time, committing them before the next; None solves all
                at once. 1 is the paper's sequential mode, None its simultaneous mode; they agree as far as
                the tolerance. With gradients, those of a window reach the windows before through the
                committed states.
            tolerance: of this call's search, instead of the spec's. An explicit model has no search: it
                ignores this and the next four.
            max_iterations: of this call's search.
            damping: of its solver.
            warm_start: begin each token's search at the solution of the last token before its window.
            moving_average: α of an average over the iterates, for noisy maps (``SearchOptions``).
            trace: keep the residual of every iteration (with a single window).
            return_logits: False computes the loss in chunks of tokens, so that (B, L, V) never exists; needs
                labels.

        Raises:
            ValueError: where shapes do not fit, the window is shorter than a token, tokens or labels are
                none of the model's, or documents go back (on a CPU; a GPU is not waited for).

        """
        self.check_tokens(input_ids)
        if labels is not None:
            self._check_labels(labels, input_ids)
        labels = None if labels is None else labels.long()
        if labels is None and not return_logits:
            raise ValueError("return_logits=False leaves nothing to return without labels; give labels")
        encoded = self.encode(
            self.embedding(input_ids),
            ids_BL=input_ids,
            attention_mask=attention_mask,
            documents=documents,
            state=state,
            return_state=return_state,
            window_length=window_length,
            search=SearchOptions(
                tolerance=tolerance,
                max_iterations=max_iterations,
                damping=damping,
                warm_start=warm_start,
                moving_average=moving_average,
            ),
            trace=trace,
        )
        if labels is not None and not return_logits:
            total, predictions = linear_cross_entropy(
                encoded.hidden_BLD.flatten(0, 1), self._head_weight, labels.flatten()
            )
            return LMOutput(
                logits=None,
                loss=total / (labels != -100).sum().clamp(min=1),
                solution=encoded.solution,
                state=encoded.state,
                predictions=predictions.view_as(labels),
            )
        logits = self.predict(encoded.hidden_BLD)
        return LMOutput(
            logits=logits,
            loss=None if labels is None else _loss(logits, labels),
            solution=encoded.solution,
            state=encoded.state,
        )

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
        """Return what the head reads, given embedded tokens (B, L, D); arguments as for ``forward``.

        ``ids_BL``: the tokens, where ``x`` is what ``embedding`` makes of them, for injections by a table.
        ``search`` says how this call's search differs from the spec's. ``weights``, from ``cache_weights``,
        spare calls that follow each other, as in decoding, from making them ready again.

        Raises:
            ValueError: where shapes or state do not fit, or the window is shorter than a token.

        """
        batch, length = x_BLD.shape[:2]
        if window_length is not None:
            require_count("window_length", window_length)
        if state is not None and state.batch_size != batch:
            raise ValueError(
                f"the state has {state.batch_size} rows, the tokens {batch}; give what comes next "
                "in each row of the state"
            )
        state = state if state is not None else self.initial_state(batch)
        valid, gaps = _padding(attention_mask, (batch, length))
        if documents is not None:
            _check_documents(documents, valid, (batch, length))
        step = length if window_length is None else min(window_length, length)
        commit = return_state or step < length
        search = search if search is not None else SearchOptions()
        weights = weights if weights is not None else self.cache_weights()
        outputs, solutions = [], []
        for first in range(0, length, step):
            part = slice(first, first + step)
            f, start = self.bind(
                x_BLD[:, part],
                state,
                ids_BL=None if ids_BL is None else ids_BL[:, part],
                weights=weights,
                warm_start=search.warm_start,
                valid_BL=None if valid is None else valid[:, part],
                documents_BL=None if documents is None else documents[:, part],
                gaps=gaps,
            )
            z, solution = self.solve_window(f, start, search=search, trace=trace)
            z, state = self._finish(f, z, state, commit=commit)
            outputs.append(z)
            if solution is not None:
                solutions.append(solution.with_value(z))
        return Encoded(
            outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1),
            Solution.concatenate(solutions) if solutions else None,
            state if return_state else None,
        )

    def check_tokens(self, input_ids: Tensor) -> None:
        """Refuse what is no tensor of this model's tokens, (B, L); unknown ones on a CPU alone.

        Raises:
            ValueError: for another shape or dtype, or an unknown token (a GPU is not waited for).

        """
        if not isinstance(input_ids, Tensor):
            raise ValueError(f"input_ids is a {type(input_ids).__name__}; give a tensor, torch.tensor(…)")
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; give (batch, tokens), neither of them 0"
            )
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"input_ids are {input_ids.dtype}; give tokens, as int64")
        if (unknown := self._unknown(input_ids)) is not None:
            raise ValueError(f"input_ids have token {unknown}; use the model's own tokenizer")

    def _check_labels(self, labels: Tensor, input_ids: Tensor) -> None:
        if not isinstance(labels, Tensor):
            raise ValueError(f"labels is a {type(labels).__name__}; give a tensor, torch.tensor(…)")
        if labels.shape != input_ids.shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, input_ids {tuple(input_ids.shape)}; give one "
                "label a token, aligned with it"
            )
        self.check_label_ids(labels)

    def check_label_ids(self, labels: Tensor) -> None:
        """Refuse labels, (B, L), that are neither this model's tokens nor -100; unknown ones on a CPU alone.

        Raises:
            ValueError: for another dtype, or an unknown token (a GPU is not waited for).

        """
        if labels.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"labels are {labels.dtype}; give tokens, as int64")
        if (unknown := self._unknown(labels, but=-100)) is not None:
            raise ValueError(f"labels have {unknown}; -100 marks a position that doesn't count")

    def _unknown(self, ids: Tensor, *, but: int | None = None) -> str | None:
        """Name the first id without a row of the embedding, where reading the values costs no waiting."""
        if ids.device.type != "cpu" or torch.compiler.is_compiling() or is_vmapped():
            return None
        rows = self.embedding.weight.shape[0]
        known = (ids >= 0) & (ids < rows)
        known = known if but is None else known | (ids == but)
        if bool(known.all()):
            return None
        return f"{int(ids[~known][0])}, and the model knows 0 to {rows - 1}"

    def _finish(
        self, f: BoundMap, z: Tensor, state: SequenceState, *, commit: bool
    ) -> tuple[Tensor, SequenceState]:
        """Map once more where the value is still owed, and commit where that is asked for."""
        owed = self.needs_final_call()
        mapped, layers = f.commit(z) if commit else (f(z) if owed else z, None)
        if owed and f.u_BLU is not None:  # after a search: what overflows keeps the value that it had
            z = torch.where(mapped.sum(-1, keepdim=True).isfinite(), mapped, z)
        else:
            z = mapped if owed else z
        if layers is None:
            return z, state
        return z, state.after(f.window, layers, z)

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
        """Return the map ``z → f(z, u)`` of the next window and where its search begins."""
        length, dtype = x_BLD.shape[1], self.stream_dtype
        window = state.window(length, valid_BL=valid_BL, documents_BL=documents_BL, gaps=gaps, dtype=dtype)
        by_token = ids_BL is not None and pays_by_token(self.embedding, ids_BL.numel())
        if ids_BL is not None and by_token and self.backbone.supports_injection_table(window):
            window = replace(window, u_rows_BL=ids_BL.contiguous())
            u, starts_VD = self.inject(self.embedding.weight, weights)
            start = F.embedding(ids_BL, starts_VD)
        else:
            u, start = self.inject(x_BLD, weights)
        if warm_start and u is not None:
            start = state.warm_start(window, start)
        f = self.backbone.bind(window, u_BLU=u, states=state.layers, start_BLD=start, weights=weights)
        return f, start

    @abstractmethod
    def needs_final_call(self) -> bool:
        """Whether ``solve_window`` returns a point still to be mapped: the last call of an evaluation."""

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def predict(self, z_BLD: Tensor) -> Tensor:
        """Return the logits (…, V), in float32 or better, of what ``encode`` returned, (…, D)."""
        weight = self._head_weight
        return at_least_float32(F.linear(z_BLD.to(weight.dtype), weight))

    # ------------------------------------------------------------------------------------ states, parameters

    def cache_weights(self) -> WeightCache:
        """Return the weights of the map as they are now, made ready for any number of calls of ``encode``.

        For calls without gradients, and in the autocast mode of this one. The head is no part of the map and
        casts its own weight.
        """
        return WeightCache(*(module for module in self.children() if module is not self.head))

    @property
    def stream_dtype(self) -> torch.dtype:
        """The type of the residual stream: float32, or float64 in a float64 model."""
        return torch.promote_types(self.embedding.weight.dtype, torch.float32)

    def initial_state(self, batch_size: int, *, max_seq_len: int | None = None) -> SequenceState:
        """Return the state before the first token; caches have room for ``max_seq_len`` tokens, if given."""
        weight = self.embedding.weight
        layers = self.backbone.initial_states(
            batch_size, device=weight.device, dtype=weight.dtype, max_seq_len=max_seq_len
        )
        position = torch.zeros(1, dtype=torch.int64, device=weight.device)
        return SequenceState(batch_size, 0, position, layers)

    def reset_parameters(self) -> None:
        """Initialize all parameters: embedding N(0, σ²), linear layers as torch does, the mixers as they say.

        With ``scale_residual_init`` the projections that write into the residual stream start divided by the
        square root of their number, so that its variance does not grow with depth. The published code intends
        this too, but its weight norm undoes it in implicit models.
        """
        reset_parameters_(self)
        nn.init.normal_(self.embedding.weight, std=self.spec.embedding_std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=self.spec.embedding_std)
        if self.spec.scale_residual_init:
            projections = [p for block in self.backbone.blocks() for p in block.output_projections()]
            for projection in projections:
                weight = projection.weight
                assert isinstance(weight, Tensor)
                assign_weight(projection, weight / math.sqrt(len(projections)))

    def compile_layers(self) -> None:
        """Compile the layers with ``torch.compile``: minutes at the first call of a shape, fused ones after.

        One compiled layer serves all of a kind. Worth it where windows keep one shape for many calls, as in
        training.
        """
        # Shapes of training, evaluation and of batches that rows have left, with and without gradients.
        torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
        for block in self.backbone.blocks():
            block.compile(dynamic=False, options=COMPILE_OPTIONS)
        self.backbone.norm.compile(dynamic=False, options=COMPILE_OPTIONS)

    def capture_graphs(self, enabled: bool = True) -> None:
        """Capture the search's map as CUDA graphs, one a shape of the batch: an iteration is one launch then.

        Worth it where shapes repeat and launching takes longer than computing, as with many small kernels;
        keeps the weights and their gradients once more, in the type they are used in. Off a GPU it changes
        nothing.
        """
        self.backbone.graphs = MapGraphs() if enabled else None

    def checkpoint_activations(self, what: Literal["none", "steps", "layers"]) -> None:
        """Choose what backward computes again instead of keeping it.

        Args:
            what: nothing; ``steps``: each differentiated call of the map, of which only the start is kept;
                ``layers``: each layer of each such call, so that backward holds one layer's activations at a
                time. Both cost one more forward pass of what is differentiated.

        Raises:
            ValueError: for anything else.

        """
        if what not in ("none", "steps", "layers"):
            raise ValueError(f"what is computed again is {what!r}; choose 'none', 'steps' or 'layers'")
        self.backbone.activation_checkpointing = what

    def sharding_units(self) -> list[nn.Module]:
        """Return the layers, which may be sharded over processes one by one."""
        return list(self.backbone.blocks())

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that weight decay applies to (matrices, embedding) and the others, each once.

        Not decayed: norms, biases, the gains of weight norm, and the mixers' vectors (A_log, dt_bias, D).
        """
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            matrix = parameter.ndim >= 2 and not name.endswith("original0")
            (decayed if matrix else others).append(parameter)
        return decayed, others


def _padding(attention_mask: Tensor | None, shape: tuple[int, int]) -> tuple[Tensor | None, bool]:
    """Return where tokens are real, (B, L) bool, or None where all are; and whether padding parts any."""
    if attention_mask is None:
        return None, False
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the tokens {shape}; give one flag "
            "a token"
        )
    valid = attention_mask.bool()
    begun = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0]  # runs of real tokens
    whole, parted = torch.stack((valid.all(), (begun > 1).any())).cpu()  # at once: a device is waited for
    return (None, False) if bool(whole) else (valid, bool(parted))


def _check_documents(documents: Tensor, valid: Tensor | None, shape: tuple[int, int]) -> None:
    """Refuse documents of another shape, and numbers that go back, which not every mixer could tell apart."""
    if documents.shape != shape:
        raise ValueError(
            f"documents have shape {tuple(documents.shape)}, the tokens {shape}; give one number a token"
        )
    if documents.device.type != "cpu" or torch.compiler.is_compiling():  # a GPU would be waited for
        return
    if valid is not None:  # padding may be said to be of any: it counts to the one before
        lowest = torch.iinfo(torch.int64).min
        documents = documents.long().masked_fill(~valid, lowest)
        documents = documents.where(valid, documents.cummax(1).values)
    back = (documents[:, 1:] < documents[:, :-1]).nonzero()
    if len(back):
        row, place = back[0].tolist()
        before, after = documents[row, place : place + 2].tolist()
        raise ValueError(
            f"documents of row {row} go back from {before} to {after}; number those of a row in their order"
        )


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)
