"""A YAML file that lists entries of one kind, each with an id."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from flashpoint.errors import UserError
from flashpoint.files import content

VERSION = 1
"""The version of the files that this module reads."""
T = TypeVar("T")
_MOST_MB = 4
"""Of such a file. The longest of the repository has 0.1."""


def read_listed(path: Path, key: str, kind: type[T], tags: Collection[str] = ()) -> list[T]:
    """Read and check a file of entries, and that no two have one ``id``.

    Args:
        key: what the file calls its list, e.g. ``claims``. Without its last letter it names one entry.
        kind: what each entry becomes.
        tags: values that tell kinds of a key apart, which pydantic puts into the places of errors.

    Raises:
        UserError: the file is missing or is no YAML of this version, or an entry is wrong. The message names the file,
            the entry, the key and what to do.
    """
    import yaml

    if not path.is_file():
        raise UserError(f"{path}: no such file; call flashpoint in a checkout, or name a file with --file")
    try:
        found = yaml.load(content(path, _MOST_MB), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a day that no calendar has
        raise UserError(f"{path}: no YAML: {' '.join(str(error).split())}; mend it there") from error
    if not isinstance(found, dict) or not isinstance(found.get(key), list):
        raise UserError(f"{path}: {key}: missing; give version: {VERSION} and a list of {key}")
    if found.get("version") != VERSION:
        raise UserError(f"{path}: version: {found.get('version')}; this flashpoint reads version {VERSION}")
    entries: dict[Any, T] = {}
    for place, values in enumerate(found[key], 1):
        nameless = f"{key.removesuffix('s')} {place}"
        if not isinstance(values, dict):
            raise UserError(f"{path}: {nameless}: no keys; give id and the others")
        try:
            entry = TypeAdapter(kind).validate_python(values)
        except ValidationError as error:
            raise UserError(f"{path}: {values.get('id', nameless)}: {_told(error, tags)}") from error
        if values["id"] in entries:
            raise UserError(f"{path}: {values['id']}: id: a second {key.removesuffix('s')} has it; give it another")
        entries[values["id"]] = entry
    return list(entries.values())


def _told(error: ValidationError, tags: Collection[str]) -> str:
    """Return the first thing that pydantic found wrong: the key, and what to give."""
    first = error.errors()[0]
    *places, last = [str(part) for part in first["loc"] if part not in tags] or [""]
    key = ".".join([*places, last])
    context = first.get("ctx", {})
    match first["type"]:
        case "value_error":  # of a relation between keys, which names one of them
            return f"{key}.{context['error']}".lstrip(".")
        case "missing":
            told = ": missing; add it"
        case "unexpected_keyword_argument":
            told = ": no such key; drop it"
        case "union_tag_not_found":
            told = f".kind: missing; give one of {', '.join(tags)}"
        case "union_tag_invalid":
            told = f".kind: {context['tag']}: no such kind; give one of {', '.join(tags)}"
        case "literal_error":
            expected = str(context["expected"]).replace("'", "").replace(" or ", ", ")
            told = f": {first['input']}; give one of {expected}"
        case "tuple_type" | "too_short":
            told = f": {first['input']}; give a list"
        case _:
            told = f": {first['input']}; {first['msg'][0].lower()}{first['msg'][1:]}"
    return f"{key}{told}"
