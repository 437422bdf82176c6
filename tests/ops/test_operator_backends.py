"""The dispatcher: automatic choice, errors for named backends, and records."""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.ops import accelerated, backends
from implicit_blocks.ops.attention import ATTENTION, attend, find_blocks, flex
from implicit_blocks.ops.backends import Backend, Operation
from implicit_blocks.ops.causal_conv import CAUSAL_CONV, causal_conv
from implicit_blocks.ops.ssd import SSD, ssd


@pytest.fixture
def operation(monkeypatch):
    """Three backends: a missing one, one for short inputs that pays for two or more, and one for all."""
    monkeypatch.setattr(backends, "_OPERATIONS", {})
    monkeypatch.setattr(backends, "_CHOSEN", {})
    monkeypatch.setattr(accelerated, "_FOUND", {})

    def too_long(x):
        return "it takes four numbers at most" if len(x) > 4 else ""

    return Operation(
        "double",
        Backend("missing", lambda x: None, module="no_such_package", package="no-such"),
        Backend("short", lambda x: x + x, too_long, lambda x: len(x) > 1, "math", "math"),
        Backend("plain", lambda x: 2 * x),
    )


def test_auto_chooses_the_first_available_supported_and_preferred_backend(operation):
    assert operation.choose("auto", torch.ones(3)).name == "short"
    assert operation.choose("auto", torch.ones(5)).name == "plain"
    assert operation.choose("auto", torch.ones(1)).name == "plain"


def test_auto_on_a_gpu_records_the_package_that_it_lacks(operation):
    class OnGPU(list):
        is_cuda = True

    operation.choose("auto", torch.ones(3))
    assert backends.missing_package("double", "short") == ""  # on a CPU
    operation.choose("plain", OnGPU([1.0]))
    assert backends.missing_package("double", "plain") == ""  # named
    operation.choose("auto", OnGPU([1.0]))
    assert backends.missing_package("double", "plain") == "no-such"


def test_a_named_backend_need_not_be_preferred(operation):
    assert operation.choose("short", torch.ones(1)).name == "short"
    assert backends.chosen() == (("double", "short"),)


def test_a_missing_package_is_named_with_the_remedy(operation):
    message = "double backend 'missing': no_such_package is not installed; install it .pip install no-such"
    with pytest.raises(ImportError, match=message):
        operation.choose("missing", torch.ones(3))
    with pytest.raises(ValueError, match="set the backend to auto"):
        operation.require("missing")


def test_an_unsupported_input_is_named_with_the_reason(operation):
    message = r"'short' can't run these inputs: it takes four numbers at most.*float32 on cpu.*\(5,\)"
    with pytest.raises(ValueError, match=message):
        operation.choose("short", torch.ones(5))


def test_an_unknown_backend_is_refused_with_the_known_names(operation):
    with pytest.raises(ValueError, match="'fast'; choose one of auto, missing, short, plain"):
        operation.require("fast")


def test_the_first_use_is_logged_once(operation, caplog):
    with caplog.at_level(logging.INFO, logger=backends.__name__):
        for _ in range(3):
            operation.choose("auto", torch.ones(3))
    assert [record.getMessage() for record in caplog.records] == ["double is computed by short"]


def test_a_backend_that_has_not_run_is_untested(operation, monkeypatch):
    assert backends.report() == {}
    operation.choose("auto", torch.ones(5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert backends.report() == {
        "double": {
            "plain": "ran",
            "missing": "untested: no_such_package is not installed",
            "short": "untested: installed, not chosen",
        }
    }


def test_the_choice_causes_no_graph_break(operation):
    def twice(x):
        return operation.choose("auto", x).run(x)

    compiled = torch.compile(twice, backend="eager", fullgraph=True)
    x = torch.arange(3.0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.testing.assert_close(compiled(x), 2 * x)
        torch.testing.assert_close(compiled(x), 2 * x)
    assert backends.chosen() == (("double", "short"),)


def test_no_package_is_imported_on_a_cpu(monkeypatch):
    monkeypatch.setattr(accelerated, "_FOUND", {})
    x = torch.randn(1, 8, 2, 8)
    B = torch.randn(1, 8, 1, 8)
    ssd(x, torch.rand(1, 8, 2), -torch.rand(2), B, B)
    causal_conv(torch.randn(1, 8, 16), torch.randn(16, 4))
    q = torch.randn(1, 2, 8, 16)
    attend(q, q, q, causal=True)
    assert accelerated._FOUND == {}


CPU_INPUTS = {
    SSD: (torch.zeros(1, 8, 2, 8), None, None),
    CAUSAL_CONV: (torch.zeros(1, 8, 16), torch.zeros(16, 4), None),
    ATTENTION: (*[torch.zeros(1, 2, 8, 16)] * 3, None, True, None),
}
GPU_ONLY = [(o, b.name) for o in CPU_INPUTS for b in o.backends if b.package]


@pytest.mark.parametrize(("operation", "name"), GPU_ONLY, ids=[f"{o.name}-{n}" for o, n in GPU_ONLY])
def test_named_kernels_on_a_cpu_are_an_error(operation, name, monkeypatch):
    """The error names the device if the package is installed, otherwise the package."""
    with pytest.raises((ImportError, ValueError), match=rf"{operation.name} backend '{name}'"):
        operation.choose(name, *CPU_INPUTS[operation])
    module = next(b.module for b in operation.backends if b.name == name)
    monkeypatch.setitem(accelerated._FOUND, module, ModuleType(module))
    with pytest.raises(ValueError, match="its kernels require a GPU"):
        operation.choose(name, *CPU_INPUTS[operation])


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function that stands for a package of kernels, for tensors that count as a GPU's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(backends, "_OPERATIONS", {})
    monkeypatch.setattr(backends, "_CHOSEN", {})

    def install(name, **functions):
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(accelerated._FOUND, name, module)

    return install


def test_fla_refuses_more_rows_or_heads_than_a_grid_counts(on_gpu):
    on_gpu("fla.modules.causal_conv1d", causal_conv1d=lambda x, *_, **__: (x, None))
    most, rows = (torch.zeros(rows, 1, 1).bfloat16() for rows in (65_535, 65_536))
    weight = torch.zeros(1, 4).bfloat16()
    assert causal_conv(most, weight, backend="fla").shape == most.shape
    with pytest.raises(ValueError, match=r"'fla' can't run these inputs: .* 65535 rows"):
        causal_conv(rows, weight, backend="fla")

    def scan(*, v, **_):
        return v, torch.zeros(len(v), v.shape[2], 1, 1)

    on_gpu("fla.ops.simple_gla", chunk_simple_gla=scan)

    def scanned(rows):
        x, B = (torch.zeros(rows, 2, heads, 1).bfloat16() for heads in (257, 1))
        return ssd(x, torch.zeros(rows, 2, 257), -torch.ones(257), B, B, backend="fla")[0]

    assert len(scanned(255)) == 255  # 65,535 heads of all rows
    with pytest.raises(ValueError, match=r"'fla' can't run these inputs: .* 65535 heads of all rows"):
        scanned(256)


def test_xformers_without_kernels_names_the_library_that_its_wheel_needs(on_gpu):
    def attention(*_, **__):
        raise NotImplementedError("No operator found for `memory_efficient_attention_forward`")

    bias = SimpleNamespace(attn_bias=SimpleNamespace(LowerTriangularFromBottomRightMask=lambda: None))
    on_gpu("xformers.ops", memory_efficient_attention=attention, fmha=bias)
    q = torch.zeros(1, 2, 8, 16).bfloat16()
    with pytest.raises(ValueError, match=r"No operator found.*libcudart\.so\.12: install nvidia-cuda"):
        attend(q, q, q, causal=True, backend="xformers")


def test_every_backend_of_a_spec_exists():
    for spec, field, operation in (
        (ib.Mamba2Spec, "backend", SSD),
        (ib.Mamba2Spec, "conv_backend", CAUSAL_CONV),
        (ib.AttentionSpec, "backend", ATTENTION),
    ):
        named = set(get_args(spec.model_fields[field].annotation)) - {"auto"}
        assert named == set(operation.names) - {"recurrence", "chunked_autograd"}


def test_building_a_model_with_a_missing_backend_is_an_error(monkeypatch):
    monkeypatch.setattr(accelerated, "_FOUND", {"flash_attn": "flash_attn is not installed"})
    mixer = ib.AttentionSpec(n_heads=2, backend="flash-attn")
    with pytest.raises(ImportError, match="pip install --no-build-isolation flash-attn, built for your card"):
        ib.build(ib.ExplicitLMSpec(vocab_size=7, d_model=16, n_layers=1, mixer=mixer))


@pytest.mark.parametrize(
    "mixer",
    [ib.Mamba2Spec(d_state=8, head_dim=8, backend="torch", conv_backend="torch")]
    + [ib.AttentionSpec(n_heads=2, backend=name) for name in ("torch", "sdpa", "flex")],
    ids=lambda mixer: f"{mixer.kind}-{mixer.backend}",
)
def test_the_backend_in_the_spec_does_not_change_values(mixer):
    def values(spec):
        torch.manual_seed(0)
        model = ib.build(ib.ExplicitLMSpec(vocab_size=7, d_model=16, n_layers=1, mixer=spec)).eval()
        ids = torch.randint(7, (2, 12), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with torch.no_grad():
            whole, padded = model(ids).logits, model(ids, attention_mask=mask).logits
            return whole, model(ids, window_length=5).logits, padded[mask.bool()]

    for found, expected in zip(values(mixer), values(mixer.portable()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window_length", [None, 5])
def test_the_backend_in_the_spec_is_used(window_length, monkeypatch):
    asked = set()
    choose = Operation.choose

    def watched(self, wanted, *inputs):
        asked.add((self.name, wanted))
        return choose(self, wanted, *inputs)

    monkeypatch.setattr(Operation, "choose", watched)
    for mixer in (
        ib.Mamba2Spec(d_state=8, head_dim=8, backend="torch", conv_backend="torch"),
        ib.AttentionSpec(n_heads=2, backend="torch"),
    ):
        model = ib.build(ib.ImplicitLMSpec(vocab_size=7, d_model=16, n_layers=1, mixer=mixer))
        ids = torch.randint(7, (2, 12), generator=torch.Generator().manual_seed(1))
        model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            model.eval()(ids, window_length=window_length, return_state=True)
    assert asked == {("ssd", "torch"), ("causal_conv", "torch"), ("attention", "torch")}


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seen", ["causal", "behind", "documents", "all"])
def test_attention_equals_the_formula(seen, kv_heads, backend):
    """Compares the output and, if the backend has a backward pass on a CPU, every gradient."""
    batch, heads, width, length = 2, 4, 16, 24
    keys = 40 if seen == "behind" else length
    tensors = [torch.randn(batch, heads, length, width), *torch.randn(2, batch, kv_heads, keys, width)]
    place = torch.arange(keys)
    before = place <= torch.arange(keys - length, keys)[:, None]
    documents = (torch.arange(batch * keys).view(batch, 1, keys) // 7)[..., -length:]
    alike = documents[..., None] == documents[:, :, None]
    masks = {"behind": before, "documents": before[:, -length:] & alike}
    given = {"mask": masks.get(seen), "causal": seen in ("causal", "behind")}
    expected = attend(*tensors, **given, backend="torch")
    with torch.no_grad():
        blocks = find_blocks(given["mask"], length=length, keys=keys, causal=given["causal"], device="cpu")
        found = attend(*tensors, **given, blocks=blocks, backend=backend)
    torch.testing.assert_close(found, expected)
    if backend == "flex":
        with pytest.raises(ValueError, match="no backward pass on a CPU"):
            attend(tensors[0].requires_grad_(), *tensors[1:], **given, backend=backend)
        return
    leaves = [t.requires_grad_() for t in tensors]
    pairs = []
    for name in ("torch", backend):
        y = attend(*leaves, **given, backend=name)
        pairs.append(torch.autograd.grad(y.sin().sum(), leaves))
    torch.testing.assert_close(*pairs)


@torch.no_grad()
@pytest.mark.parametrize("backend", ["sdpa", "flex", "torch"])
def test_keys_of_another_type_are_converted_to_that_of_the_queries(backend):
    """As a cache in float32 beside queries in bfloat16, or the reverse."""
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 9, 16)
    given = {"mask": torch.ones(5, 9, dtype=torch.bool).tril(4), "causal": True, "backend": backend}
    for narrow, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        expected = attend(q.to(narrow), k.to(wide).to(narrow), k.to(wide).to(narrow), **given)
        assert torch.equal(attend(q.to(narrow), k.to(wide), k.to(wide), **given), expected)


def test_fewer_queries_than_keys_are_the_last_tokens():
    q, k = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 8, 16)
    mask = torch.arange(8) <= torch.arange(5, 8)[:, None]
    expected = attend(q, k, k, mask=mask, backend="torch")
    torch.testing.assert_close(attend(q, k, k, causal=True, backend="torch"), expected)
    torch.testing.assert_close(attend(q, k, k, mask=mask, causal=True), expected)
    with pytest.raises(ValueError, match="fewer queries than keys require a mask"):
        attend(q, k, k, causal=True, backend="sdpa")


@pytest.mark.parametrize(
    ("queries", "heads", "kv_heads", "too_wide"), [(72, 8, 2, True), (72, 8, 8, False), (1, 32, 8, False)]
)
def test_flex_avoids_the_decoding_kernel_for_many_heads(queries, heads, kv_heads, too_wide):
    q, k = torch.empty(1, heads, queries, 64), torch.empty(1, kv_heads, 200, 64)
    assert flex._is_too_wide_to_decode(q, k) == too_wide
