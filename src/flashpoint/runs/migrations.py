"""Records that earlier versions wrote, brought to the shape that today's version reads.

This is the one place that knows keys of records by text, and that fills what an older record does not have. It takes
plain JSON before it is checked: what is damaged passes through, and the record that is made of it refuses it.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
"""A JSON object."""


def manifest(values: Json) -> Json:
    """Return ``manifest.json`` with every key of today.

    A run that nobody resumed, whose probes did not fail, or that no watch made, leaves the keys of these out. Runs of
    the first versions have no ``parent``, no ``twin`` and fewer versions in ``environment``.
    """
    values = {
        **dict.fromkeys(("parent", "twin")),
        **{"resumed": [], "probes_off": [], "watched": False, "first_step": 0, "not_recorded": []},
        **values,
    }
    _change(values, "environment", _environment)
    _change(values, "data", lambda data: {"path": None, "fingerprint": None, **data})
    if isinstance(resumed := values["resumed"], list):
        values["resumed"] = [_resumption(one) if isinstance(one, dict) else one for one in resumed]
    return values


def _environment(values: Json) -> Json:
    versions = (
        "flashpoint",
        "commit",
        "source",
        "python",
        "cuda",
        "triton",
        "tiles",
        "sdpa",
        "production",
        "numpy",
        "platform",
    )
    return {**dict.fromkeys((*versions, "hardware", "command")), **values}


def _resumption(values: Json) -> Json:
    values = dict(values)
    _change(values, "environment", _environment)
    return values


def outcome(values: Json) -> Json:
    """Return ``outcome.json`` with every key of today.

    The first versions have no digest chain, and did not say where a NaN came from. They validated at the end, unless
    they were interrupted.
    """
    at_end = None if values.get("interrupted") else values.get("step")
    return {"nonfinite": None, "val_step": at_end, "chain_digest": None, **values}


def _change(values: Json, key: str, migrate: Any) -> None:
    """Bring an object inside to the shape of today."""
    if isinstance(inside := values.get(key), dict):
        values[key] = migrate(inside)
