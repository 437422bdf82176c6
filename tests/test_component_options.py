"""Options of components: invalid values are refused, and defaults equal those of the specs."""

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
        (lambda: ib.Phantom(steps=2.5), "steps .*2.5"),
        (lambda: ib.Anderson(memory="5"), "memory .*'5'"),
        (lambda: ib.Anderson(regularization=float("nan")), "regularization .*nan"),
        (lambda: ib.ImplicitFunction(solver="picard"), "solver .*'picard'.*Anderson"),
        (lambda: ib.ImplicitFunction(stopping=1e-3), "stopping .*0.001.*Stopping"),
        (lambda: ib.JacobianPenalty(gradient="phantom"), "gradient .*'phantom'.*GradientEstimator"),
        (lambda: ib.JacobianPenalty(gradient=ib.Unrolled()), "[uU]nrolled|fixed number of steps"),
        (lambda: ib.Broyden(memory=0), "memory .*0.*at least 1"),
        (lambda: searched(moving_average=2.0), r"moving_average .*2.0.*\(0, 1\]"),
        (lambda: searched(commit_prefix=0), "commit_prefix .*0.*at least 1"),
        (
            lambda: searched(valid=torch.ones(2, 3)),
            "torch.float32.*torch.bool",
        ),
        (
            lambda: searched(valid=torch.ones(2, 2).bool()),
            r"valid .*\(2, 2\) .*\(2, 3\)",
        ),
        (lambda: solved(window_length=0), "window_length .*0.*at least 1"),
        (lambda: solved(window_length=1.5), "window_length .*1.5"),
        (
            lambda: ib.generate(a_model().eval(), [[1]], max_new_tokens=1.5),
            "max_new_tokens .*1.5",
        ),
        (lambda: a_model().checkpoint_activations("step"), "'step'.*none"),
    ],
)
def test_an_option_out_of_range_is_refused_with_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.filterwarnings("ignore:solver attractor_anderson")
@pytest.mark.parametrize("family", ["solver", "gradient"])
def test_a_components_defaults_equal_its_specs_defaults(family):
    """Defaults are written twice, in the class and in the spec."""
    for kind in registry.kinds(family):
        of_spec = ib.build(registry.entry(family, kind).spec())
        assert repr(type(of_spec)()) == repr(of_spec)
