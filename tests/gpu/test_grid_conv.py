"""The convolution over a board on a CUDA device: values of the CPU, captured and compiled training steps."""

from __future__ import annotations

import copy

import pytest
import torch

import implicit_blocks as ib

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch):
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def built(**changes):
    torch.manual_seed(0)
    fields = {"vocab_size": 5, "d_model": 32, "n_layers": 2, "mixer": ib.GridConvSpec()}
    fields |= {"depth": ib.FixedDepthSpec(loops=6), "gradient": ib.LastLoopsSpec(loops=4)}
    return ib.build(ib.ImplicitLMSpec(**(fields | changes))).train()


def boards(seed=5, rows=4, side=9):
    return torch.randint(5, (rows, side * side), generator=torch.Generator().manual_seed(seed))


def step(model, ids):
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad.cpu() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.detach().cpu(), grads


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    for name, grad in expected[1].items():
        error = (found[1][name] - grad).norm() / grad.norm()
        assert error < 1e-3, f"{name}: {error:.1e}"


def test_a_training_step_on_cuda_equals_the_cpus():
    cpu = built()
    assert_same(step(copy.deepcopy(cpu).cuda(), boards().cuda()), step(cpu, boards()))


def test_padding_on_cuda_does_not_change_a_board():
    model, ids = built().cuda().eval(), boards().cuda()
    padded = torch.nn.functional.pad(ids, (3, 2))
    mask = torch.zeros_like(padded)
    mask[:, 3:-2] = 1
    with torch.no_grad():
        expected, found = model(ids, loops=8).logits, model(padded, attention_mask=mask, loops=8).logits
    torch.testing.assert_close(found[:, 3:-2], expected, rtol=1e-4, atol=1e-4)


# Inductor recommends TF32, which a comparison with eager execution excludes.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # while torch imports Inductor
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # while Dynamo traces
def test_captured_and_compiled_steps_equal_eager_steps_on_boards_of_several_sizes():
    eager = built().cuda()
    models = [copy.deepcopy(eager) for _ in range(2)]
    models[0].capture_graphs()
    models[1].compile_layers()
    models[1].capture_graphs()
    for seed in range(3):  # the first runs eagerly, the second captures, the third replays
        for side in (6, 9):
            ids = boards(seed, side=side).cuda()
            expected = step(eager, ids)
            for model in models:
                assert_same(step(model, ids), expected)


def test_bfloat16_autocast_lowers_the_loss():
    model, ids = built().cuda(), boards().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for _ in range(30):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
