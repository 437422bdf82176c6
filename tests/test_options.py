"""Options out of their range are refused where they are given, each in a sentence."""

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry

STOPPING = ib.Stopping(tolerance=1e-3, max_iterations=4)
Z0 = torch.zeros(2, 3, 4)


def searched(**options):
    return ib.Search(solver=ib.Picard(), stopping=STOPPING, **options)(lambda z: 0.5 * z, Z0)


def solved(**options):
    parts = {"solver": ib.Picard(), "gradient": ib.Phantom(), "stopping": STOPPING}
    return ib.solve_fixed_point(lambda z: 0.5 * z, Z0, **parts, **options)


def a_model():
    mixer = ib.AttentionSpec(n_heads=2)
    return ib.build(ib.ImplicitLMSpec(vocab_size=5, d_model=8, n_layers=1, mixer=mixer))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ib.Phantom(steps=2.5), "steps is 2.5; choose a whole number, at least 1"),
        (lambda: ib.Anderson(memory="5"), "memory is '5'; choose a whole number"),
        (
            lambda: ib.Anderson(regularization=float("nan")),
            "regularization must be at least 0 .*got nan",
        ),
        (lambda: ib.ImplicitFunction(solver="picard"), "solver is 'picard'; give a Solver such as Anderson"),
        (lambda: ib.ImplicitFunction(stopping=1e-3), "stopping is 0.001; give a Stopping such as"),
        (lambda: ib.JacobianPenalty(gradient="phantom"), "gradient is 'phantom'; give a GradientEstimator"),
        (lambda: ib.JacobianPenalty(gradient=ib.Unrolled()), "ends after a fixed number of steps"),
        (lambda: ib.Broyden(memory=0), "memory is 0; choose at least 1"),
        (lambda: searched(moving_average=2.0), r"moving_average is 2.0; choose a number in \(0, 1\]"),
        (lambda: searched(commit_prefix=0), "commit_prefix is 0; choose at least 1"),
        (
            lambda: searched(valid=torch.ones(2, 3)),
            "of torch.float32, .* give one flag a token, as torch.bool",
        ),
        (
            lambda: searched(valid=torch.ones(2, 2).bool()),
            r"valid has shape \(2, 2\) .* starts with \(2, 3\)",
        ),
        (lambda: solved(window_length=0), "window_length is 0; choose at least 1"),
        (lambda: solved(window_length=1.5), "window_length is 1.5; choose a whole number"),
        (
            lambda: ib.generate(a_model().eval(), [[1]], max_new_tokens=1.5),
            "max_new_tokens is 1.5; choose a whole number",
        ),
        (lambda: a_model().checkpoint_activations("step"), "is 'step'; choose 'none', 'steps' or 'layers'"),
    ],
)
def test_an_option_out_of_range_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("family", ["solver", "gradient"])
def test_a_component_begins_with_the_same_options_as_its_spec(family):
    """Said twice, for Python and for YAML, and printed alike."""
    for kind in registry.kinds(family):
        of_spec = ib.build(registry.entry(family, kind).spec())
        assert repr(type(of_spec)()) == repr(of_spec)
