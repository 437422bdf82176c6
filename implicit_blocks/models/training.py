"""Methods of a model that the trainer calls: compilation, CUDA graphs, activation checkpointing, groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import Literal

import torch
import torch._functorch.config
import torch.compiler.config
from torch import nn

from implicit_blocks.depths.depth import Depth, following_depth
from implicit_blocks.models.map_graphs import MapGraphs
from implicit_blocks.models.stack import Stack
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec
from implicit_blocks.weights.quantized import QuantizedWeights

COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "realize_acc_reads_threshold": 40,  # keeps a convolution over projection and injection in one kernel
    "comprehensive_padding": False,  # padded strides would be copied away before our own operators
}


def keep_saved_tensors() -> None:
    """Let the graph of compiled layers be differentiated more than once, from now on.

    By default the compiler reuses the memory of tensors saved for backward, and a second backward raises
    ``RuntimeError``. Layers compiled before are compiled again.
    """
    if torch._functorch.config.donated_buffer:
        torch._functorch.config.donated_buffer = False
        # The key of the compiler's cache does not say whether code overwrites saved tensors: without a tag it
        # may return code that does, and the second backward would be wrong.
        torch.compiler.config.cache_key_tag += "saved tensors kept"
        torch.compiler.reset()


class TrainingMethods(nn.Module):
    """Switches and parameter groups of a model whose layers are in stacks: prelude, core, coda."""

    spec: ImplicitLMSpec | ExplicitLMSpec
    embedding: nn.Embedding
    backbone: Stack
    depth: Depth | None

    @abstractmethod
    def stacks(self) -> list[Stack]:
        """Return the stacks that the model has, in the order in which they run."""

    def compile_layers(self) -> None:
        """Compile the layers with ``torch.compile``: the first call of a shape takes minutes.

        Layers of one kind share one compiled function. Worth it where windows keep their shape for many
        calls, as in training.
        """
        # Shapes of training, evaluation and compacted batches, with and without gradients.
        torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
        # As without compilation: autocast would otherwise also narrow products in float32, such as a scan's.
        torch._functorch.config.backward_pass_autocast = "off"
        for stack in self.stacks():
            for block in stack.blocks():
                block.compile(dynamic=False, options=COMPILE_OPTIONS)
            if stack.norm is not None:
                stack.norm.compile(dynamic=False, options=COMPILE_OPTIONS)

    def capture_graphs(self, enabled: bool = True) -> None:
        """Capture the map as CUDA graphs, one for each shape of the batch: an iteration is then one launch.

        Worth it where shapes repeat and launches take longer than the computation, as with many small
        kernels. Keeps a copy of the weights and their gradients in the dtype they are used in. Has no effect
        on other devices.
        """
        for stack in self.stacks():
            stack.graphs = MapGraphs() if enabled else None

    def quantize_search(self, dtype: torch.dtype | None = torch.float8_e4m3fn) -> None:
        """Begin searches in training with weights and activations in 8-bit floats; None: full precision.

        Products of the core's linear layers then have one scale per row of each factor. A search continues in
        full precision once its residual is near the tolerance, and with its last iteration at the latest, so
        that its solution, its status and all gradients are those of full precision
        (``implicit_blocks.search.two_stages``). Worth it on GPUs with matrix units for 8-bit floats, for wide
        models. Layers of unsupported shapes stay in full precision, and so do, with the reason in the log,
        searches on other GPUs. On a CPU the products are emulated, as a slow reference.

        Raises:
            ValueError: another dtype.

        """
        if dtype not in (None, torch.float8_e4m3fn):
            raise ValueError(
                f"search_dtype is {dtype}; choose torch.float8_e4m3fn, or None for full precision"
            )
        self.backbone.quantized = None if dtype is None else QuantizedWeights()

    def checkpoint_activations(self, what: Literal["none", "steps", "layers"]) -> None:
        """Choose which activations backward recomputes instead of keeping them.

        Args:
            what: ``none``; ``steps``: each differentiated call of the map keeps only its input; ``layers``:
                each layer of each such call keeps only its input, so that backward holds the activations of
                one layer at a time. Both cost one more forward pass of the differentiated calls.

        Raises:
            ValueError: for any other value.

        """
        if what not in ("none", "steps", "layers"):
            raise ValueError(f"checkpoint_activations got {what!r}; choose 'none', 'steps' or 'layers'")
        for stack in self.stacks():
            stack.activation_checkpointing = what

    def sharding_units(self) -> list[nn.Module]:
        """Return the layers, which may be sharded over processes one by one."""
        return [block for stack in self.stacks() for block in stack.blocks()]

    def match_counters(self, names: Collection[str]) -> set[str]:
        """Add the counters that a checkpoint has, and return the names of counters that it lacks.

        The counter of random depths is in the state dict from the first phase with a random depth on.
        """
        if "depth.draws" in names and isinstance(self.spec, ImplicitLMSpec):
            device = self.embedding.weight.device
            self.depth = following_depth(self.depth, self.spec.depth, device=device, training=self.training)
            self.depth.count_draws()
            self.depth.to(device)
        return {"depth.draws"} & (self.state_dict().keys() - set(names))

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with weight decay (matrices, embedding) and those without, each once.

        Without decay: norms, biases, the gains of weight norm, and the mixers' vectors (A_log, dt_bias, D).
        """
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            matrix = parameter.ndim >= 2 and not name.endswith("original0")
            (decayed if matrix else others).append(parameter)
        return decayed, others
