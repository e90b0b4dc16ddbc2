"""Runtime checks of typed dataclasses, and their form as Hydra structured configs."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, Literal, Union


def check_literals(instance: Any, where: str) -> None:
    """Raise ``ValueError`` naming ``where.field`` if a ``Literal`` field holds another value."""
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        if typing.get_origin(hints[field.name]) is Literal:
            allowed = typing.get_args(hints[field.name])
            value = getattr(instance, field.name)
            if value not in allowed:
                raise ValueError(f"{where}.{field.name}={value}: choose one of {', '.join(map(str, allowed))}")


def structured_config(cls: type) -> type:
    """A dataclass with the fields of ``cls`` in types that OmegaConf knows, for Hydra's ConfigStore.

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
            fields.append((field.name, nested, dataclasses.field(default_factory=nested)))
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


def require_finite(section: Any, where: str = "") -> None:
    """Raise ValueError, naming ``where`` and the field, for the first infinity or NaN, here or in a section inside."""
    for field in dataclasses.fields(section):
        name, value = f"{where}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            require_finite(value, f"{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value}: give a finite number")


def require_positive(section: Any, where: str, names: tuple[str, ...]) -> None:
    """Raise ValueError, naming ``where``, for the first of the fields that is not above 0."""
    for name in names:
        if getattr(section, name) <= 0:
            raise ValueError(f"{where}.{name}={getattr(section, name)}: give more than 0")


def require_not_negative(section: Any, where: str, names: tuple[str, ...]) -> None:
    """Raise ValueError, naming ``where``, for the first of the fields that is below 0."""
    for name in names:
        if getattr(section, name) < 0:
            raise ValueError(f"{where}.{name}={getattr(section, name)}: give 0 or more")
