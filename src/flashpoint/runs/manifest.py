"""What ``manifest.json`` holds: how a run was made."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from flashpoint.schema import Kind, Step


class Production(Kind):
    """A production attention as it ran."""

    kernel: str
    """Its name in ``attn.kernel``."""
    package: str
    version: str
    deterministic: bool
    """Whether its backward pass gives the same bits again: without it a replay is not bit for bit."""
    cudnn: int | None
    """Version of cuDNN, as PyTorch has it."""


class Environment(Kind):
    """Versions, hardware, and what computed the attention. None is what does not apply, or what nobody wrote down."""

    flashpoint: str | None
    commit: str | None
    """Git's, with ``+changes`` where files differed from it."""
    source: str | None
    """Digest of the package's Python files."""
    python: str | None
    torch: str
    cuda: str | None
    triton: str | None
    tiles: dict[str, dict[str, int | None]] | None
    """Tile sizes of each Triton kernel."""
    sdpa: str | None
    """What PyTorch's attention called."""
    production: Production | None
    """What another library's attention was."""
    numpy: str | None
    platform: str | None
    hardware: str | None
    command: tuple[str, ...] | None
    """Arguments of the process."""


class Tokens(Kind):
    """The prepared tokens; of somebody's own loop they are not known."""

    path: str | None
    """Their folder."""
    fingerprint: str | None


class Parent(Kind):
    """The run that one replays or branches off."""

    run: str
    from_step: Step | None


class Twin(Kind):
    """The run that the weights were measured against."""

    run: str
    differs_in: str


class Resumption(Kind):
    """When and where a run went on."""

    time: str
    """UTC."""
    step: Step
    processes: Annotated[int, Field(gt=0)]
    environment: Environment


class ProbeOff(Kind):
    """A probe that was switched off, since it failed."""

    probe: str
    """As the configuration names it."""
    step: Step
    """At which it failed."""
    error: str
    """What it raised or returned, and the line of the user's file."""


class Origin(NamedTuple):
    """The run that another one replays, and the step of it at which that one began."""

    run: str
    step: int


class Manifest(Kind):
    """How a run was made. :func:`flashpoint.runs.migrations.manifest` fills what an earlier version did not write."""

    started: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT")]
    """UTC."""
    hardware: str
    environment: Environment
    data: Tokens
    initial_weights: str
    """Their digest."""
    parameters: Annotated[int, Field(ge=0, lt=2**63)]
    """Of the model."""
    parent: Parent | None
    twin: Twin | None
    resumed: tuple[Resumption, ...]
    probes_off: tuple[ProbeOff, ...]
    watched: bool
    """Whether :func:`flashpoint.watch` recorded somebody's own training."""
    first_step: Step
    """Of a watched loop the step that it made first; :attr:`began_at` is that of any run."""
    not_recorded: tuple[str, ...]
    """Why a watch left attentions out, each reason once."""

    @property
    def origin(self) -> Origin | None:
        """The run that this one replays, and the step of it at which this one began; None where it replays none."""
        return Origin(self.parent.run, self.parent.from_step or 0) if self.parent else None

    @property
    def began_at(self) -> int:
        """The step at which the run began: of a branch, or of a watched loop that says so; otherwise 0."""
        return self.origin.step if self.origin else self.first_step

    @property
    def day(self) -> str:
        """The day on which the run began, as ``2026-11-21``."""
        return self.started[:10]

    @property
    def place(self) -> str:
        """The hardware and PyTorch's version."""
        return f"{self.hardware}, torch {self.environment.torch}"


def command_line() -> list[str]:
    """Return the arguments of this process. Of the program only its name: where it lies, another machine has not."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
