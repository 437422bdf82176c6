"""Compiled layers: no graph breaks, and the values and gradients of eager layers."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)},
    "mamba2-one-chunk": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=96)},
}


def built(mixer):
    torch.manual_seed(0)
    spec = ib.ImplicitLMSpec(
        vocab_size=61,
        d_model=32,
        n_layers=1,
        gradient=ib.PhantomSpec(steps=1),
        stopping=ib.Stopping(tolerance=0.0, max_iterations=3),
        **MIXERS[mixer],
    )
    return ib.build(spec)


@pytest.mark.filterwarnings("ignore")  # the compiler's own: deprecated names, gradients of non-leaf tensors
@pytest.mark.parametrize(
    "mixer", [pytest.param("mamba2", marks=pytest.mark.slow), "mamba2-one-chunk", "attention"]
)
def test_layers_compile_without_graph_breaks(mixer):
    torch.compiler.reset()
    plain, compiled = built(mixer).train(), built(mixer).train()
    for block in compiled.backbone.blocks():
        # As in compile_layers, but graph breaks are errors, and no code is generated.
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
    ids = torch.randint(61, (2, 24))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(ids, labels=ids, return_logits=False).loss for model in (plain, compiled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)
    for loss in losses:
        loss.backward()
    for (name, own), other in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert (own.grad - other.grad).norm() <= 0.05 * other.grad.norm() + 1e-6, name
    with torch.no_grad():
        values = [model.eval()(ids, max_iterations=2).logits for model in (plain, compiled)]
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
