"""The typed configuration of where a run computes and whom it tells: nothing of it changes what is computed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from flashpoint.schema import CHECKED

WandbName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:]+$")]
"""What W&B takes as a name."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class TrackingConfig:
    """Weights & Biases. The local metrics file is always written."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    """``offline`` logs to the run's folder and ``online`` uploads, if there is a login; no mode ever prompts."""
    project: WandbName = "flashpoint"
    """W&B's project."""
    entity: WandbName | None = None
    """W&B's user or team; null is the login's."""
    group: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """W&B's group of the runs of one sweep; null takes the sweep's name."""
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    """The hardware is added."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class HardwareConfig:
    """Where a run is to compute. No part of the run: its manifest has what it ran on."""

    gpu: str | None = None
    """Words of the GPU's name, such as ``H200``; null takes any device."""
    gres: str | None = None
    """What ``hydra/launcher=slurm`` asks for, such as ``gpu:h200:1``; null is a GPU of any kind."""
    partition: str | None = None
    """SLURM's partition; null is ``hydra.launcher.partition``."""
    constraint: str | None = None
    """SLURM's constraint; null is ``hydra.launcher.constraint``."""


def sets_hardware(override: str) -> bool:
    """Whether an override of Hydra's is of :class:`HardwareConfig`, as ``hardware=h200`` and ``++hardware.gpu=null``
    are."""
    return override.lstrip("+~").startswith(("hardware=", "hardware."))
