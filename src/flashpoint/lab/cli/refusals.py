"""What a person is told of an error that Hydra, OmegaConf or a library raised for what it was given.

Their message stands as it is, in one line. A remedy follows where the error's attributes tell what it is about.
"""

from __future__ import annotations

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from flashpoint.errors import UserError, nearest, one_line, pip_install, printable, remedy
from flashpoint.lab.build_config import key_types


def refusal(error: Exception) -> UserError:
    """Return what a person is told of an error that Hydra or a library raised for what it was given."""
    match error:
        case UserError():
            return error
        case RecursionError():
            told = "keys or defaults name each other in a circle, or are nested too deeply; break the circle"
        case OverrideParseException():
            told = _unreadable(error)
        case MissingConfigException():
            told = _missing(error)
        case HydraException() | OmegaConfBaseException():
            told = "; ".join(filter(None, (_message(error), _remedy(error))))
        case UserWarning() | yaml.YAMLError():
            told = one_line(error)
        case OSError() if error.filename and error.strerror:
            told = f"{error.filename}: {error.strerror}; {remedy(error)}"
        case _:
            told = f"{type(error).__name__}: {one_line(error)}; HYDRA_FULL_ERROR=1 shows where"
    return UserError(printable(told))


def no_such_key(key: str) -> str:
    """Return that there is no such key, and which may have been meant; not one that this one would be inside of."""
    meant = nearest(key, (name for name in key_types() if not key.startswith(f"{name}.")))
    return f"{key}: no such key; {meant}flashpoint train help=all lists them"


def _unreadable(error: OverrideParseException) -> str:
    override, message = error.override, one_line(error)
    key, equals, value = override.partition("=")
    if not equals:
        return f"{override}: neither a flag nor KEY=VALUE; give KEY=VALUE, as attn=flash_fixed"
    told = message if override in message else f"{override}: {message}"
    return f"{told}; quote special characters twice: '{key}=\"{value}\"'"


def _missing(error: MissingConfigException) -> str:
    if error.missing_cfg_file == "hydra/launcher/flashpoint_slurm":  # defined where submitit's launcher is installed
        return f"hydra/launcher=slurm: needs hydra-submitit-launcher; {pip_install('flashpoint[slurm]')}"
    if not (error.options and error.missing_cfg_file):
        return _first_line(error)
    group, _, name = error.missing_cfg_file.rpartition("/")
    told = _first_line(error).removeprefix("In 'train': ")
    if group and told == f"Could not find '{group}/{name}'":
        told = f"{group}={name}: no such option"
    choice = nearest(name, error.options) or f"choose one of {', '.join(error.options)}; "
    return f"{told}; {choice}one of your own is FOLDER/{error.missing_cfg_file}.yaml, with --config-dir FOLDER"


def _message(error: Exception) -> str:
    """Return the whole message; of an error with a cause the first line of each."""
    chain = _chain(error)
    return ": ".join(map(_first_line, chain)) if len(chain) > 1 else one_line(error)


def _remedy(error: Exception) -> str:
    """Return what to do about it; nothing of an error that is about no key."""
    keys = [one.full_key or "" for one in _chain(error) if isinstance(one, OmegaConfBaseException)]
    if not keys:
        return ""
    key = keys[-1].partition("[")[0]  # of an element of a list
    if key.startswith("hydra."):
        return "flashpoint train -c hydra lists the keys of Hydra"
    if key == "experiment":
        return "begin the file of an experiment with # @package _global_"
    if key in key_types():
        return _taken_by(key)
    return no_such_key(key) if key else "flashpoint train help=all tells what each key takes"


def _taken_by(key: str) -> str:
    """Return what a key takes, and how a list or one of a group's keys is written."""
    taken = f"{key} takes {key_types()[key]}"
    if key_types()[key].startswith("a list"):
        return f"{taken}, as {key}=[A,B]"
    inside = next((name for name in key_types() if name.startswith(f"{key}.")), None)
    return f"{taken}, as {inside}=VALUE" if inside else taken


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error and its causes, down to what OmegaConf says of the key."""
    found = list[BaseException]()
    while error is not None and error not in found:
        found.append(error)
        error = None if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    return found


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(" .:")
