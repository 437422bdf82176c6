"""The scan by flash-linear-attention's kernels against the plain one in float64; on a GPU."""

from __future__ import annotations

import pytest
import torch
from implicit_blocks_rwkv7 import RWKV7Spec
from implicit_blocks_rwkv7.delta_rule import generalized_delta_rule
from implicit_blocks_rwkv7.kernels import MODULE, generalized_delta_rule_fla
from implicit_blocks_rwkv7.mixer import FASTEST_DECAY

import implicit_blocks as ib
from implicit_blocks.ops.accelerated import load
from implicit_blocks.testing import check_backend
from implicit_blocks.testing.contract import relative_error
from implicit_blocks.testing.mixer_runs import begin, run

SHAPES = {"H4-K32": (4, 32), "H2-K64": (2, 64)}


@pytest.fixture
def _kernels():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if isinstance(reason := load(MODULE), str):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "start"])
@pytest.mark.parametrize("length", [1, 64, 200])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_agree_with_the_plain_scan(shape, length, with_state):
    heads, width = shape

    def draw() -> torch.Tensor:
        return torch.randn(3, length, heads, width, device="cuda")

    kappa = torch.nn.functional.normalize(draw(), dim=-1)
    given = {
        "r": (draw() / width**0.5).bfloat16(),
        "log_w": -FASTEST_DECAY * torch.rand_like(kappa),
        "k": (draw() / width**0.5).bfloat16(),
        "v": draw().bfloat16(),
        "a": (-kappa).bfloat16(),
        "b": (2 * torch.rand_like(kappa) * kappa).bfloat16(),  # up to twice: reflections
    }
    if with_state:
        given["state"] = torch.randn(3, heads, width, width, device="cuda")

    def gradients(wide: bool) -> dict[str, torch.Tensor]:
        leaves = {name: (t.double() if wide else t).detach().requires_grad_() for name, t in given.items()}
        tensors = [leaves[name] for name in ("r", "log_w", "k", "v", "a", "b")]
        before = leaves.get("state")
        if wide:
            o, state = generalized_delta_rule(*tensors, initial_state_BHKV=before)
        else:
            o, state = generalized_delta_rule_fla(
                *tensors, initial_state_BHKV=before, documents_BL=None, least_log_w=-FASTEST_DECAY
            )
            assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        generator = torch.Generator("cuda").manual_seed(1)
        loss = sum(
            (part.double() * torch.randn(part.shape, device="cuda", generator=generator)).sum()
            for part in (o, state)
        )
        found = torch.autograd.grad(loss, list(leaves.values()))
        return {"output": o, "final state": state, **dict(zip(leaves, found, strict=True))}

    found, expected = gradients(wide=False), gradients(wide=True)
    # Some gradients of one token without a state are 0: those have no relative error.
    errors = {name: relative_error(found[name].double(), expected[name], least=0.1) for name in expected}
    assert max(errors.values()) < 2e-2, errors


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative-eigenvalues"])
def test_a_mixer_with_the_kernels_is_the_one_without(negative):
    spec = RWKV7Spec(
        n_heads=4, head_dim=32, decay_rank=16, rate_rank=16, gate_rank=32, negative_eigenvalues=negative
    )
    check_backend(spec.model_copy(update={"backend": "fla"}), spec)


def test_kernels_that_are_asked_for_and_not_there_are_an_error():
    mixer = ib.build(RWKV7Spec(n_heads=2, head_dim=4, backend="fla"), d_model=12)
    z, u = torch.randn(1, 3, 12), torch.randn(1, 3, mixer.injection_width)
    with pytest.raises((ImportError, ValueError), match="backend 'plain'"):
        run(mixer, z, u, [3], start=begin(mixer, 1, dtype=torch.float32))
