"""Accelerated backends against the plain torch backend, in output, final state and every gradient."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.ops import backends
from implicit_blocks.ops.accelerated import load
from implicit_blocks.ops.attention import ATTENTION, attend, find_blocks
from implicit_blocks.ops.causal_conv import CAUSAL_CONV, causal_conv
from implicit_blocks.ops.ssd import SSD, ssd
from implicit_blocks.testing import check_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Packages emit deprecation warnings while they are imported, including torch's compiler.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SHAPES = {
    "B2-L256-H4-P64-G1-N128": (2, 256, 4, 64, 1, 128),
    "B3-L300-H8-P64-G2-N64": (3, 300, 8, 64, 2, 64),
    "B3-L20-H8-P64-G2-N64": (3, 20, 8, 64, 2, 64),
    "B5-L1-H24-P64-G1-N128": (5, 1, 24, 64, 1, 128),
}


def error(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def backend_of(operation, name):
    backend = operation.backends[operation.names.index(name)]
    if backend.module and isinstance(reason := load(backend.module), str):
        pytest.skip(f"{name} is untested: {reason}")
    return backend


def scan_inputs(shape):
    batch, length, heads, width, groups, states = shape
    torch.manual_seed(0)
    return {
        "x": torch.randn(batch, length, heads, width, device="cuda"),
        "dt": torch.rand(batch, length, heads, device="cuda") * 0.1,
        "A": -1 - 15 * torch.rand(heads, device="cuda"),
        "B": torch.randn(batch, length, groups, states, device="cuda"),
        "C": torch.randn(batch, length, groups, states, device="cuda"),
        "h": torch.randn(batch, heads, width, states, device="cuda"),
    }


@pytest.mark.parametrize("with_state", [False, True], ids=["start", "state"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("backend", ["mamba-ssm", "fla"])
def test_scan_backends_match_the_reference(backend, shape, with_state):
    chosen = backend_of(SSD, backend)
    tensors = scan_inputs(shape)
    low = {"x", "B", "C"}

    def run(backend, dtype):
        leaves = {}
        for name, t in tensors.items():
            t = t.bfloat16() if name in low else t  # both backends get the same rounded inputs
            leaves[name] = (t if dtype is None else t.to(dtype)).detach().requires_grad_()
        y, h = ssd(
            *(leaves[name] for name in ("x", "dt", "A", "B", "C")),
            initial_state_BHPN=leaves["h"] if with_state else None,
            return_final_state=True,
            backend=backend,
        )
        generator = torch.Generator("cuda").manual_seed(1)
        loss = (y.double() * torch.randn(y.shape, device="cuda", generator=generator)).sum()
        loss = loss + (h.double() * torch.randn(h.shape, device="cuda", generator=generator)).sum()
        wanted = [t for name, t in leaves.items() if with_state or name != "h"]
        # Without an initial state a single token has no decay, so A has no gradient.
        wanted = [t for t in wanted if with_state or shape[1] > 1 or t is not leaves["A"]]
        return [y, h, *torch.autograd.grad(loss, wanted)]

    x = tensors["x"].bfloat16().requires_grad_()
    if reason := chosen.refuses(x, tensors["h"] if with_state else None, None):
        with pytest.raises(ValueError, match=reason):
            run(backend, None)
        pytest.skip(f"{backend} is untested: {reason}")
    for found, expected in zip(run(backend, None), run("torch", torch.float64), strict=True):
        assert error(found, expected) < 1.5e-2


@pytest.mark.parametrize("documents", [False, True], ids=["one-document", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["mamba-ssm", "fla"])
def test_scan_backends_match_the_reference_for_one_token(backend, dtype, documents):
    """The step of decoding, without gradients: the given state does not change."""
    backend_of(SSD, backend)
    if backend == "fla" and documents:
        pytest.skip("fla supports one document per row")
    tensors = scan_inputs(SHAPES["B5-L1-H24-P64-G1-N128"])
    for name in ("x", "B", "C"):
        tensors[name] = tensors[name].to(dtype)
    h = tensors.pop("h")
    before = h.clone()
    given = {"initial_state_BHPN": h, "return_final_state": True}
    if documents:
        given |= {"documents_BL": torch.arange(5, device="cuda")[:, None]}
        given |= {"initial_document_B": torch.tensor([0, 0, 2, 3, 3], device="cuda")}
    with torch.no_grad():
        found = ssd(*tensors.values(), **given, backend=backend)
        expected = ssd(*(t.double() for t in tensors.values()), **given, backend="recurrence")
    assert torch.equal(h, before)
    for value, reference in zip(found, expected, strict=True):
        assert error(value, reference) < (1e-5 if dtype == torch.float32 and value.ndim == 4 else 1e-2)


@pytest.mark.parametrize("with_tail", [False, True], ids=["start", "tail"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [70, 1])
@pytest.mark.parametrize("backend", ["causal-conv1d", "fla"])
def test_convolution_backends_match_the_reference(backend, length, dtype, with_tail):
    chosen = backend_of(CAUSAL_CONV, backend)
    torch.manual_seed(0)
    x = torch.randn(3, length, 80, device="cuda")[:, :, 8:72]
    weight, bias = torch.randn(64, 4, device="cuda"), torch.randn(64, device="cuda")
    tail = torch.randn(3, 3, 64, device="cuda") if with_tail else None

    def run(dtype, backend):
        leaves = [None if t is None else t.to(dtype).detach() for t in (x, weight, bias, tail)]
        wanted = [t.requires_grad_() for t in leaves if t is not None]
        y = causal_conv(*leaves[:3], tail_BWC=leaves[3], activation="silu", backend=backend)
        return [y, *torch.autograd.grad((y.double() * torch.arange(64, device="cuda")).sum(), wanted)]

    assert not chosen.refuses(x.to(dtype), weight, None)
    for found, expected in zip(run(dtype, backend), run(torch.float64, "torch"), strict=True):
        assert error(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("seen", ["causal", "behind", "documents", "all", "one-query"])
@pytest.mark.parametrize("backend", ["sdpa", "flash-attn", "xformers", "flex"])
def test_attention_backends_match_the_reference(backend, seen, kv_heads):
    chosen = backend_of(ATTENTION, backend)
    torch.manual_seed(0)
    batch, heads, width = 3, 8, 64
    length, keys = {"behind": (72, 200), "one-query": (1, 200)}.get(seen, (200, 200))
    q = torch.randn(batch, heads, length, width, device="cuda").bfloat16()
    k, v = torch.randn(2, batch, kv_heads, keys, width, device="cuda").bfloat16()
    place = torch.arange(keys, device="cuda")
    before = place <= place[-length:, None]
    documents = (torch.arange(batch * keys, device="cuda").view(batch, 1, keys) // 70)[..., -length:]
    masks = {"behind": before}
    if seen == "documents":
        masks["documents"] = before & (documents[..., None] == documents[:, :, None])
    given = {"mask": masks.get(seen), "causal": seen in ("causal", "behind")}
    if reason := chosen.refuses(q, k, v, given["mask"], given["causal"], None):
        assert seen == "documents", reason
        with pytest.raises(ValueError, match=backend):
            attend(q, k, v, **given, backend=backend)
        return
    if backend == "xformers":
        try:
            attend(q, k, v, **given, backend=backend)
        except ValueError as refusal:
            pytest.skip(f"xformers is untested: {refusal}"[:150])
    blocks = None
    if backend == "flex":
        blocks = find_blocks(given["mask"], length=length, keys=keys, causal=given["causal"], device=q.device)

    def run(dtype, backend):
        leaves = [t.to(dtype).detach().requires_grad_() for t in (q, k, v)]
        y = attend(*leaves, **given, blocks=blocks, backend=backend)
        weights = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        return [y, *torch.autograd.grad((y.double() * weights).sum(), leaves)]

    for found, expected in zip(run(torch.bfloat16, backend), run(torch.float64, "torch"), strict=True):
        assert error(found, expected) < 1e-2


def test_auto_chooses_flash_attention_after_a_state(monkeypatch):
    """It is faster than torch's kernels with a mask; the first window of a sequence needs no mask."""
    backend_of(ATTENTION, "flash-attn")
    used = {}
    monkeypatch.setattr(backends, "_CHOSEN", used)
    spec = ib.ImplicitLMSpec(
        vocab_size=61,
        d_model=128,
        n_layers=1,
        mixer=ib.AttentionSpec(n_heads=2),
        stopping=ib.Stopping(tolerance=0.0, max_iterations=4),
    )
    model = ib.build(spec).cuda().eval()
    ids = torch.randint(61, (2, 200), device="cuda")
    options = {"tolerance": 0.0, "max_iterations": 4}
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        model(ids, **options)
        assert ("attention", "flash-attn") not in used
        found = model(ids, window_length=72, **options).logits
    assert ("attention", "flash-attn") in used
    with torch.no_grad():
        for block in model.backbone.blocks():
            block.mixer.backend = "torch"
        expected = model.double()(ids, window_length=72, **options).logits
    assert error(found, expected) < 2e-2


@pytest.mark.parametrize(
    ("scan", "conv"),
    [("auto", "auto"), ("mamba-ssm", "causal-conv1d"), ("fla", "fla"), ("mamba-ssm", "torch")],
)
def test_mamba2_matches_the_reference_with_every_backend(scan, conv):
    """In one window, in windows down to one token, and with padding, to the precision of 16-bit floats."""
    for operation, name in ((SSD, scan), (CAUSAL_CONV, conv)):
        if name != "auto":
            backend_of(operation, name)
    sizes = {"d_state": 64, "head_dim": 32}
    x = torch.zeros(1, 70, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    if scan != "auto" and (reason := backend_of(SSD, scan).refuses(x, None, None)):
        pytest.skip(f"{scan} is untested: {reason}")
    plain = ib.Mamba2Spec(**sizes, backend="torch", conv_backend="torch")
    check_backend(ib.Mamba2Spec(**sizes, backend=scan, conv_backend=conv), plain, draws=4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's
@pytest.mark.parametrize("backend", ["auto", "flex"])
def test_attention_layers_match_the_reference_with_every_backend(backend):
    check_backend(ib.AttentionSpec(n_heads=2, backend=backend), ib.AttentionSpec(n_heads=2, backend="torch"))


@pytest.mark.parametrize("backend", ["mamba-ssm", "fla"])
def test_a_compiled_scan_equals_an_eager_scan(backend):
    backend_of(SSD, backend)
    tensors = scan_inputs(SHAPES["B2-L256-H4-P64-G1-N128"])
    h = tensors.pop("h")
    x, dt, A, B, C = (t.bfloat16() if name in "xBC" else t for name, t in tensors.items())

    def scan(x, dt, A, B, C, h):
        y, after = ssd(x * 2, dt, A, B, C, initial_state_BHPN=h, return_final_state=True, backend=backend)
        return y * 3, after

    compiled = torch.compile(scan, fullgraph=backend == "mamba-ssm")
    for found, expected in zip(compiled(x, dt, A, B, C, h), scan(x, dt, A, B, C, h), strict=True):
        assert error(found, expected) < 5e-3
