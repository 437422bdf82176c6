"""What every spec is: frozen, complete, strict about keys; and how a field finds the kinds of its family.

A *family* is the set of components that fit one place, such as all solvers. Its base class (`SolverSpec`)
declares `family`; a field annotated with the base asks the registry *when it validates*, so that a kind
registered later needs no rebuilding of the specs that may hold it. A third party opens a family of its own in
the same way::

    class SamplerSpec(ComponentSpec):
        family: ClassVar[str] = "acme.sampler"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import CoreRef, GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from implicit_blocks import registry
from implicit_blocks._utils.hints import did_you_mean, nearest
from implicit_blocks.specs.errors import MOST_ERRORS, field_error, format_error, merge_errors
from implicit_blocks.specs.key_hints import places_of
from implicit_blocks.specs.tree import OUT_OF_RANGE, SpecError, in_range, shown


class Spec(BaseModel):
    """A section of a spec. Frozen; unknown keys are refused, the nearest known one named.

    A mapping without `kind` given for a field says what differs from the field's default, as in
    ``solver: {damping: 0.5}``. So write specs out in full (`model_dump()` without exclusions): what is left
    out means the default's value.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # of fields of any type: null would be another value
        use_attribute_docstrings=True,
    )

    read_before: ClassVar[tuple[str, ...]] = ()
    """Keys that a file may have here and that are gone before its values are validated."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = cls.model_fields
        unknown = [key for key in value if key not in known]
        refused = [
            field_error(cls._remedy(str(key), value), str(key), value=value[key], of_key=True)
            for key in unknown[:MOST_ERRORS]
        ]
        refused += [
            field_error(f"{OUT_OF_RANGE}; got {shown(found, limit=40)}", str(key), value=None)
            for key, entry in value.items()
            for found in _out_of_range(entry)
        ]
        if refused:
            raise merge_errors(refused)
        return {key: _over_default(known[key].default, entry) for key, entry in value.items()}

    @classmethod
    def _remedy(cls, key: str, value: Mapping[str, Any]) -> str:
        if key in cls.read_before:
            return f"{key!r} is read from spec files alone; write it into one"
        known = [*cls.model_fields, *cls.read_before]
        places = places_of(key, cls, value) if nearest(key, known) is None else []
        if places:
            return f"unknown key {shown(key)}; did you mean {' or '.join(map(repr, places))}?"
        return f"unknown key {shown(key)}; {did_you_mean(key, known)}"

    def __init__(self, /, **fields: Any) -> None:
        try:
            self.__pydantic_validator__.validate_python(fields, self_instance=self)
        except ValidationError as error:
            raise format_error(error, fields, source=type(self).__name__) from None

    # What pydantic's own constructor says of itself: validation need not call it for nested specs.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # a mark that pydantic looks for

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate a mapping, or another spec.

        Raises:
            SpecError: a ValueError that names key, value and remedy, a line for each thing that is wrong.

        """
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise format_error(error, obj, source=cls.__name__) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError:
            message = f"{type(self).__name__}: {name}: specs are frozen; use model_copy(update={{...}})"
            raise SpecError(message) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy in which some fields have other values, validated as those of a new spec are.

        pydantic's own takes whatever it is given: a key that there isn't would change nothing, unsaid.

        Raises:
            SpecError: a key that there isn't, or a value that doesn't fit.

        """
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        made = type(self).model_validate({**copied.__dict__, **update})
        made.__pydantic_fields_set__ = self.model_fields_set | update.keys()
        return made


_AnySpec = TypeVar("_AnySpec", bound=Spec)


def validate(spec_class: type[_AnySpec], value: Any) -> _AnySpec:
    """Validate as `Spec.model_validate` does, but let pydantic's error through.

    For callers that format errors of their own.

    Raises:
        ValidationError: located from the spec.

    """
    validated: _AnySpec = spec_class.__pydantic_validator__.validate_python(value)
    return validated


def _out_of_range(value: Any) -> list[int]:
    """Return the integers in a value, or in its lists, that have more than 64 bits."""
    if isinstance(value, int):
        return [] if in_range(value) else [value]
    if isinstance(value, list | tuple):
        return [found for entry in value for found in _out_of_range(entry)][:1]
    return []


class ComponentSpec(Spec):
    """Spec of a component that the registry can build. Subclasses give `kind` its literal and default."""

    family: ClassVar[str]
    """The family: set by the family's base class, inherited by its kinds."""
    builds: ClassVar[str | None] = None
    """What its components are, ``"package.module:Class"``, set by the family's base class; None: anything."""

    kind: str

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let the family's base consult the registry; a kind is an ordinary model."""
        if "family" not in cls.__dict__:
            return handler(source)
        return core_schema.no_info_plain_validator_function(lambda value: _member(cls, value))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """One of all kinds registered now, as a definition of its own; a kind requires its name."""
        if "family" not in cls.__dict__:
            json_schema = handler(schema)
            handler.resolve_ref_schema(json_schema).setdefault("required", []).insert(0, "kind")
            return json_schema
        generator: GenerateJsonSchema = handler.generate_json_schema  # type: ignore[attr-defined]  # of the subclass
        name, reference = generator.get_cache_defs_ref_schema(CoreRef(f"{cls.family.replace('.', '_')}:0"))
        if name not in generator.definitions:
            # Entered before its kinds are: a solver that wraps a solver refers back to it.
            generator.definitions[name] = one_of = {}
            found = [registry.entry(cls.family, kind).spec for kind in registry.kinds(cls.family)]
            one_of["oneOf"] = [generator.generate_inner(spec.__pydantic_core_schema__) for spec in found]
        return {"allOf": [reference]}  # pydantic would write a bare reference out


def _over_default(default: Any, value: Any) -> Any:
    if not isinstance(default, Spec) or not isinstance(value, Mapping) or "kind" in value:
        return value
    fields = dict(default)
    return {**fields, **{key: _over_default(fields.get(key), entry) for key, entry in value.items()}}


def _member(base: type[ComponentSpec], value: Any) -> Any:
    """Find the spec of a family that a value stands for: a spec itself, or a mapping with `kind`."""
    family = base.family
    if isinstance(value, base):
        if registry.entry(family, value.kind).spec is not type(value):
            raise ValueError(
                f"{type(value).__qualname__} is not what is registered as {family} {value.kind!r}; "
                "register it under a kind of its own"
            )
        return value
    known = ", ".join(registry.kinds(family))
    if not isinstance(value, Mapping):
        shown = value if isinstance(value, str) and value in registry.kinds(family) else "…"
        raise ValueError(f"should be a mapping such as {{kind: {shown}}}. Known kinds: {known}")
    if not isinstance(value.get("kind"), str):
        raise ValueError(f"the {family} names no kind; add `kind:`. Known: {known}")
    try:
        entry = registry.entry(family, value["kind"])
    except registry.UnknownKindError as error:
        raise field_error(str(error), "kind", value=value["kind"]) from None
    return validate(entry.spec, value)
