"""The registry: kinds by family, builders resolved when something is built."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest

from implicit_blocks import registry
from implicit_blocks.solvers import Picard
from implicit_blocks.specs import ComponentSpec, PicardSpec, SolverSpec, Spec, SpecError, load_spec


class HalfSpec(SolverSpec):
    """Steps of half the length."""

    kind: Literal["half"] = "half"


class SamplerSpec(ComponentSpec):
    """Base of a third-party family."""

    family: ClassVar[str] = "acme.sampler"


class GreedySpec(SamplerSpec):
    """Select the most likely token."""

    kind: Literal["greedy"] = "greedy"


class BeamSpec(SamplerSpec):
    """Contains another spec of its family."""

    kind: Literal["beam"] = "beam"
    inner: SamplerSpec = GreedySpec()


class DecodingSpec(Spec):
    sampler: SamplerSpec


@pytest.mark.usefixtures("fresh_registry")
class TestAdd:
    def test_build_calls_the_builder_with_spec_and_context(self) -> None:
        given = {}

        def builder(spec, **context):
            given.update(context, spec=spec)
            return Picard()

        registry.add("solver", HalfSpec, builder, owner="me")
        assert isinstance(registry.build(HalfSpec(), width=3), Picard)
        assert given == {"spec": HalfSpec(), "width": 3}
        assert registry.entry("solver", "half").version == "unknown"

    def test_an_import_string_is_resolved_when_building(self) -> None:
        registry.add("solver", HalfSpec, "fractions:Fraction.from_float", owner="me")
        assert registry.entry("solver", "half").resolve_builder()(0.5).denominator == 2

    def test_a_builder_that_cannot_be_imported_is_reported(self) -> None:
        registry.add("solver", HalfSpec, "fractions:Fractoin", owner="me")
        with pytest.raises(ImportError, match="solver 'half' of me is built by 'fractions:Fractoin'"):
            registry.build(HalfSpec())

    def test_a_taken_kind_is_rejected(self) -> None:
        class OtherSpec(SolverSpec):
            kind: Literal["picard"] = "picard"

        with pytest.raises(ValueError, match="already registered by implicit_blocks"):
            registry.add("solver", OtherSpec, "m:f", owner="me")
        with pytest.raises(ValueError, match="is registered with PicardSpec, not "):
            registry.build(OtherSpec())

    def test_a_class_that_is_not_a_spec_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="is not a ComponentSpec"):
            registry.add("solver", dict, "m:f", owner="me")

    def test_a_third_party_defines_a_family(self) -> None:
        with pytest.raises(SpecError, match=r"unknown acme.sampler 'greedy'; known: none"):
            DecodingSpec(sampler={"kind": "greedy"})
        for spec in (GreedySpec, BeamSpec):
            registry.add("acme.sampler", spec, "m:f", owner="acme")
        spec = DecodingSpec(sampler={"kind": "beam", "inner": {"kind": "beam"}})
        assert spec.sampler == BeamSpec(inner=BeamSpec())
        assert DecodingSpec.model_validate(spec.model_dump()) == spec
        schema = DecodingSpec.model_json_schema()  # a recursive schema
        assert schema["$defs"]["acme_sampler"]["oneOf"] == [
            {"$ref": "#/$defs/BeamSpec"},
            {"$ref": "#/$defs/GreedySpec"},
        ]

    def test_isolated_restores_the_registry(self) -> None:
        with registry.isolated():
            registry.add("solver", HalfSpec, "m:f", owner="me")
        assert "half" not in registry.kinds("solver")


def test_an_unknown_kind_suggests_the_nearest_and_lists_all(fresh_registry) -> None:
    with pytest.raises(registry.UnknownKindError) as caught:
        registry.entry("solver", "picad")
    assert str(caught.value).startswith(
        f"unknown solver 'picad'; did you mean 'picard'? Known: {', '.join(registry.kinds('solver'))}"
    )
    assert isinstance(caught.value, ValueError)


def test_a_spec_of_an_unregistered_class_is_rejected_in_validation() -> None:
    with pytest.raises(SpecError, match="unknown solver 'half'"):
        SolverSpec.model_validate(HalfSpec())


def test_build_requires_a_spec() -> None:
    with pytest.raises(ValueError, match=r"build\(\) expects a component's spec"):
        registry.build({"kind": "picard"})


def test_build_refuses_the_spec_of_a_run_and_names_that_of_its_model() -> None:
    with pytest.raises(ValueError, match=r"spec\.model"):
        registry.build(load_spec("word_problem_s3"))


def test_the_base_of_a_family_validates_any_of_its_kinds() -> None:
    assert SolverSpec.model_validate({"kind": "picard", "damping": 0.5}) == PicardSpec(damping=0.5)
