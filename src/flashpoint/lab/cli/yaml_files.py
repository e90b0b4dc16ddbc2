"""YAML files of the user's own, checked before Hydra builds whatever they hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from hydra.core.override_parser.types import Override

from flashpoint.errors import UserError
from flashpoint.files import regular

_MOST_BYTES, _MOST_NODES = 1 << 18, 10_000
"""Of one YAML file, the latter once its aliases are written out. Every key of a run has some 200."""

_PACKAGE = re.compile(r"#\s*@package\s+\S*\bhydra\S*")
"""A line by which a file's keys are Hydra's own."""
_OF_HYDRA = "hydra/config"
"""Hydra's own settings, a file that it takes from a user's folder without being asked to."""
_PLACED = re.compile(r"@\S*\bhydra\b")
"""The same in a defaults list, of another file."""


def check_chosen(overrides: Sequence[Override], primary: str | None, folders: Sequence[str], *, trust: bool) -> None:
    """Refuse a chosen file that is no configuration, and one that its defaults list names.

    Args:
        primary: the name of the user's own primary configuration.
        folders: where the user's own files are.
        trust: whether a file may set Hydra itself, which can run code. One of Hydra's groups that an override chooses
            may.

    Raises:
        UserError: with the file, and the line where one is to blame.
    """
    names = [primary] if primary else []
    for override in overrides:
        value = "*" if override.is_sweep_override() else override.value()
        if isinstance(value, str):
            names.append(f"{override.key_or_group}/{value}")
    chosen = {name for name in names if name.startswith("hydra/")}
    for folder in folders:
        for name, path, root in _with_their_defaults(Path(folder), [*names, _OF_HYDRA]):
            if not trust and name not in chosen and (where := _sets_hydra(path, root, name)):
                raise UserError(
                    f"{path}: {where} sets Hydra itself, which can run code; read the file, then add trust=true"
                )


def _with_their_defaults(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, Path, Any]]:
    """Yield the files of these names, and of those in their defaults lists: name, path and checked root node."""
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop().strip("/").removesuffix(".yaml")
        if name in seen:
            continue
        seen.add(name)
        for path in _files(folder, name):
            root = check_yaml(path)
            yield name, path, root
            waiting += _named_defaults(root, PurePosixPath(name).parent)


def _files(folder: Path, name: str) -> list[Path]:
    """Return the file of a name, or with ``GROUP/*`` all of a group."""
    if name.endswith("/*"):
        return sorted((folder / name).parent.glob("*.yaml"))
    path = folder / f"{name}.yaml"
    return [path] if os.path.lexists(path) else []


def _named_defaults(root: Any, group: PurePosixPath) -> Iterator[str]:
    """Return the names in the defaults list of a file, seen from the folder of all groups.

    Args:
        group: of the file.
    """
    defaults = [value for key, value in _items(root) if key == "defaults"]
    for item in defaults[0].value if defaults and isinstance(defaults[0], yaml.SequenceNode) else ():
        for key, value in _items(item) or [("", item)]:
            folder = group / (key.split() or [""])[-1].split("@")[0]  # of "override /model@package"
            for option in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(option, yaml.ScalarNode):
                    yield str(folder / option.value.split("@")[0])


def _sets_hydra(path: Path, root: Any, name: str) -> str:
    """Return what in a file may be taken as settings of Hydra, whose launchers, sweepers and callbacks are code that
    they name; empty where there is none.

    Args:
        name: of the file, with its group.
    """
    if name.startswith("hydra/"):
        return "a file of its groups that no override chooses"
    if package := _PACKAGE.search(path.read_text(encoding="utf-8")):
        return package[0].strip("# ")
    for node in _nodes(root):
        for key, _ in _items(node):
            if key.split(".")[0] == "hydra" or _PLACED.search(key):
                return f"line {node.start_mark.line + 1}"
        if isinstance(node, yaml.ScalarNode) and _PLACED.search(node.value):
            return f"line {node.start_mark.line + 1}"
    unknown = [name for name in _named_defaults(root, PurePosixPath(name).parent) if "${" in name]
    return f"defaults: {unknown[0]}, which is not known yet, perhaps" if unknown else ""


def _nodes(root: Any) -> Iterator[Any]:
    """Yield a node and those inside, each once."""
    waiting, seen = [root], set[int]()
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in seen:
            seen.add(id(node))
            yield node
            inside = node.value if isinstance(node, yaml.MappingNode | yaml.SequenceNode) else ()
            waiting += [part for item in inside for part in (item if isinstance(item, tuple) else (item,))]


def _items(node: Any) -> list[tuple[str, Any]]:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return [(key.value, value) for key, value in pairs if isinstance(key, yaml.ScalarNode)]


def check_yaml(path: Path) -> Any:
    """Return the root node of a file, before anything is built of it; None of an empty one.

    Raises:
        UserError: it is no configuration; with the file, and the line where one is to blame.
    """
    try:
        if regular(path).stat().st_size > _MOST_BYTES:
            raise UserError(f"{path}: more than {_MOST_BYTES >> 10} KiB; no configuration is that long")
        text = path.read_bytes().decode("utf-8")
        documents = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no UTF-8 at byte {error.start:,}; convert the file") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; make it a readable file or remove it") from error
    except RecursionError as error:
        raise UserError(f"{path}: nested too deeply; no key of the configuration is") from error
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}: no YAML: {error.problem or error.context}{line}; correct the file") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}: no YAML: {' '.join(str(error).split())}; correct the file") from error
    if len(documents) > 1:
        raise UserError(f"{path}: {len(documents)} documents; put one into each file")
    for root in filter(None, documents):
        if not isinstance(root, yaml.MappingNode) and root.tag != "tag:yaml.org,2002:null":
            raise UserError(f"{path}: no keys with values, one a line, e.g. name: mine")
        _check_size(root, path)
    return documents[0] if documents else None


def _check_size(root: Any, path: Path) -> None:
    """Refuse a node that holds itself, and aliases that multiply."""
    sizes: dict[int, int] = {}
    under_way: set[int] = set()

    def size_of(node: Any) -> int:
        if id(node) in under_way:
            raise UserError(f"{path}: line {node.start_mark.line + 1} holds itself by an alias; write it out")
        if id(node) not in sizes:
            under_way.add(id(node))
            parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
            sizes[id(node)] = 1 + (sum(map(size_of, parts)) if not isinstance(node, yaml.ScalarNode) else 0)
            under_way.discard(id(node))
        return sizes[id(node)]

    if size_of(root) > _MOST_NODES:
        raise UserError(f"{path}: {sizes[id(root)]:,} values once its aliases are written out; give fewer")
