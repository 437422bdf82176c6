"""The base of all specs: frozen, complete, strict about keys; and how a field finds the kinds of its family.

A *family* is a set of interchangeable components, such as all solvers. Its base class (`SolverSpec`) declares
`family`. A field annotated with the base consults the registry *when it validates*, so that a kind registered
later needs no rebuilding of the specs that may contain it. Third parties define their own families in the
same way::

    class SamplerSpec(ComponentSpec):
        family: ClassVar[str] = "acme.sampler"
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping
from functools import cache
from inspect import cleandoc, get_annotations, getsource, signature
from itertools import pairwise
from numbers import Integral
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import CoreRef, GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from implicit_blocks import registry
from implicit_blocks._utils.hints import did_you_mean, nearest
from implicit_blocks.specs.errors import MOST_ERRORS, field_error, format_error, key_hints, merge_errors
from implicit_blocks.specs.tree import OUT_OF_RANGE, SpecError, in_range, shown


class Spec(BaseModel):
    """A section of a spec. Frozen; unknown keys are rejected, and the error suggests the nearest known key.

    A mapping without `kind` given for a field overrides single values of the field's default, as in
    ``solver: {damping: 0.5}``. Therefore save specs in full (`model_dump()` without exclusions): an omitted
    key means the default's value.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in fields of type Any; null would be a different value
    )

    read_before: ClassVar[tuple[str, ...]] = ()
    """Keys of spec files that are processed and removed before validation."""

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
            field_error(f"should be a valid {number}; got {found}", str(key), value=entry)
            for key, entry in value.items()
            if key in known and (number := _number_of(known[key]))
            for found in _first(entry, lambda found: isinstance(found, bool))
        ]
        refused += [
            field_error(f"{OUT_OF_RANGE}; got {shown(found, limit=40)}", str(key), value=None)
            for key, entry in value.items()
            for found in _first(entry, lambda found: isinstance(found, int) and not in_range(found))
        ]
        if refused:
            raise merge_errors(refused)
        return {key: _over_default(known[key].default, entry) for key, entry in value.items()}

    @classmethod
    def _remedy(cls, key: str, value: Mapping[str, Any]) -> str:
        if key in cls.read_before:
            return f"{key!r} is supported only in spec files; move it to a file"
        known = [*cls.model_fields, *cls.read_before]
        places = key_hints(key, cls, value) if nearest(key, known) is None else []
        if places:
            return f"unknown key {shown(key)}; did you mean {' or '.join(map(repr, places))}?"
        return f"unknown key {shown(key)}; {did_you_mean(key, known)}"

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the docstrings of the fields as descriptions.

        pydantic's `use_attribute_docstrings` reads the sources when a spec is defined, in every process.
        """
        json_schema = handler(schema)
        properties = handler.resolve_ref_schema(json_schema).get("properties", {})
        for name, text in field_docstrings(cls).items():
            properties[name].setdefault("description", text)
        return json_schema

    def __init__(self, /, **fields: Any) -> None:
        try:
            self.__pydantic_validator__.validate_python(fields, self_instance=self)
        except ValidationError as error:
            raise format_error(error, fields, source=type(self).__name__) from None

    # Marks the constructor as equivalent to pydantic's own: validation skips it for nested specs.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # an attribute that pydantic reads

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Validate a mapping, or another spec.

        Raises:
            SpecError: a ValueError with key, value and remedy, one line per problem.

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
        """Return a copy with some fields changed; the new values are validated, unlike in pydantic's method.

        Raises:
            SpecError: an unknown key or an invalid value.

        """
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        changed = type(self).model_validate({**copied.__dict__, **update})
        changed.__pydantic_fields_set__ = self.model_fields_set | update.keys()
        return changed


def field_docstrings(spec: type[Spec]) -> dict[str, str]:
    """Return the docstring below each field, in the class that annotates it last."""
    found: dict[str, str] = {}
    for base in reversed(spec.__mro__):
        annotated = get_annotations(base).keys() & spec.model_fields.keys()
        if not annotated:
            continue
        found = {name: text for name, text in found.items() if name not in annotated}
        for above, below in pairwise(_bodies(base.__module__).get(base.__name__, ())):
            match above, below:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found |= {name: cleandoc(text)} if name in annotated else {}
    return found


@cache
def _bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of every class of a module; a module without source has none."""
    try:
        tree = ast.parse(getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):
        return {}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: node.body for node in reversed(classes)}  # outer classes hide inner ones


_AnySpec = TypeVar("_AnySpec", bound=Spec)


def validate(spec_class: type[_AnySpec], value: Any) -> _AnySpec:
    """Validate like `Spec.model_validate`, but raise pydantic's error, for callers that format it themselves.

    Raises:
        ValidationError: its locations are relative to the spec.

    """
    validated: _AnySpec = spec_class.__pydantic_validator__.validate_python(value)
    return validated


def _first(value: Any, wrong: Callable[[Any], bool]) -> list[Any]:
    """Return the first wrong entry of a value or its lists, as a list of at most one."""
    if isinstance(value, list | tuple):
        return [found for entry in value for found in _first(entry, wrong)][:1]
    return [value] if wrong(value) else []


def _number_of(field: FieldInfo) -> str | None:
    """Return the kind of number that a field expects; None: no number, or it may accept booleans."""
    types = [*field.metadata, field.annotation]
    for each in types:  # the list grows by the types' arguments
        types += get_args(each)
    if bool in types or Any in types or any(isinstance(each, PlainValidator) for each in types):
        return None
    return "number" if float in types else "integer" if int in types else None


class ComponentSpec(Spec):
    """Spec of a component that the registry can build. Subclasses define `kind`, a literal with default."""

    family: ClassVar[str]
    """The family, set by the family's base class and inherited by its kinds."""
    builds: ClassVar[str | None] = None
    """The class of its components, ``"package.module:Class"``, set by the family's base class; None: any."""

    kind: str

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make the family's base consult the registry; a kind is an ordinary model."""
        if "family" not in cls.__dict__:
            return handler(source)
        return core_schema.no_info_plain_validator_function(lambda value: _member(cls, value))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return one of all kinds registered now, as a separate definition; `kind` is required."""
        if "family" not in cls.__dict__:
            json_schema = super().__get_pydantic_json_schema__(schema, handler)
            handler.resolve_ref_schema(json_schema).setdefault("required", []).insert(0, "kind")
            return json_schema
        generator: GenerateJsonSchema = handler.generate_json_schema  # type: ignore[attr-defined]  # of the subclass
        name, reference = generator.get_cache_defs_ref_schema(CoreRef(f"{cls.family.replace('.', '_')}:0"))
        if name not in generator.definitions:
            # Added before its kinds, because a solver that wraps a solver refers back to it.
            generator.definitions[name] = one_of = {}
            found = [registry.entry(cls.family, kind).spec for kind in registry.kinds(cls.family)]
            one_of["oneOf"] = [generator.generate_inner(spec.__pydantic_core_schema__) for spec in found]
        return {"allOf": [reference]}  # pydantic would inline a bare reference


class Component:
    """A part that is built from the fields of a spec."""

    @classmethod
    def from_spec(cls, spec: ComponentSpec) -> Self:
        """Build the component with the spec's fields as keywords; nested specs are built first."""
        values = {name: getattr(spec, name) for name in type(spec).model_fields if name != "kind"}
        return cls(**{n: registry.build(v) if isinstance(v, ComponentSpec) else v for n, v in values.items()})

    def __repr__(self) -> str:
        """Show the constructor's arguments that are attributes of the same name."""
        names = [name for name in signature(type(self).__init__).parameters if hasattr(self, name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def _over_default(default: Any, value: Any) -> Any:
    if not isinstance(default, Spec) or not isinstance(value, Mapping) or "kind" in value:
        return value
    fields = dict(default)
    return {**fields, **{key: _over_default(fields.get(key), entry) for key, entry in value.items()}}


def _member(base: type[ComponentSpec], value: Any) -> Any:
    """Return the family's spec for a value: a spec, or a mapping with `kind`."""
    family = base.family
    if isinstance(value, base):
        if registry.entry(family, value.kind).spec is not type(value):
            raise ValueError(
                f"{type(value).__qualname__} is not the class registered as {family} {value.kind!r}; "
                "register it under a kind of its own"
            )
        return value
    known = ", ".join(registry.kinds(family))
    if not isinstance(value, Mapping):
        shown = value if isinstance(value, str) and value in registry.kinds(family) else "…"
        raise ValueError(f"should be a mapping such as {{kind: {shown}}}. Known kinds: {known}")
    if not isinstance(value.get("kind"), str):
        raise ValueError(f"the {family} has no kind; add `kind:`. Known: {known}")
    try:
        entry = registry.entry(family, value["kind"])
    except registry.UnknownKindError as error:
        raise field_error(str(error), "kind", value=value["kind"]) from None
    return validate(entry.spec, value)


# ------------------------------------------------------------------------------------ options of components


def require_count(name: str, value: int) -> None:
    """Raise for anything but an integer of at least 1.

    Raises:
        ValueError: names the number and its value.

    """
    if not isinstance(value, Integral):
        raise ValueError(f"{name} is {value!r}; choose an integer of at least 1")
    if value < 1:
        raise ValueError(f"{name} is {value}; choose at least 1")


def require_share(name: str, value: float) -> None:
    """Raise for a number outside (0, 1], such as a damping.

    Raises:
        ValueError: names the number and its value.

    """
    if not 0 < value <= 1:
        raise ValueError(f"{name} is {value}; choose a number in (0, 1]")


def require_part(name: str, part: Any, base: type, *, such_as: str) -> None:
    """Raise for a part of the wrong type, such as its name or its spec; None stands for the default.

    Raises:
        ValueError: names the part, the value received, and an example.

    """
    if part is not None and not isinstance(part, base):
        raise ValueError(f"{name} is {part!r}; give a {base.__name__} such as {such_as}")
