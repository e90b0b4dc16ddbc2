"""The arguments of ``flashpoint train``, checked before Hydra composes anything of them.

Most mistakes are names. They are found here in a list of all keys, without a composition, and the nearest name is told.
What is wrong with a value Hydra and OmegaConf say (:mod:`flashpoint.lab.cli.refusals`).
"""

from __future__ import annotations

import argparse
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from flashpoint.errors import UserError
from flashpoint.files import CONFIGS
from flashpoint.hardware import default_experiment
from flashpoint.lab.build_config import FREE_KEYS, key_types
from flashpoint.lab.cli.refusals import no_such_key
from flashpoint.lab.cli.unnamed import trusts
from flashpoint.lab.cli.yaml_files import check_chosen

GROUPS = tuple(sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "hydra"))
"""The groups of this project. Those below ``hydra/`` are Hydra's."""
_SWITCHES = (
    ("--help", "-h"), ("--hydra-help",), ("--version",), ("--resolve",), ("--run", "-r"), ("--multirun", "-m"),
    ("--shell-completion", "-sc"),
)  # fmt: skip
_WITH_A_VALUE = (("--package", "-p"), ("--config-name", "-cn"), ("--config-dir", "-cd"))
_INFORMATION = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.output_subdir")
"""Where Hydra writes, if it is told to."""
_OPTION = re.compile(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*")


@dataclass(frozen=True)
class Arguments:
    """The command line, in two parts."""

    flags: argparse.Namespace
    """Those that Hydra documents, but two: ``--experimental-rerun`` unpickles, where ``replay=RUN`` repeats a run, and
    ``--config-path`` would leave out every file of this project."""
    overrides: list[Override]

    def for_hydra(self) -> list[str]:
        """Return the arguments with the preset for this hardware, unless they name a preset or a run."""
        lines = [_as_text(override) for override in self.overrides]
        given = {override.key_or_group: override.value() for override in self.overrides}
        if not self.flags.hydra_help and not given.keys() & {"experiment", "replay", "resume"}:
            lines.insert(0, f"experiment={default_experiment(str(given.get('train.device', 'auto')))}")
        for name, value in vars(self.flags).items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                lines.append(flag)
            elif isinstance(value, str):
                lines.append(f"{flag}={value}")
        return lines

    @property
    def folders(self) -> list[str]:
        """The user's own folders of YAML files, and packages as ``pkg://NAME``."""
        given = [override.value() for override in self.overrides if override.key_or_group == "hydra.searchpath"]
        searched = [str(entry) for value in given if isinstance(value, list) for entry in value]
        named = [self.flags.config_dir] if self.flags.config_dir is not None else []
        return [*named, *(entry.removeprefix("file://") for entry in searched)]

    @property
    def sweeps(self) -> bool:
        """Whether a key has several values."""
        return any(override.is_sweep_override() for override in self.overrides)


def parsed(arguments: Sequence[str]) -> Arguments:
    """Return flags and overrides apart; they may be mixed.

    Raises:
        UserError: an argument holds what no argument can, or is no flag of Hydra's.
        OverrideParseException: an override cannot be read.
    """
    for argument in arguments:
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in argument):
            raise UserError(f"{argument}: holds a control character, or a byte that is no UTF-8; leave it out")
    flags = _flags().parse_intermixed_args(arguments)
    lines = vars(flags).pop("overrides")
    if flags.help and "all" in lines:  # --help all
        flags.help, lines = False, ["help=all" if line == "all" else line for line in lines]
    return Arguments(flags, OverridesParser.create().parse_overrides(lines))


def check(arguments: Arguments) -> None:
    """Refuse names that no run has, and what Hydra would end in a traceback or take without a word.

    Raises:
        UserError: with the nearest name, or the remedy.
    """
    own_folders = arguments.folders
    for folder in own_folders:
        if not folder.startswith("pkg://") and not Path(folder).is_dir():
            raise UserError(f"{folder}: no folder of YAML files; correct --config-dir or hydra.searchpath")
    for override in arguments.overrides:
        _check_form(override)
        if override.package is None:
            _check_names(override, own_groups=bool(own_folders))
    if arguments.sweeps and not arguments.flags.multirun and not own_folders and not _mode_is_given(arguments):
        line = next(str(override.input_line) for override in arguments.overrides if override.is_sweep_override())
        raise UserError(f"{line}: several values are a sweep, which needs -m: flashpoint train -m '{line}'")
    if any(override.key_or_group == "help" for override in arguments.overrides) and arguments.flags.multirun:
        raise UserError("help=all: tells the keys of one run; leave out -m")
    check_chosen(arguments.overrides, arguments.flags.config_name, own_folders, trust=trusts(arguments.overrides))


def quoted(value: object) -> str:
    """Quote a value so that Hydra takes it literally."""
    return "'" + str(value).replace("'", r"\'") + "'"


def _as_text(override: Override) -> str:
    """Return an override as it stands, but with quotes where a key of text has a number: 1e3 would be 1000.0."""
    key = override.key_or_group
    of_text = key_types().get(key, "").startswith("text") or key == "hydra.launcher.sweep"
    if of_text and isinstance(override.value(), int | float):
        return f"{override.get_key_element()}={quoted(override.get_value_string().strip())}"
    return str(override.input_line)


def _flags() -> argparse.ArgumentParser:
    """Return a parser of Hydra's flags whose errors are one line."""
    parser = _Parser(prog="flashpoint train", add_help=False)
    for names in _SWITCHES:
        parser.add_argument(*names, action="store_true")
    for names in _WITH_A_VALUE:
        parser.add_argument(*names)
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=_INFORMATION)
    parser.add_argument("overrides", nargs="*")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; flashpoint train --help tells what it takes")


def _check_form(override: Override) -> None:
    key, line = override.key_or_group, override.input_line
    if not key:
        raise UserError(f"{line}: no key; give KEY=VALUE")
    if override.is_delete():
        raise UserError(f"~{key}: nothing of the configuration can be left out; set it to another value")
    if override.is_sweep_override():
        _check_swept_options(override)
        return
    value = override.value()
    if key in _FOLDERS and not str(value).strip():
        raise UserError(f"{key}=: no folder; name one")
    if key == "help" and value != "all":
        raise UserError(f"{line}: help=all tells every key, flashpoint train --help how to begin")
    if key not in GROUPS and not key.startswith("hydra/"):
        return
    if isinstance(value, dict) and "/" not in key:
        return  # keys of the group, not an option of it
    if not isinstance(value, str) or not _OPTION.fullmatch(value):
        raise UserError(f"{line}: give the name of one option{_options_of(key)}")


def _check_swept_options(override: Override) -> None:
    """Refuse numbers where a group's options are swept."""
    swept, key = override.value(), override.key_or_group
    numbers = isinstance(swept, RangeSweep | IntervalSweep) or (
        isinstance(swept, ChoiceSweep) and any(isinstance(value, int | float) for value in swept.list)
    )
    if numbers and key in GROUPS:
        raise UserError(f"{override.input_line}: give names of options{_options_of(key)}")


def _options_of(group: str) -> str:
    """Return a colon and the names of the options of a group; nothing of one that this package does not have."""
    options = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    return f": {', '.join(options)}" if options else ""


def _check_names(override: Override, *, own_groups: bool) -> None:
    """Refuse a key that no run has.

    Args:
        own_groups: whether there may be groups that only Hydra finds.
    """
    key = override.key_or_group
    if key == "hydra" or override.is_hydra_override() or (own_groups and "." not in key):
        return
    for name in _names_in(key, override.value()):
        if name not in key_types():
            raise UserError(no_such_key(name))


def _names_in(key: str, value: Any) -> Iterator[str]:
    yield key
    if isinstance(value, dict) and key not in FREE_KEYS:
        for name, inside in value.items():
            yield from _names_in(f"{key}.{name}", inside)


def _mode_is_given(arguments: Arguments) -> bool:
    return arguments.flags.config_name is not None or any(
        override.key_or_group == "hydra.mode" for override in arguments.overrides
    )
