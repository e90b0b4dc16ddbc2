"""What a person is told of an error that Hydra, OmegaConf or a library raised for what it was given."""

from __future__ import annotations

import re

import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from flashpoint.errors import UserError, nearest, one_line, printable
from flashpoint.lab.build_config import key_names

_WANTED = {  # by what OmegaConf says of a value that is none
    "could not be converted to Integer": "a whole number",
    "could not be converted to Float": "a number",
    "is not a valid bool": "true or false",
}


def refusal(error: Exception) -> UserError:
    """Return what a person is told of an error that Hydra or a library raised for what it was given."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, RecursionError):
        return UserError("keys or defaults name each other in a circle, or are nested too deeply; break the circle")
    text = printable(told) if (told := _with_remedy(error)) else one_line(error)
    if folder := re.search(r"path=(\S+) is not available", text):
        return UserError(f"hydra.searchpath: {folder[1]} is no folder; correct it")
    if of_file := _of_a_file(text):
        return UserError(of_file)
    if isinstance(error, HydraException | OmegaConfBaseException | UserWarning | yaml.YAMLError):
        return UserError(text)
    return UserError(f"{type(error).__name__}: {text}; HYDRA_FULL_ERROR=1 shows where")


def _of_a_file(text: str) -> str | None:
    """Return what is wrong with a key of a YAML file or of the command line; None of another error."""
    composing = r"In '(\S+)': \w+ raised while composing config: "
    if group := re.match(rf"{composing}.* \w+ is not a subclass of (\w+)\. value: (.*?) full_key: ", text):
        file, kind, value = group.groups()
        keys = "{mode: stochastic} or {mode: nearest, bits: 7}" if kind == "Rounding" else "a group of keys"
        return f"{file}: {value} stands where {keys} should; correct the file"
    if of_key := re.match(rf"(?:{composing})?(.*?) full_key: (?!\w+=)(\S*)", text):
        file, reason, key = of_key.groups()
        if file and key == "experiment":
            reason = "no such key; begin the file with # @package _global_"
        elif re.match(r"Key '\S+' not in ", reason):
            reason = f"no such key; {_nearest(key)}flashpoint train --help lists them"
        return ": ".join(filter(None, (file, key, reason)))
    if of_file := re.match(rf"{composing}(.*?) full_key: ", text):
        return f"{of_file[1]}: {of_file[2]}; correct the file"
    return None


def _nearest(key: str) -> str:
    """Return which key may have been meant; not the one that this one would be inside of."""
    return nearest(key, (name for name in key_names() if not key.startswith(f"{name}.")))


def _with_remedy(error: Exception) -> str | None:
    """Return what was wrong with an override and what to do about it; None of an error that is of no override."""
    text = str(error)
    if missing := re.search(
        r"Could not find '((?:hydra/)?[^/']+)/([^']*)'.*?Available options in '[^']+':\n(.*?)\n\S", text, re.S
    ):
        group, option, options = missing.groups()
        own = f"; a file of your own is FOLDER/{group}/{option}.yaml, with --config-dir FOLDER" if option else ""
        return f"{group}={option}: no such option; choose one of {', '.join(options.split())}{own}"
    if unknown := re.match(r"Could not override '([^']+)'", text):
        inside = getattr(error.__cause__, "full_key", None) or ""  # of a key in the braces of a value
        key = inside if inside.startswith(unknown[1]) else unknown[1]
        there = f"{_nearest(key)}flashpoint train --help lists them"
        if key.startswith("hydra.launcher."):
            there = "hydra/launcher=gpus has sweep and runs_per_gpu"
        return f"{key}: no such key; {there}"
    if merging := re.match(r"Error merging override (\S+)", text):
        reason = str(error.__cause__).splitlines()[0]
        if "is not a ListConfig" in reason:
            reason = "give a list, " + merging[1].replace("=", "=[", 1) + "]"
        elif "is not a subclass of Rounding" in reason:
            reason = "give " + merging[1].replace("=", ".mode=", 1)
        elif "is not a subclass of" in reason:
            reason = "a group of keys, each to be set by itself; flashpoint train --help lists them"
        elif "is not Optional" in reason:
            reason = "it cannot be null; give a value, or leave the key out for its default"
        elif wanted := next((told for kind, told in _WANTED.items() if kind in reason), None):
            reason = f"give {wanted}"
        return f"{merging[1]}: {reason}"
    if override := getattr(error, "override", None):  # Hydra could not parse it
        key, equals, value = override.partition("=")
        if not equals:
            return f"{override}: give KEY=VALUE"
        return f"{override}: no value that Hydra reads; quote one with special characters twice: '{key}=\"{value}\"'"
    return _swept(text)


def _swept(text: str) -> str | None:
    """Return what to do about several values where one is wanted; None of another error."""
    several = re.match(r"Ambiguous value for argument '(.+)'|Sweep parameters '(.+)' requires --multirun", text)
    if several is None:
        return None
    values = several[1] or several[2]
    return f"{values}: several values are a sweep, which needs -m: flashpoint train -m '{values}'"
