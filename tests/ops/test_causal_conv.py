"""The causal convolution against ``conv1d``, and on the windowed contract."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from implicit_blocks.ops.causal_conv import causal_conv, conv, conv_tail

SHAPES = [(2, 50, 12, 4), (1, 1, 5, 4), (3, 2, 7, 4), (5, 9, 3, 1), (2, 33, 8, 2), (1, 3, 4, 6)]


def name(shape: tuple[int, int, int, int]) -> str:
    return "B{}-L{}-C{}-W{}".format(*shape)


def make(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    batch, length, channels, taps = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, length, channels), (channels, taps), (channels,), (batch, taps - 1, channels))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in sizes]


def reference(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor) -> Tensor:
    full = torch.cat([tail, x], 1).transpose(1, 2)
    y = functional.conv1d(full, weight[:, None], bias, groups=weight.shape[0])
    return y.transpose(1, 2)


@pytest.fixture(params=[1 << 18, 200], ids=["one-tile", "many-tiles"])
def tile_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "TILE_BYTES", request.param)


@pytest.mark.usefixtures("tile_bytes")
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_the_convolution_equals_conv1d(shape: tuple[int, int, int, int], activation: str | None) -> None:
    x, weight, bias, tail = inputs = make(shape)
    y = causal_conv(x, weight, bias, tail_BWC=tail, activation=activation)
    expected = reference(x, weight, bias, tail)
    if activation == "silu":
        expected = functional.silu(expected)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    wanted = [t for t in inputs if t.numel()]
    torch.testing.assert_close(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy))
    with torch.no_grad():
        assert torch.equal(causal_conv(x, weight, bias, tail_BWC=tail, activation=activation), y)


def test_starts_from_zeros_and_without_bias() -> None:
    x, weight, bias, tail = make((2, 6, 3, 4))
    y = causal_conv(x, weight)
    expected = reference(x, weight, torch.zeros_like(bias), torch.zeros_like(tail))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.sum(), [x, weight]), torch.autograd.grad(expected.sum(), [x, weight])
    )


@pytest.mark.usefixtures("tile_bytes")
@pytest.mark.parametrize("window", [1, 2, 3, 5, 40])
def test_windows_carry_the_tail(window: int) -> None:
    x, weight, bias, tail = (t.detach() for t in make((2, 40, 6, 4)))
    documents = torch.tensor([0] * 7 + [1] * 1 + [2] * 20 + [9] * 12).expand(2, -1)
    history = torch.full((2, 3), -1)
    whole = causal_conv(x, weight, bias, tail_BWC=tail, documents_BL=documents, tail_documents_BW=history)
    pieces = []
    for start in range(0, 40, window):
        part = slice(start, start + window)
        pieces.append(
            causal_conv(
                x[:, part],
                weight,
                bias,
                tail_BWC=tail,
                documents_BL=documents[:, part],
                tail_documents_BW=history,
            )
        )
        tail = conv_tail(x[:, part], tail, taps=4)
        history = torch.cat([history, documents[:, part]], 1)[:, -3:]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert torch.equal(tail, x[:, -3:])


@pytest.mark.usefixtures("tile_bytes")
def test_taps_stop_at_documents() -> None:
    x, weight, bias, tail = make((1, 20, 6, 4))
    documents = torch.tensor([[3] * 8 + [4] * 12])
    y = causal_conv(x, weight, bias, tail_BWC=tail, documents_BL=documents, activation="silu")
    alone = causal_conv(x[:, 8:], weight, bias, activation="silu")
    torch.testing.assert_close(y[:, 8:], alone)
    torch.testing.assert_close(
        y[:, :8],
        causal_conv(x[:, :8], weight, bias, tail_BWC=tail, activation="silu"),
        msg="the tail is its own",
    )
    poisoned = x.detach().clone()
    poisoned[:, :8] = torch.nan
    after = causal_conv(poisoned, weight, bias, documents_BL=documents, activation="silu")[:, 8:]
    torch.testing.assert_close(after, alone)


@pytest.mark.usefixtures("tile_bytes")
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_gradients_equal_finite_differences(documents: bool) -> None:
    inputs = make((2, 7, 3, 4))
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 0]]) if documents else None

    def convolve(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor) -> Tensor:
        return causal_conv(x, weight, bias, tail_BWC=tail, activation="silu", documents_BL=ids)

    assert torch.autograd.gradcheck(convolve, inputs)
    assert torch.autograd.gradgradcheck(convolve, inputs)


# forward mode loads decompositions that torch itself still scripts
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_function_transforms_differentiate_the_convolution() -> None:
    x, weight, bias, tail = (t.detach() for t in make((1, 5, 3, 4)))

    def convolve(x: Tensor) -> Tensor:
        return causal_conv(x, weight, bias, tail_BWC=tail, activation="silu")

    forward = torch.func.jacfwd(convolve)(x)
    torch.testing.assert_close(torch.func.jacrev(convolve)(x), forward)
    torch.testing.assert_close(torch.autograd.functional.jacobian(convolve, x), forward)


def test_bfloat16_inputs_give_the_rounded_result_of_float32() -> None:
    inputs = [t.detach().bfloat16() for t in make((2, 30, 8, 4))]
    x, weight, bias, tail = inputs
    y = causal_conv(x, weight, bias, tail_BWC=tail, activation="silu")
    assert y.dtype == torch.bfloat16
    wide = [t.float() for t in inputs]
    torch.testing.assert_close(y, functional.silu(reference(*wide)).bfloat16(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_tail_is_the_last_inputs(length: int) -> None:
    x, _, _, tail = (t.detach() for t in make((2, length, 3, 4)))
    expected = torch.cat([tail, x], 1)[:, -3:]
    found = conv_tail(x, tail, taps=4)
    assert torch.equal(found, expected)
    assert found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    assert torch.equal(conv_tail(x, None, taps=4), torch.cat([torch.zeros_like(tail), x], 1)[:, -3:])


def test_mismatched_shapes_and_unknown_activations_are_refused() -> None:
    x, weight, bias, tail = make((2, 5, 3, 4))
    with pytest.raises(ValueError, match="3 channels and the input 2"):
        causal_conv(x[..., :2], weight, bias)
    with pytest.raises(ValueError, match="tail must have shape"):
        causal_conv(x, weight, bias, tail_BWC=tail[:, :2])
    with pytest.raises(ValueError, match="unknown activation 'gelu'"):
        causal_conv(x, weight, bias, activation="gelu")  # type: ignore[arg-type] # the point of the test


def test_a_compiled_convolution_has_no_graph_break() -> None:
    inputs = make((1, 9, 3, 4))[:3]
    compiled = torch.compile(lambda *t: causal_conv(*t, activation="silu"), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), causal_conv(*inputs, activation="silu"))


def test_the_tail_is_of_each_rows_last_real_inputs():
    """Three, one and none of the window's tokens are real, in front; the tail before it has the rest."""
    x, tail = torch.randn(3, 5, 4), torch.randn(3, 3, 4)
    count = torch.tensor([3, 1, 0])
    found = conv_tail(x, tail, taps=4, last_taps_BW=count[:, None] + torch.arange(3))
    expected = [x[0, :3], torch.cat((tail[1, 1:], x[1, :1])), tail[2]]
    assert torch.equal(found, torch.stack(expected))
