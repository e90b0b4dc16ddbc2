"""What ``manifest.json`` holds: how a run was made."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from flashpoint.schema import Kind, Step


class _Environment(Kind):
    torch: str
    cuda: str | None = None
    triton: str | None = None
    tiles: dict[str, Any] | None = None
    sdpa: str | None = None


class _Data(Kind):
    fingerprint: str | None = None


class _Parent(Kind):
    run: str
    from_step: Step | None


class _Twin(Kind):
    run: str
    differs_in: str


class ProbeOff(Kind):
    """A probe that was switched off, since it failed."""

    probe: str
    """As the configuration names it."""
    step: Step
    """At which it failed."""
    error: str
    """What it raised or returned, and the line of the user's file."""


class Manifest(Kind):
    """The kind of ``manifest.json``. Runs of earlier versions lack what has a default here."""

    started: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT")]
    """UTC."""
    hardware: str
    environment: _Environment
    """Versions, and what computed."""
    data: _Data
    """The sidecar of the tokens, and their folder."""
    initial_weights: str
    """Their digest."""
    parameters: Annotated[int, Field(ge=0, lt=2**63)]
    """Of the model."""
    parent: _Parent | None = None
    """The run that this one replays or branches off."""
    twin: _Twin | None = None
    """The run that the weights were measured against."""
    resumed: list[dict[str, Any]] = Field(default_factory=list)
    """When, where and at which steps the run went on."""
    probes_off: list[ProbeOff] = Field(default_factory=list)
    """Probes of the user's own that failed."""
    watched: bool = False
    """Whether :func:`flashpoint.watch` recorded somebody's own training."""
    first_step: Step = 0
    """Of a watched loop the step that it made first. Of a branch ``parent`` tells it."""


def first_step_of(manifest: Mapping[str, Any]) -> int:
    """Return the step at which a run began: of a branch, or of a watched loop that says so; otherwise 0."""
    origin = origin_of(manifest)
    return origin[1] if origin else int(manifest.get("first_step", 0))


def origin_of(manifest: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the run that one replays, and the step of it at which this one began; None of one that replays none."""
    parent = manifest.get("parent")
    return (parent["run"], parent["from_step"] or 0) if parent else None


def command_line() -> list[str]:
    """Return the arguments of this process. Of the program only its name: where it lies, another machine has not."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
