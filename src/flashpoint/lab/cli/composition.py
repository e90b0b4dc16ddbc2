"""What ``flashpoint train`` hands to Hydra, checked: flags, overrides, and each YAML file when Hydra reads it.

Hydra and OmegaConf tell most of what is wrong with a key or a value. What they end in a traceback or a hang, take
without a word, or tell over several lines is refused here.
"""

from __future__ import annotations

import functools
import re
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra._internal.core_plugins import file_config_source
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode

from flashpoint.errors import UserError
from flashpoint.files import CONFIGS
from flashpoint.hardware import default_experiment
from flashpoint.lab.build_config import hydra_schema

GROUPS = tuple(sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "hydra"))
"""The groups of this project. Those below ``hydra/`` are Hydra's."""
_TAKE_A_VALUE = (
    "--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p", "--cfg", "-c", "--info",
    "-i", "--experimental-rerun",
)  # fmt: skip
"""Hydra's flags whose value may be an argument of its own."""
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.output_subdir")
"""Where Hydra writes, if it is told to."""
CONFIG = "train"
"""The configuration of a run, ``configs/train.yaml``."""
_PROVIDERS = {"hydra", "main", "schema"}
"""Of the files of Hydra and of this project, none of which sets ``hydra.mode``."""
_COMPOSED_MODE = Hydra.get_mode
"""Hydra's own way to the mode: it composes the whole configuration."""
_MOST_BYTES, _MOST_NODES = 1 << 18, 10_000
"""Of one YAML file, the latter once its aliases are written out. Every key of a run has some 200."""


def checked_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments for Hydra, with the preset for this hardware unless they name a preset or a run.

    argparse takes overrides in one run only, before or after the flags: the overrides go before them.

    Raises:
        UserError: an argument is none of Hydra's, or an override is none that a configuration can take.
        HydraException: an override cannot be parsed.
    """
    overrides: list[str] = []
    flags: list[str] = []
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in argument):
            raise UserError(f"{argument}: holds a control character, or a byte that is no UTF-8; leave it out")
        is_flag = argument.startswith("-") or before in _TAKE_A_VALUE
        (flags if is_flag else overrides).append(argument)
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign]  # it would print the usage, several lines
    if parser.parse_args([*overrides, *flags]).experimental_rerun:
        raise UserError("--experimental-rerun: a run is repeated by replay=RUN")
    parsed = OverridesParser.create().parse_overrides(overrides)
    for override in parsed:
        _check(override)
    given = {override.key_or_group: override.value() for override in parsed}
    if not given.keys() & {"experiment", "replay", "resume"}:
        overrides.insert(0, f"experiment={default_experiment(str(given.get('train.device', 'auto')))}")
    return overrides + flags


@functools.cache
def store_schema() -> None:
    """Give Hydra every key of a run with its type and default."""
    ConfigStore.instance().store(name="schema", node=hydra_schema())


def check_files_as_hydra_reads_them() -> None:
    """Have Hydra check each YAML file when it reads it, and end at what it would only warn of."""
    SourcesRegistry.instance().types["file"] = FileConfigSource  # one that is there Hydra does not replace
    warnings.filterwarnings("error", category=UserWarning, module=r"hydra\._internal\.(config_loader|defaults_list)")


def compose_once() -> None:
    """Have Hydra ask for a configuration's ``hydra.mode`` only where one can be: it composes all for the answer."""
    Hydra.get_mode = _mode  # type: ignore[assignment, method-assign]


def _mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> RunMode | None:
    providers = {source.provider for source in hydra.config_loader.get_search_path().get_path()}
    own_files = config_name == CONFIG and providers <= _PROVIDERS
    if own_files and not any(override.lstrip("+~").startswith("hydra") for override in overrides):
        return None
    mode: RunMode | None = _COMPOSED_MODE(hydra, config_name, overrides)
    return mode


def _refuse_flag(message: str) -> NoReturn:
    raise UserError(f"{message}; flashpoint train --help tells what it takes")


def _check(override: Override) -> None:
    """Refuse what Hydra ends in a traceback or takes without a word."""
    key = override.key_or_group
    if not key:
        raise UserError(f"{override.input_line}: no key; give KEY=VALUE")
    if override.is_delete():
        raise UserError(f"~{key}: nothing of the configuration can be left out; set it to another value")
    if key == "hydra.sweeper.max_batch_size":
        raise UserError(f"{key}: the launchers take all runs of a sweep at once; leave it out")
    if key in _FOLDERS and not override.is_sweep_override() and not str(override.value()).strip():
        raise UserError(f"{key}=: no folder; name one")
    if (key not in GROUPS and not key.startswith("hydra/")) or override.is_sweep_override():
        return
    value = override.value()
    if isinstance(value, dict) and "/" not in key:
        return  # keys of the group, not an option of it
    if not isinstance(value, str) or not re.fullmatch(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*|", value):
        raise UserError(f"{override.input_line}: give the name of one option{_options(key)}")


def _options(group: str) -> str:
    names = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    return f": {', '.join(names)}" if names else ""


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's own, which would build whatever a file of the user's holds. Of this name, or Hydra refuses it."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.exists() and CONFIGS not in path.parents:
            check_yaml(path)
        return super().load_config(config_path)


def check_yaml(path: Path) -> None:
    """Refuse a file that is no configuration, before anything is built of it.

    Raises:
        UserError: with the file, and the line where one is to blame.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
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
