"""JSON that is read from disk, as an object of the one declaration of what it holds, and types of its fields.

A kind is a subclass of :class:`Kind`, declared beside what it describes. Types are as written: ``"3"`` is no number.
Keys that a kind does not declare are passed over, so that a newer version may add some. A kind that cannot be
understood without all its keys forbids others. What an earlier version wrote a migration brings to today's keys first.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import from_json, to_json

from flashpoint.errors import UserError
from flashpoint.files import content, write_json
from flashpoint.typed import constraints

CHECKED = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False, extra="forbid")
"""How the sections are checked: a docstring describes each field, and no other key is taken."""
Count = Annotated[int, Field(gt=0)]
CountOrNone = Annotated[int, Field(ge=0)]
"""A count that may be 0, which means none."""
Share = Annotated[float, Field(ge=0, le=1)]
Folder = Annotated[str, Field(min_length=1)]

EXPERIMENT = "experiment"
"""Mark of a setting that makes an experiment: runs that differ in it, or in attention, data or seed, are not alike."""


@dataclass(frozen=True)
class FromTape:
    """Mark of a setting, or of a whole section, that a replay takes from its original."""

    reason: str


RESTORE = "restore the file, or choose another run"
"""What to do about a file of a run that is damaged."""
_LONGEST = 40  # characters of a value that a message shows
_BOUNDS = {"gt": "more than {:,}", "ge": "{:,} or more", "lt": "less than {:,}", "le": "{:,} or less"}


class Kind(BaseModel):
    """What a JSON object holds. Nobody changes one that has been read."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class ClosedKind(Kind):
    """A kind that refuses keys that it does not declare."""

    model_config = ConfigDict(extra="forbid")


K = TypeVar("K", bound=Kind)
Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the keys of today for an object that an earlier version wrote."""


def _number(value: object) -> object:
    if isinstance(value, str) and value not in NONFINITE:
        raise ValueError(f"found {_shown(value)}, expected a number, or {', '.join(sorted(NONFINITE))} as text")
    return float(value) if isinstance(value, str) else value


NONFINITE = frozenset(("nan", "inf", "-inf"))
"""How JSON holds what it has no numbers for."""
Number = Annotated[float, Field(allow_inf_nan=True), BeforeValidator(_number)]
"""A number, or the text of one that is not finite."""
Step = Annotated[int, Field(ge=0, lt=2**63)]
"""A step, or a count of steps."""


def kind_of(
    cls: type,
    required: Collection[str] = (),
    instead: Mapping[str, Any] | None = None,
    validators: Mapping[str, Any] | None = None,
    *,
    closed: bool = False,
) -> type[Kind]:
    """Return the kind of JSON that holds the fields of a dataclass.

    Args:
        required: fields that JSON of every version has; the others may be left out.
        instead: types of fields that JSON holds otherwise.
        validators: of pydantic, for relations between fields.
        closed: refuse other keys.
    """
    hints = typing.get_type_hints(cls, include_extras=True) | dict(instead or {})
    fields = {one.name: (_stored(hints[one.name]), ... if one.name in required else None)
              for one in dataclasses.fields(cls) if one.init}  # fmt: skip
    base = ClosedKind if closed else Kind
    return create_model(cls.__name__, __base__=base, __validators__=cast(Any, validators), **cast(Any, fields))


def _stored(annotation: Any) -> Any:
    """Return a field's type as JSON holds it: tuples are lists, and whole numbers those that arrays hold.

    What texts may say has become narrower with the versions; of a run's texts it is not asked.
    """
    members = [member for member in _members(annotation) if member is not type(None)]
    if typing.get_origin(members[0]) is tuple:
        stored = list[_stored(typing.get_args(members[0])[0])]  # type: ignore[valid-type,misc]
        return stored if len(members) == len(_members(annotation)) else stored | None
    if members == [str]:
        return str if len(_members(annotation)) == 1 else str | None
    if members == [int] and not any(hasattr(limit, "lt") or hasattr(limit, "le") for limit in constraints(annotation)):
        return Annotated[annotation, Field(lt=2**63)]
    return annotation


def read_record(path: Path, kind: type[K], migration: Migration | None = None, remedy: str = RESTORE) -> K:
    """Read what :func:`flashpoint.files.write_json` wrote.

    Raises:
        UserError: the file is missing, or holds something else. The message names the file, the key, what was found,
            what is expected and the remedy.
    """
    return understood(_text_of(path, remedy), kind, str(path), remedy, migration)


def _text_of(path: Path, remedy: str) -> bytes:
    try:
        return content(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from error


def append_to(path: Path, key: str, added: Kind, kind: type[Kind], migration: Migration) -> None:
    """Add to a list of a JSON file that holds an object of the kind. All else in the file stays as it is.

    Raises:
        UserError: the file is missing, or holds something else.
    """
    text = _text_of(path, RESTORE)
    understood(text, kind, str(path), RESTORE, migration)
    values = from_json(text)
    write_json(path, {**values, key: [*values.get(key, ()), added.model_dump(mode="json")]})


def understood(
    text: bytes | str, kind: type[K], where: str, remedy: str = RESTORE, migration: Migration | None = None
) -> K:
    """Return what a JSON object says as an object of the kind.

    Args:
        where: what messages begin with.
        migration: of what earlier versions wrote.

    Raises:
        UserError: it is not of that kind.
    """
    try:
        values = from_json(text)
    except ValueError as error:
        raise UserError(f"{where}: no JSON ({error}); {remedy}") from error
    if migration and isinstance(values, dict):
        text = to_json(migration(values))
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"{where}: {_told(error, kind)}; {remedy}") from error


def checked(values: dict[str, Any], kind: type[K], where: str, remedy: str = RESTORE) -> K:
    """Return plain values as an object of the kind.

    Raises:
        UserError: they are not of that kind.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {_told(error, kind)}; {remedy}") from error


def _told(error: ValidationError, kind: type[Kind]) -> str:
    """Return the first thing that is wrong: key, what was found and what is expected."""
    first = error.errors(include_url=False)[0]
    what, place, context = first["type"], first["loc"], first.get("ctx", {})
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    begin = f"{key}: " if key else ""
    match what:
        case "json_invalid":
            return f"no JSON ({context['error']})"
        case "value_error":
            error_text = str(context["error"])
            return error_text if key and error_text.startswith(key) else f"{begin}{error_text}"
        case "extra_forbidden":
            return f"{begin}no key of this version of flashpoint, maybe of a newer one"
    expected = next((text.format(context[name]) for name, text in _BOUNDS.items() if name in context), None)
    expected = expected or _expected(kind, place)
    if what == "missing":
        return f"{begin}missing, expected {expected}"
    return f"{begin}found {_shown(first['input'])}, expected {expected}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text if text.isprintable() else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _expected(kind: type[BaseModel], place: tuple[int | str, ...]) -> str:
    """Say what belongs at a place."""
    annotation: Any = kind
    for part in place:
        holder = next(member for member in _members(annotation) if member is not type(None))
        if isinstance(holder, type) and issubclass(holder, BaseModel):
            annotation = holder.model_fields[str(part)].annotation
        else:  # of a list the first, of a tuple the one at that place, of a dict the last
            inside = typing.get_args(holder)
            annotation = inside[part if isinstance(part, int) and part < len(inside) else -1]
    return " or ".join(_called(member) for member in _members(annotation))


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(member for inside in typing.get_args(annotation) for member in _members(inside))
    return (annotation,)


def _called(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(annotation)))}"
    names = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", type(None): "null"}
    return names.get(annotation) or ("a list" if typing.get_origin(annotation) in (list, tuple) else "an object")
