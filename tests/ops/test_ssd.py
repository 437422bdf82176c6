"""The SSD backends against the recurrence: values, final states and every gradient."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from implicit_blocks.ops.ssd import SSD, ssd

FAST = ("torch", "chunked_autograd")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Shape(NamedTuple):
    B: int
    L: int
    H: int
    P: int
    N: int
    G: int = 1

    def __str__(self) -> str:
        name = f"B{self.B}-L{self.L}-H{self.H}-P{self.P}-N{self.N}"
        return name if self.G == 1 else f"{name}-G{self.G}"


SHAPES = (
    Shape(2, 65, 8, 16, 32),
    Shape(1, 1, 4, 8, 16),
    Shape(3, 2, 2, 4, 8),
    Shape(2, 64, 4, 8, 16, G=2),
    Shape(1, 200, 6, 8, 4, G=3),
    Shape(3, 130, 4, 16, 8, G=4),
    Shape(128, 32, 4, 8, 8),
)


def make(
    shape: Shape, dtype: torch.dtype, *, seed: int = 0, state: bool = True, dt_scale: float = 0.2
) -> list[Tensor]:
    """x, dt, A, B, C and, if wanted, an initial state: leaves that need gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    B, L, H, P, N, G = shape
    dt = dt_scale * torch.rand(B, L, H, generator=generator, dtype=torch.float64)
    A = -1 - 15 * torch.rand(H, generator=generator, dtype=torch.float64)
    tensors = [normal(B, L, H, P), dt, A, normal(B, L, G, N), normal(B, L, G, N)]
    if state:
        tensors.append(normal(B, H, P, N))
    return [t.to(dtype).requires_grad_() for t in tensors]


def make_documents(shape: Shape, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape.B, shape.L, generator=generator) < 0.08).long().cumsum(1)


def evaluate(inputs: Sequence[Tensor], backend: str, **options: object) -> list[Tensor]:
    """y, the final state, and the gradients of a fixed random functional of both."""
    initial = inputs[5] if len(inputs) > 5 else None
    y, h = ssd(*inputs[:5], initial_state_BHPN=initial, return_final_state=True, backend=backend, **options)
    assert h is not None
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in (y, h)]
    return [y, h, *torch.autograd.grad([y, h], list(inputs), weights)]


def relative_error(value: Tensor, reference: Tensor) -> float:
    assert value.dtype == reference.dtype
    assert value.shape == reference.shape
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-30))


def compare(values: Sequence[Tensor], references: Sequence[Tensor], tolerance: float) -> None:
    names = ("y", "h", "dx", "ddt", "dA", "dB", "dC", "dinitial")
    errors = {n: relative_error(v, r) for n, v, r in zip(names, values, references, strict=False)}
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_scan_equals_the_recurrence(shape: Shape, dtype: torch.dtype, backend: str) -> None:
    inputs = make(shape, dtype)
    compare(evaluate(inputs, backend), evaluate(inputs, "recurrence"), TOLERANCE[dtype])


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_default_initial_state_is_zero(shape: Shape, backend: str) -> None:
    inputs = make(shape, torch.float64, state=False)
    compare(evaluate(inputs, backend), evaluate(inputs, "recurrence"), 1e-10)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("earlier", [None, 0, -1], ids=["first-token's", "same", "another"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_new_document_resets_the_state(shape: Shape, earlier: int | None, backend: str) -> None:
    inputs = make(shape, torch.float64)
    options = {
        "documents_BL": make_documents(shape),
        "initial_document_B": None if earlier is None else torch.full((shape.B,), earlier),
    }
    values = evaluate(inputs, backend, **options)
    references = evaluate(inputs, "recurrence", **options)
    compare(values[:7], references[:7], 1e-10)
    torch.testing.assert_close(values[7], references[7], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", [*FAST, "recurrence"])
def test_a_document_does_not_see_the_one_before(backend: str) -> None:
    shape = Shape(1, 90, 2, 4, 8)
    inputs = make(shape, torch.float64, state=False)
    documents = torch.tensor([[0] * 37 + [5] * 53])
    y, _ = ssd(*inputs, documents_BL=documents, chunk_size=16, backend=backend)
    alone = [t[:, 37:] if t.ndim > 1 else t for t in inputs]
    y_alone, _ = ssd(*alone, chunk_size=16, backend=backend)
    torch.testing.assert_close(y[:, 37:], y_alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("chunk_size", [1, 3, 16, 65, 256])
def test_chunk_size_does_not_matter(chunk_size: int, backend: str) -> None:
    inputs = make(Shape(2, 65, 4, 8, 16), torch.float64)
    compare(
        evaluate(inputs, backend, chunk_size=chunk_size),
        evaluate(inputs, "recurrence"),
        TOLERANCE[torch.float64],
    )


@pytest.mark.parametrize("backend", [*FAST, "recurrence"])
@pytest.mark.parametrize("window", [1, 2, 7, 32, 100])
def test_windows_carry_the_state(window: int, backend: str) -> None:
    shape = Shape(2, 100, 4, 8, 16, G=2)
    inputs = make(shape, torch.float64)
    documents = make_documents(shape)
    earlier = torch.zeros(shape.B, dtype=torch.long)
    x, dt, A, B, C, h0 = (t.detach() for t in inputs)
    whole, h_whole = ssd(
        x,
        dt,
        A,
        B,
        C,
        initial_state_BHPN=h0,
        documents_BL=documents,
        return_final_state=True,
        backend=backend,
    )
    h: Tensor | None = h0
    pieces = []
    for start in range(0, shape.L, window):
        part = slice(start, start + window)
        y, h = ssd(
            x[:, part],
            dt[:, part],
            A,
            B[:, part],
            C[:, part],
            initial_state_BHPN=h,
            documents_BL=documents[:, part],
            initial_document_B=earlier,
            return_final_state=True,
            backend=backend,
        )
        earlier = documents[:, part][:, -1]
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(h, h_whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", FAST)
def test_strided_inputs_give_the_same_result(backend: str) -> None:
    """The mixer's inputs are slices of one projection, not contiguous."""
    B, L, H, P, N = 2, 70, 4, 8, 16
    joint = torch.randn(B, L, H * P + 2 * N, dtype=torch.float64, requires_grad=True)
    x, Bs, Cs = joint.split([H * P, N, N], dim=-1)
    dt, A = make(Shape(B, L, H, P, N), torch.float64)[1:3]
    results = []
    for name in (backend, "recurrence"):
        y, _ = ssd(x.view(B, L, H, P), dt, A, Bs[:, :, None], Cs[:, :, None], backend=name)
        results.append([y, *torch.autograd.grad(y.sum(), [joint, dt, A])])
    compare(results[0], results[1], 1e-10)


@pytest.mark.parametrize("length", [1, 2, 11])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_gradients_equal_finite_differences(length: int, documents: bool) -> None:
    shape = Shape(2, length, 2, 3, 2, G=2)
    inputs = make(shape, torch.float64)
    ids = make_documents(shape) if documents else None

    def scan(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        return ssd(
            *tensors[:5],
            initial_state_BHPN=tensors[5],
            chunk_size=4,
            documents_BL=ids,
            initial_document_B=None if ids is None else ids[:, 0] - 1,
            return_final_state=True,
        )

    assert torch.autograd.gradcheck(scan, inputs)


def test_second_derivatives_equal_finite_differences() -> None:
    inputs = make(Shape(1, 7, 2, 2, 2), torch.float64)

    def scan(*tensors: Tensor) -> Tensor:
        return ssd(*tensors[:5], initial_state_BHPN=tensors[5], chunk_size=4)[0]

    assert torch.autograd.gradgradcheck(scan, inputs)


# forward mode loads decompositions that torch itself still scripts
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("length", [1, 9])
def test_function_transforms_differentiate_the_scan(length: int) -> None:
    x, dt, A, B, C, h = (t.detach() for t in make(Shape(1, length, 2, 3, 4), torch.float64))

    def scan(x: Tensor) -> Tensor:
        return ssd(x, dt, A, B, C, initial_state_BHPN=h, chunk_size=4)[0]

    forward = torch.func.jacfwd(scan)(x)
    torch.testing.assert_close(torch.func.jacrev(scan)(x), forward)
    torch.testing.assert_close(torch.autograd.functional.jacobian(scan, x), forward)


@pytest.mark.parametrize("length", [1, 80])
@pytest.mark.parametrize("backend", [b.name for b in SSD.backends if not b.package])
def test_bfloat16_inputs_give_the_rounded_result_of_float32(backend: str, length: int) -> None:
    """The result is that of the rounded inputs in float32: only y is rounded."""
    inputs = make(Shape(2, length, 4, 8, 16), torch.float32)
    narrow = [t.detach().bfloat16().requires_grad_() for t in inputs]
    wide = [t.detach().float().requires_grad_() for t in narrow]
    values, references = evaluate(narrow, backend), evaluate(wide, "recurrence")
    assert values[0].dtype == torch.bfloat16
    assert values[1].dtype == torch.float32
    assert all(v.dtype == torch.bfloat16 for v in values[2:])
    compare(values[1:2], references[1:2], 1e-5)
    compare([v.float() for v in values], references, 6e-3)


def test_autocast_does_not_narrow_the_sums() -> None:
    inputs = make(Shape(2, 40, 4, 8, 16), torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = evaluate(inputs, "torch")
    compare(values, evaluate(inputs, "recurrence"), 1e-5)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dt_scale", [0.0, 1e-6, 3.0, 1e3, 1e30], ids=lambda s: f"dt{s:g}")
def test_extreme_step_sizes_give_finite_and_accurate_values(dt_scale: float, backend: str) -> None:
    """Where decays underflow at once, nothing becomes NaN, and weak decays beside them keep their digits."""
    inputs = make(Shape(2, 100, 4, 8, 16), torch.float32, dt_scale=1.0)
    with torch.no_grad():
        inputs[1][:, ::3] *= dt_scale
        inputs[1][:, 1::3] *= 0.01
        inputs[1][:, 2::3] *= 0.01
        if dt_scale > 1e10:  # keep x·dt in range
            inputs[0][:, ::3] /= dt_scale
    values = evaluate(inputs, backend)
    assert all(torch.isfinite(v).all() for v in values)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    references = evaluate(wide, "recurrence")
    compare([v.double() for v in values], references, 1e-5)


@pytest.mark.parametrize("backend", [*FAST, "recurrence"])
@pytest.mark.parametrize("length", [1, 5])
def test_zero_step_leaves_the_state(length: int, backend: str) -> None:
    x, dt, A, B, C, h = (t.detach() for t in make(Shape(2, length, 4, 8, 16), torch.float32))
    before = h.clone()
    _, after = ssd(
        x, torch.zeros_like(dt), A, B, C, initial_state_BHPN=h, return_final_state=True, backend=backend
    )
    assert torch.equal(after, before)
    ssd(x, dt, A, B, C, initial_state_BHPN=h, return_final_state=True, backend=backend)
    assert torch.equal(h, before), "the caller's state was written to"


@settings(max_examples=25, derandomize=True)
@given(
    shape=st.builds(
        lambda B, L, R, P, N, G: Shape(B, L, R * G, P, N, G),
        st.integers(1, 3),
        st.integers(1, 70),
        st.integers(1, 3),
        st.integers(1, 9),
        st.integers(1, 9),
        st.integers(1, 3),
    ),
    chunk_size=st.integers(1, 40),
    documents=st.booleans(),
    state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_scan_equals_the_recurrence_for_random_shapes(
    shape: Shape, chunk_size: int, documents: bool, state: bool, seed: int
) -> None:
    inputs = make(shape, torch.float64, seed=seed, state=state)
    options = {
        "documents_BL": make_documents(shape, seed=seed) if documents else None,
        "chunk_size": chunk_size,
    }
    compare(evaluate(inputs, "torch", **options), evaluate(inputs, "recurrence", **options), 1e-9)


def test_rows_do_not_depend_on_their_mates() -> None:
    """The number of other rows and their values, NaN included, have no effect."""
    inputs = [t.detach() for t in make(Shape(37, 40, 4, 32, 16), torch.float32)]
    whole, h_whole = ssd(*inputs[:5], initial_state_BHPN=inputs[5], return_final_state=True)
    spoilt = [t.clone() for t in inputs]
    spoilt[0][1:] = torch.nan
    y, h = ssd(*spoilt[:5], initial_state_BHPN=spoilt[5], return_final_state=True)
    assert torch.equal(y[0], whole[0])
    assert h is not None
    assert h_whole is not None
    assert torch.equal(h[0], h_whole[0])


def _largest_saved_and_made(length: int, backend: str) -> tuple[int, int]:
    """Numbers kept for the backward pass, and the bytes of the largest tensor made on the way."""
    inputs = make(Shape(1, length, 2, 4, 8), torch.float32, state=False)
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.element_size()
        return t

    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().nbytes())
            return out

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), Watch():
        y, _ = ssd(*inputs, chunk_size=16, backend=backend)
        y.sum().backward()
    return sum(saved.values()), largest


@pytest.mark.parametrize("backend", FAST)
def test_memory_is_linear_in_length(backend: str) -> None:
    (saved, largest), (saved_8, largest_8) = (_largest_saved_and_made(n, backend) for n in (256, 2048))
    assert saved_8 < 8.1 * saved
    assert largest_8 <= 8.1 * largest


def test_an_unknown_backend_is_refused() -> None:
    inputs = make(Shape(1, 3, 2, 4, 8), torch.float32, state=False)
    with pytest.raises(ValueError, match=r"'cuda-magic'.*torch.*recurrence"):
        ssd(*inputs, backend="cuda-magic")


def test_shapes_that_do_not_fit() -> None:
    x, dt, A, B, C, h = make(Shape(1, 3, 4, 4, 8), torch.float32)
    with pytest.raises(ValueError, match="4 heads cannot be divided into 3 groups"):
        ssd(x, dt, A, B.expand(1, 3, 3, 8), C.expand(1, 3, 3, 8))
    with pytest.raises(ValueError, match="L at least 1"):
        ssd(x[:, :0], dt[:, :0], A, B[:, :0], C[:, :0])
    with pytest.raises(ValueError, match="initial state"):
        ssd(x, dt, A, B, C, initial_state_BHPN=h[:, :2])
    with pytest.raises(ValueError, match="chunk_size"):
        ssd(x, dt, A, B, C, chunk_size=0)
    with pytest.raises(ValueError, match="dt must have shape"):
        ssd(x, dt[:, :2], A, B, C)
    with pytest.raises(ValueError, match="documents"):
        ssd(x, dt, A, B, C, documents_BL=torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="B and C"):
        ssd(x, dt, A, B, C[..., :4])


def test_backends_return_the_required_gradients() -> None:
    """Any subset of inputs may need gradients."""
    shape = Shape(1, 20, 2, 4, 8)
    for needed in itertools.combinations(range(6), 2):
        inputs = [t.detach() for t in make(shape, torch.float64)]
        for i in needed:
            inputs[i].requires_grad_()
        found = []
        for backend in ("torch", "recurrence"):
            y, _ = ssd(*inputs[:5], initial_state_BHPN=inputs[5], chunk_size=8, backend=backend)
            found.append(torch.autograd.grad(y.sum(), [inputs[i] for i in needed]))
        compare(found[0], found[1], 1e-10)


def test_a_compiled_scan_has_no_graph_break() -> None:
    inputs = make(Shape(1, 20, 2, 4, 8), torch.float32)
    compiled = torch.compile(lambda *t: ssd(*t, chunk_size=8)[0], backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs[:5]), ssd(*inputs[:5])[0])


@pytest.mark.parametrize("length", [1, 70])
def test_the_meta_device_gives_the_shapes(length: int) -> None:
    """On the meta device, for counting operations and memory."""
    inputs = [t.detach().to("meta").requires_grad_() for t in make(Shape(2, length, 4, 8, 16), torch.float32)]
    y, h = ssd(*inputs[:5], initial_state_BHPN=inputs[5], return_final_state=True)
    assert y.shape == inputs[0].shape
    assert h is not None
    assert h.shape == inputs[5].shape
    (y.sum() + h.sum()).backward()
