"""The Triton kernels of a search against the plain operators: residuals, status, whole searches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import solution as results
from implicit_blocks.search.state import Status, StatusRule, initial_scale

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("relative", [True, False], ids=["relative", "absolute"])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30], ids=str)
@pytest.mark.parametrize("shape", [(5, 10_001), (3, 70, 64), (2, 5_000_000)], ids=str)
def test_residual_kernel_computes_the_plain_residual(shape, size, relative):
    """Also for numbers whose squares float32 cannot represent."""
    from implicit_blocks.ops.kernels.residual import residuals

    torch.manual_seed(0)
    z, fz = (torch.randn(2, *shape, device="cuda") * size).unbind(0)
    scale, limit = initial_scale(z, (*shape[:-1], 1))
    expected, grown = results.norm(results.difference(z, fz)), scale
    if relative:
        expected, grown = results.relative_residual(results.difference(z, fz), fz, scale, limit)
    found, found_scale = residuals(z.contiguous(), fz.contiguous(), scale=scale, relative=relative)
    torch.testing.assert_close(found, results.narrow(expected, torch.float32), rtol=1e-5, atol=0)
    torch.testing.assert_close(found_scale, grown, rtol=1e-5, atol=0)


def test_residual_kernel_of_values_that_are_not_finite_or_zero():
    from implicit_blocks.ops.kernels.residual import residuals

    fz = torch.zeros(4, 3, device="cuda")
    fz[1, 2], fz[2, 0] = torch.nan, torch.inf
    z = torch.zeros_like(fz)
    z[3] = 1.0
    scale, _ = initial_scale(z, (4, 1))
    found, _ = residuals(z, fz, scale=scale, relative=True)
    assert found.flatten()[0] == 0
    assert not found[1:3].isfinite().any()
    assert found[3].isfinite()  # a large relative residual at f(z) = 0, not divergence


def test_residual_kernel_of_more_wide_elements_than_the_limit_of_a_grid_dimension():
    from implicit_blocks.ops.kernels.residual import residuals

    z, fz = torch.randn(2, 65_537, 4097, device="cuda", dtype=torch.bfloat16).unbind(0)
    scale, _ = initial_scale(z, (65_537, 1))
    found = residuals(z, fz, scale=scale, relative=False)[0][-3:]
    expected = (fz[-3:].double() - z[-3:].double()).norm(dim=-1, keepdim=True)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("norm", ["relative", "absolute"])
def test_the_status_on_a_gpu_is_that_on_the_cpu_from_tiny_to_huge(norm, scope):
    """Contracting and expanding maps of sizes whose squares float32 cannot represent."""
    rate = torch.tensor([0.5, 2.0, 0.5, 2.0, 0.5, 9.0]).view(6, 1, 1)
    offset = torch.tensor([1e30, 1e30, 1e-30, 1e-30, 1.0, 1.0]).view(6, 1, 1)
    stopping = ib.Stopping(tolerance=1e-3, max_iterations=100, norm=norm, scope=scope)

    def found(device):
        a, b = rate.to(device), offset.to(device)
        search = ib.Search(solver=ib.Picard(), stopping=stopping)
        return search(lambda z: a * z + b, torch.zeros(6, 3, 8, device=device))

    fused, plain = found("cuda"), found("cpu")
    for name in ("converged", "diverged", "iterations"):
        assert torch.equal(getattr(fused, name).cpu(), getattr(plain, name)), name


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("tokens", [40, 3000])
def test_a_search_on_a_gpu_is_that_on_the_cpu(scope, tokens):
    """Rows of unequal difficulty, and one token that diverges."""
    rows = 5
    rate = torch.linspace(0.2, 0.7, rows * tokens).view(rows, tokens, 1)
    bad = torch.zeros(rows, tokens, 1, dtype=torch.bool)
    bad[2, tokens // 2] = True

    def found(device):
        of = {name: t.to(device) for name, t in (("rate", rate), ("bad", bad))}

        def f(z):
            return torch.where(of["bad"] & (z > 1.4), torch.nan, of["rate"] * z + 1)

        stopping = ib.Stopping(tolerance=1e-3, max_iterations=40, scope=scope)
        search = ib.Search(solver=ib.Picard(damping=0.9), stopping=stopping, trace=True)
        return search(f, torch.zeros(rows, tokens, 8, device=device))

    fused, plain = found("cuda"), found("cpu")
    assert plain.converged.any()
    assert plain.diverged.sum() == 1
    assert len(plain.iterations.unique()) > 1
    for name in (
        "iterations",
        "converged",
        "diverged",
        "token_iterations",
        "token_converged",
        "token_diverged",
    ):
        ours, wanted = getattr(fused, name), getattr(plain, name)
        assert (ours is None) == (wanted is None)
        if wanted is not None:
            assert torch.equal(ours.cpu(), wanted), name
    for name in ("z", "residual", "trace"):
        ours, wanted = getattr(fused, name).cpu(), getattr(plain, name)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("before", [False, True], ids=["whole", "after-a-prefix"])
@pytest.mark.parametrize("tokens", [None, 1, 5, 40, 3000])
def test_the_status_kernel_computes_the_rule(tokens, before):
    """Residuals that fall, with NaN and Inf among them; one to several blocks of tokens."""
    rows, prefix = 4, tokens is not None
    if before and not prefix:
        pytest.skip("rows have no prefix")
    shape = (rows, tokens, 1) if prefix else (rows, 1)
    stopping = ib.Stopping(tolerance=0.3, scope="prefix" if prefix else "sequence")
    kernel, status = StatusRule.start(stopping, torch.zeros(*shape[:-1], 3, device="cuda"))
    assert kernel.fused
    rule, expected = replace(kernel, fused=False), status
    residual_before = torch.tensor([0.0, 0.5, torch.inf, torch.nan], device="cuda").view(rows, 1, 1)
    for iteration in range(6):
        found = 3 * torch.rand(shape, device="cuda") * 2**-iteration
        if iteration == 2:
            found[2, -1] = torch.inf
        if iteration == 3:
            found[1, 0] = torch.nan
        options = {"prefix_residual": residual_before if before else None}
        plain, fused = rule.update(expected, found, **options), kernel.update(status, found, **options)
        assert torch.equal(fused.improved, plain.improved)
        for name, ours, wanted in zip(Status._fields, fused.status, plain.status, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True, msg=name)
        counts = [flags.flatten(1).sum(1).tolist() for flags in (plain.status.active, plain.improved)]
        assert fused.row_counts[:2].tolist() == counts
        expected, status = plain.status, fused.status
