"""Hydra without what it computes again and again: three quarters of a composition's time.

The groups that an override chooses, in the files of the repository, compose the same each time. What is replaced is
private to Hydra; a version that calls it otherwise is slow, and composes the same.
"""

# ruff: noqa: TID251
import copy
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list

CONFIGS = str(Path(__file__).parent.parent / "configs")
grammar: Any = importlib.import_module("omegaconf.base")
_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_lists: dict[Any, DefaultsList] = {}
_composed: dict[int, Any] = {}


def work_once() -> None:
    """For all compositions of this process and of its forks."""
    for place, name, by in _REPLACED:
        setattr(place, name, by)


def _list_defaults_once(repo: Any, config_name: str, overrides_list: list[Any], **options: bool) -> DefaultsList:
    if {source.path for source in repo.get_sources()} - {CONFIGS, "hydra.conf", ""}:  # files of a user's, that change
        return create_defaults_list(repo, config_name, overrides_list, **options)
    given = Overrides(repo=repo, overrides_list=overrides_list)
    of_groups = [one.input_line for one in overrides_list if one not in given.config_overrides]
    key = config_name, *of_groups, *options.items()
    if key not in _lists:
        _lists[key] = create_defaults_list(repo, config_name, overrides_list, **options)
    found = _lists[key]
    return DefaultsList(found.defaults, found.defaults_tree, given.config_overrides, found.overrides)


def _compose_once(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    if not any(defaults is one.defaults for one in _lists.values()):
        return _compose(self, defaults, repo)
    if id(defaults) not in _composed:
        _composed[id(defaults)] = _compose(self, defaults, repo)
    return copy.deepcopy(_composed[id(defaults)])


_REPLACED: list[tuple[Any, str, Callable[..., Any]]] = [
    (config_loader_impl, "create_defaults_list", _list_defaults_once),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list", _compose_once),
    (ConfigRepository, "__deepcopy__", lambda self, _: copy.copy(self)),  # a file is copied as it is loaded
    (grammar, "parse", functools.cache(grammar.parse)),  # of interpolations
]
