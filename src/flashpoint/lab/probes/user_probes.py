"""A probe of the user's own: loaded from a file, called and checked. What it does wrong costs it, and not the run."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pydantic_core import from_json
from torch import Tensor

from flashpoint import user_code
from flashpoint.early_warning import SentinelState
from flashpoint.errors import UserCodeError, UserError
from flashpoint.lab.probes.attention import Probe
from flashpoint.lab.probes.observation import Observation
from flashpoint.runs.metric_table import OF_THE_RUN, WEIGHT_NORMS
from flashpoint.schema import Kind

_TAKEN = OF_THE_RUN | {metric.name for metric in WEIGHT_NORMS} | {"step", "run"}
_LARGEST_STATE = 10_000_000  # characters; the header of a checkpoint, which holds it, may have ten times as many


def load(name: str) -> Probe:
    """Return a probe of the class that ``FILE.py:CLASS`` names.

    Raises:
        UserError: it is not there, fails, or is no probe.
    """
    where = f"probes.attention={name}"
    kind = user_code.load(name, where)
    with user_code.errors_in_one_line(name, where):
        probe = kind()
    if not isinstance(probe, Probe):
        raise UserError(f"{where}: no subclass of flashpoint.lab.probes.attention.Probe")
    if type(probe).measure is Probe.measure:
        raise UserError(f"{where}: no measure(self, seen); see flashpoint.lab.probes.attention.Probe")
    return probe


def measured(name: str, probe: Probe, seen: Observation, others: Collection[str]) -> dict[str, Tensor]:
    """Return what a probe measures by name, each [L, H] float64 on the device of the observation.

    Args:
        others: names that other probes have measured at this step.

    Raises:
        UserCodeError: the probe fails, or returns something else.
    """
    shape = seen.w_q.shape[:2]
    with user_code.errors_in_one_line(name):
        found = probe.measure(seen)
        if not isinstance(found, Mapping):
            raise _wrong(name, probe.measure, f"returns a {type(found).__name__}, expected tensors [L, H] by name")
        values = {}
        for metric, value in found.items():
            if not (isinstance(metric, str) and metric.isidentifier()) or metric in _TAKEN or metric in others:
                raise _wrong(
                    name, probe.measure, f"names a metric {metric!r}, expected a free name of letters, digits and _"
                )
            if not isinstance(value, Tensor) or value.shape != shape or value.is_complex():
                told = f"{list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise _wrong(
                    name, probe.measure, f"gives {metric} as {told}, expected a tensor {list(shape)} of numbers"
                )
            values[metric] = torch.empty(shape, dtype=torch.float64, device=seen.w_q.device).copy_(value)
    return values


class ProbesState(Kind):
    """What a resumed run needs of its probes to go on, beside tensors."""

    attention: dict[str, dict[str, Any]]
    """Plain values by the probe's name in the configuration."""
    sentinel: SentinelState | None
    """None of a process without probes."""


def state_of(name: str, probe: Probe) -> dict[str, Any]:
    """Return a copy of a probe's state that can be stored.

    Raises:
        UserCodeError: the probe fails, or its state holds other than plain values.
    """
    with user_code.errors_in_one_line(name):
        state = probe.state()
        if not isinstance(state, dict):
            raise _wrong(name, probe.state, f"returns a {type(state).__name__}, expected a dict of plain values")
        if wrong := _not_plain(state, ""):
            raise _wrong(name, probe.state, f"returns {wrong}; a state is stored as JSON")
        text = json.dumps(state)
        if len(text) > _LARGEST_STATE:
            raise _wrong(name, probe.state, f"has {len(text):,} characters, {_LARGEST_STATE:,} can be stored")
        copy: dict[str, Any] = from_json(text)
    return copy


def take_state(name: str, probe: Probe, state: dict[str, Any]) -> None:
    """Give a probe its state back. Raises UserCodeError if it fails."""
    with user_code.errors_in_one_line(name):
        probe.load_state(state)


def _not_plain(value: object, place: str) -> str | None:
    """Say what in a value JSON cannot hold; None where it can."""
    if isinstance(value, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            return f"a {type(wrong[0]).__name__} as a key{place and ' in '}{place.rstrip('.')}, expected text"
        return next(filter(None, (_not_plain(inside, f"{place}{key}.") for key, inside in value.items())), None)
    if isinstance(value, list | tuple):
        return next(filter(None, (_not_plain(one, f"{place}{at}.") for at, one in enumerate(value))), None)
    return None if isinstance(value, str | int | float | None) else f"a {type(value).__name__} as {place.rstrip('.')}"


def _wrong(name: str, function: Any, what: str) -> UserCodeError:
    return UserCodeError(f"{user_code.defined_at(function, name)}: {function.__name__} {what}")
