"""The library and the trainer on a CUDA device give the values of the CPU."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch.cuda import set_sync_debug_mode

import implicit_blocks as ib
from implicit_blocks.mixers import Attention, Mamba2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=96)},
    "hybrid": {
        "mixer": ib.HybridSpec(
            mixers=[ib.Mamba2Spec(d_state=16, head_dim=16, chunk_size=16), ib.AttentionSpec(n_heads=4)]
        )
    },
}


@pytest.fixture(autouse=True)
def _exact_products():
    torch.set_float32_matmul_precision("highest")


def contracting(mixer, **changes):
    stopping = ib.StoppingOverrides(tolerance=1e-6, max_iterations=400)
    at_evaluation = ib.AtEvaluation(solver=ib.PicardSpec(damping=0.9), stopping=stopping)
    fields = {"vocab_size": 61, "d_model": 64, "n_layers": 2, "at_evaluation": at_evaluation}
    torch.manual_seed(0)
    model = ib.build(ib.ImplicitLMSpec(**(fields | MIXERS[mixer] | changes)))
    with torch.no_grad():
        for part in model.backbone.modules():
            if isinstance(part, Mamba2 | Attention):
                part.in_proj.parametrizations.weight.original0.mul_(0.15)
                part.out_proj.parametrizations.weight.original0.mul_(10.0)
    return model


def tokens(rows=5, length=40):
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(5))


GRADIENTS = {
    "phantom": ib.PhantomSpec(),
    "unrolled": ib.UnrolledSpec(steps=4, checkpointing=True),
    "implicit_function": ib.ImplicitFunctionSpec(stopping=ib.Stopping(tolerance=1e-6, max_iterations=100)),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("solver", [ib.PicardSpec(), ib.AndersonSpec(memory=3)], ids=["picard", "anderson"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_training_step_on_cuda_equals_the_cpus(mixer, solver, gradient):
    stopping = ib.Stopping(tolerance=1e-6, max_iterations=60)
    cpu = contracting(mixer, solver=solver, gradient=GRADIENTS[gradient], stopping=stopping).train()
    gpu = copy.deepcopy(cpu).cuda()
    ids = tokens()
    expected, found = cpu(ids, labels=ids), gpu(ids.cuda(), labels=ids.cuda())
    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-5, atol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    for (name, a), b in zip(cpu.named_parameters(), gpu.parameters(), strict=True):
        error = (b.grad.cpu() - a.grad).norm() / a.grad.norm()
        assert error < 2e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize("mixer", MIXERS)
def test_logits_on_cuda_do_not_depend_on_the_window_length(mixer):
    model = contracting(mixer).double().cuda().eval()
    ids = tokens().cuda()
    with torch.no_grad():
        whole = model(ids)
        assert whole.solution.converged.all()
        for window_length in (1, 7, 16):
            parts = model(ids, window_length=window_length)
            assert (parts.logits - whole.logits).abs().max() < 1e-4
        for row in range(2):
            alone = model(ids[row : row + 1])
            assert (alone.logits[0] - whole.logits[row]).abs().max() < 1e-9


@pytest.mark.parametrize("mixer", MIXERS)
def test_training_in_bfloat16_autocast_lowers_the_loss(mixer):
    model = contracting(mixer, stopping=ib.Stopping(tolerance=0.05, max_iterations=12)).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    ids = tokens().cuda()
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(ids, labels=ids)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        losses.append(out.loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("how", ["training", "evaluation", "committing"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_the_search_never_synchronizes_with_the_device(mixer, how):
    commit = 16 if how == "committing" else None
    rule = {"tolerance": 1e-4, "max_iterations": 60}
    at_evaluation = ib.AtEvaluation(stopping=ib.StoppingOverrides(**rule), commit_prefix=commit)
    model = contracting(mixer, stopping=ib.Stopping(**rule), at_evaluation=at_evaluation)
    model.cuda().train(how == "training")
    ids = tokens(rows=16, length=64).cuda()
    ids[1:, 1:] = ids[1:, :1]  # rows of unequal difficulty: some leave the batch early

    def run():
        with torch.set_grad_enabled(how == "training"):
            output = model(ids, labels=ids, return_logits=False)
        if how == "training":
            output.loss.backward()
        return output

    expected = run()  # tunes kernels and reserves memory
    set_sync_debug_mode("error")
    try:
        found = run()
    finally:
        set_sync_debug_mode("default")
    assert found.solution.iterations.tolist() == expected.solution.iterations.tolist()
    assert len(set(found.solution.iterations.tolist())) > 1


def test_the_trainer_runs_and_resumes_on_cuda(tmp_path):
    command = [
        sys.executable,
        "-m",
        "trainer",
        "--spec",
        "word_problem_s3",
        "--output",
        str(tmp_path / "run"),
    ]
    changes = [
        "training.max_steps=6",
        "phases.unrolled.until=3",
        "evaluation.sequences=16",
        "evaluation.lengths=[16]",
    ]
    subprocess.run([*command, "--device", "cuda", *changes], check=True)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7))
    resumed = [
        sys.executable,
        "-m",
        "trainer",
        "--resume",
        "--output",
        str(tmp_path / "run"),
        "--device",
        "cuda",
    ]
    subprocess.run(resumed, check=True)


# The compiler's own warnings: deprecated imports, gradients of non-leaf tensors.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mixer", MIXERS)
def test_compiled_layers_match_eager_layers(mixer):
    model = contracting(mixer, stopping=ib.Stopping(tolerance=0.0, max_iterations=4)).cuda().train()
    ids = tokens(rows=4, length=64).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = model(ids, labels=ids, return_logits=False).loss
    model.compile_layers()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = model(ids, labels=ids, return_logits=False).loss
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    found.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
