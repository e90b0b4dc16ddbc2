"""Typed dataclasses as Hydra's structured configs, as a list of keys, and their errors as one line."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Union

from flashpoint.errors import UserError

if TYPE_CHECKING:
    from pydantic import ValidationError

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Sizes of FP32's normal numbers."""
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Any: "a value"}


def check_literals(instance: Any, where: str) -> None:
    """Raise ``ValueError`` naming ``where.field`` if a ``Literal`` field holds another value."""
    cls: Any = type(instance)
    for name, allowed in _literals(cls).items():
        value = getattr(instance, name)
        if value not in allowed:
            raise ValueError(f"{where}.{name}={value}: choose one of {', '.join(map(str, allowed))}")


@functools.cache
def _literals(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return the values of each ``Literal`` field; to evaluate annotations takes a millisecond."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    return {name: typing.get_args(hints[name]) for name in names if typing.get_origin(hints[name]) is Literal}


def structured_config(cls: type) -> type:
    """Return a dataclass with the fields of ``cls`` in types that OmegaConf knows, for Hydra's ConfigStore.

    OmegaConf checks numbers, strings and booleans; it has no ``Literal`` (plain ``str`` here, checked by
    :func:`check_literals`), and tuples are lists. Nested dataclasses become nested structured configs.
    """
    hints = typing.get_type_hints(cls)
    fields = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation):
            nested = structured_config(typing.cast(type, annotation))
            own = {} if field.default is dataclasses.MISSING else dataclasses.asdict(field.default)
            fields.append((field.name, nested, dataclasses.field(default_factory=functools.partial(nested, **own))))
        else:
            default: Any = field.default if field.default is not dataclasses.MISSING else "???"
            fields.append((field.name, _omegaconf_type(annotation), dataclasses.field(default=default)))
    return dataclasses.make_dataclass(cls.__name__, fields)


def _omegaconf_type(annotation: Any) -> Any:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return str
    if origin is tuple:
        return list[args[0]]  # type: ignore[valid-type]
    if origin in (Union, types.UnionType):
        members = [member for member in args if member is not type(None)]
        if any(dataclasses.is_dataclass(member) for member in members):
            return Any  # a variant's name in the YAML, a nested mapping once resolved
        return typing.Optional[_omegaconf_type(members[0])]  # noqa: UP045 - built at run time
    return annotation


def require_numbers_of_the_device(section: Any, where: str = "") -> None:
    """Refuse numbers that FP32 and 64-bit integers do not hold, here and in sections and tuples inside.

    Raises:
        ValueError: naming ``where`` and the field.
    """
    for field in dataclasses.fields(section):
        name, value = f"{where}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            require_numbers_of_the_device(value, f"{name}.")
        for number in _numbers_in(value):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                raise ValueError(f"{name}={number}: give an integer of 64 bits")
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{name}={number}: give a finite number")
            if isinstance(number, float) and number and not _SMALLEST <= abs(number) <= _LARGEST:
                raise ValueError(
                    f"{name}={number}: give 0, or {_SMALLEST:.3g} to {_LARGEST:.3g} in size, as FP32 holds"
                )


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, tuple):
        for part in value:
            yield from _numbers_in(part)
    elif isinstance(value, int | float):
        yield value


def require_text(values: Any, name: str = "") -> None:
    """Refuse strings that a file or a terminal does not take, as keys and as values at any depth.

    Raises:
        UserError: naming the key.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            require_text(str(key))
            require_text(value, f"{name}.{key}".lstrip("."))
    elif isinstance(values, list | tuple):
        for value in values:
            require_text(value, name)
    elif isinstance(values, str) and any(unicodedata.category(character) in ("Cc", "Cs") for character in values):
        raise UserError(f"{name or values}: holds a control character, or a byte that is no UTF-8; leave it out")


@dataclass(frozen=True)
class Key:
    """A key of the configuration."""

    name: str
    """Dotted, as on the command line."""
    type: str
    default: Any
    description: str
    marks: tuple[object, ...]
    """What its annotation has besides constraints."""


def keys_of(cls: type, prefix: str = "") -> Iterator[Key]:
    """Return the keys of a pydantic dataclass; a section is a key only if it has a mark."""
    hints, plain = typing.get_type_hints(cls, include_extras=True), typing.get_type_hints(cls)
    described: dict[str, Any] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    for field in dataclasses.fields(cls):
        marks = tuple(item for item in _metadata(hints[field.name]) if not type(item).__module__.startswith("pydantic"))
        section = field.default is dataclasses.MISSING
        if marks or not section:
            default = None if section else field.default
            text = " ".join((described[field.name].description or "").split())
            yield Key(f"{prefix}{field.name}", type_name(plain[field.name]), default, text, marks)


def in_one_line(error: ValidationError, cls: type, where: str) -> str:
    """Return the first thing that pydantic found wrong with a ``cls``: key, value, and what to give."""
    first = error.errors()[0]
    if first["type"] == "value_error":  # of a relation between fields, which names them
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    match first["type"]:
        case "unexpected_keyword_argument":
            return f"{where}{name}: no such key; flashpoint train help=all lists them"
        case "literal_error":
            wanted = f"choose one of {first['ctx']['expected']}".replace("'", "").replace(" or ", ", ")
        case "finite_number":
            wanted = "give a finite number"
        case "string_too_short":
            wanted = "empty; give a name"
        case "string_too_long":
            wanted = f"give at most {first['ctx']['max_length']} characters"
        case "string_pattern_mismatch":
            wanted = "give a name without any of / \\ # ? % :"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            wanted = f"give {_range(typing.get_type_hints(cls, include_extras=True)[name])}"
        case _:
            wanted = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}{name}={first['input']}: {wanted}"


def _range(hint: Any) -> str:
    """Return ``more than 0``, ``0 or more and less than 1``."""
    bounds = {(name := type(item).__name__): getattr(item, name.lower()) for item in constraints(hint)}
    told = {"Gt": "more than {:,}", "Ge": "{:,} or more", "Lt": "less than {:,}", "Le": "{:,} or less"}
    return " and ".join(text.format(bounds[kind]) for kind, text in told.items() if kind in bounds)


def constraints(hint: Any) -> list[Any]:
    """Return the constraints of a type, of types inside it, and of the members of a union."""
    return [limit for mark in _metadata(hint) for limit in getattr(mark, "metadata", ())]


def _metadata(hint: Any) -> tuple[object, ...]:
    """Return the metadata of an ``Annotated``, of types inside it, and of the members of a union."""
    own: tuple[object, ...] = getattr(hint, "__metadata__", ())
    inside = (hint.__origin__,) if own else typing.get_args(hint)
    return own + tuple(item for part in inside for item in _metadata(part))


def type_name(annotation: Any) -> str:
    """Return what an annotated field takes, in words, as ``a whole number or null`` or ``a list, each text``."""
    if typing.get_origin(annotation) is Literal:
        return f"one of {', '.join(typing.get_args(annotation))}"
    if members := [member for member in typing.get_args(annotation) if member not in (type(None), ...)]:
        names = " or ".join(map(type_name, members))
        return f"a list, each {names}" if typing.get_origin(annotation) is tuple else f"{names} or null"
    return _WORDS.get(annotation) or str(getattr(annotation, "__name__", annotation))
