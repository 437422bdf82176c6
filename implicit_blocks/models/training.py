"""Methods of a model that the trainer calls: compilation, CUDA graphs, activation checkpointing, groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from implicit_blocks.models.backbone import Backbone
from implicit_blocks.models.map_graphs import MapGraphs

COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    "realize_acc_reads_threshold": 40,  # keeps a convolution over projection and injection in one kernel
    "comprehensive_padding": False,  # padded strides would be copied away before our own operators
}


class TrainingMethods(nn.Module):
    """Switches and parameter groups of a model whose layers are a ``Backbone``."""

    backbone: Backbone

    def compile_layers(self) -> None:
        """Compile the layers with ``torch.compile``: the first call of a shape takes minutes.

        Layers of one kind share one compiled function. Worth it where windows keep their shape for many
        calls, as in training.
        """
        # Shapes of training, evaluation and compacted batches, with and without gradients.
        torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
        for block in self.backbone.blocks():
            block.compile(dynamic=False, options=COMPILE_OPTIONS)
        self.backbone.norm.compile(dynamic=False, options=COMPILE_OPTIONS)

    def capture_graphs(self, enabled: bool = True) -> None:
        """Capture the map as CUDA graphs, one for each shape of the batch: an iteration is then one launch.

        Worth it where shapes repeat and launches take longer than the computation, as with many small
        kernels. Keeps a copy of the weights and their gradients in the dtype they are used in. Has no effect
        on other devices.
        """
        self.backbone.graphs = MapGraphs() if enabled else None

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
        self.backbone.activation_checkpointing = what

    def sharding_units(self) -> list[nn.Module]:
        """Return the layers, which may be sharded over processes one by one."""
        return list(self.backbone.blocks())

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
