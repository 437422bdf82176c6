"""Options of attention on a GPU: kernels against the plain formula, and captured maps with token IDs."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.models.map_graphs import MapGraphs
from implicit_blocks.ops.accelerated import load
from implicit_blocks.ops.attention import ATTENTION
from implicit_blocks.testing import check_backend
from implicit_blocks.testing.mixer_runs import inputs, make, run
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.windows import SequenceState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Packages emit deprecation warnings while they are imported, including torch's compiler.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

OPTIONS = {
    "causal": {"bias": "qk", "qk_norm": "weighted", "clip_qkv": 1.5, "value_embeddings": 4},
    "bidirectional": {"causal": False, "bias": "qkv", "qk_norm": "unweighted"},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's
@pytest.mark.parametrize("backend", ["auto", "flex"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layers_with_options_match_the_reference(options, backend):
    fast, plain = (ib.AttentionSpec(n_heads=2, backend=name, **options) for name in (backend, "torch"))
    check_backend(fast, plain)


@pytest.mark.parametrize("backend", ["flash-attn", "xformers"])
def test_bidirectional_kernels_match_the_reference(backend):
    module = ATTENTION.backends[ATTENTION.names.index(backend)].module
    if isinstance(reason := load(module), str):
        pytest.skip(f"{backend} is untested: {reason}")
    outputs = []
    for name in (backend, "torch"):
        mixer = make(ib.AttentionSpec(n_heads=2, causal=False, backend=name), 64)
        z, u = inputs(mixer, 64)
        dtype = torch.bfloat16 if name == backend else torch.float64
        given = (part.to("cuda", dtype) for part in (z, u))
        state = mixer.initial_state(len(z), device=torch.device("cuda"), dtype=dtype)
        start = SequenceState(len(z), 0, torch.zeros(1, dtype=torch.int64, device="cuda"), (state,))
        with torch.no_grad():
            outputs.append(run(mixer.to("cuda", dtype), *given, [z.shape[1]], start=start)[0].double())
    assert (outputs[0] - outputs[1]).norm() < 2e-2 * outputs[1].norm()


def test_a_captured_map_reads_the_token_ids_of_the_current_call():
    torch.manual_seed(0)
    mixer = ib.AttentionSpec(n_heads=2, value_embeddings=5)
    model = ib.build(ib.ImplicitLMSpec(vocab_size=5, d_model=32, n_layers=2, mixer=mixer)).cuda()
    backbone, z = model.backbone, torch.randn(2, 6, 32, device="cuda")
    states = model.initial_state(2).layers

    def bound(ids):
        positions = torch.arange(6, device="cuda")[None]
        window = ib.Window(batch_size=2, start=0, length=6, positions_BL=positions, ids_BL=ids)
        weights = WeightCache(backbone)
        return backbone.bind(window, u_BLU=None, states=states, start_BLD=z, weights=weights)

    graphs, parameters = MapGraphs(), list(backbone.parameters())
    for _ in range(4):  # the first calls are eager, the later ones replay graphs
        ids = torch.randint(5, (2, 6), device="cuda")
        with torch.no_grad():
            f = bound(ids)
            torch.testing.assert_close(graphs.call(f, z), f.compute(z), rtol=1e-4, atol=1e-4)
        captured, eager = graphs.call(bound(ids), z), bound(ids).compute(z)
        found, expected = (
            torch.autograd.grad(value.square().sum(), parameters, allow_unused=True)
            for value in (captured, eager)
        )
        for gradient, of_eager in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, of_eager, rtol=1e-3, atol=1e-3)
