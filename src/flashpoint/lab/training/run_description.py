"""The part of a run folder that says how its run was made."""

from __future__ import annotations

import time

from torch import nn

from flashpoint.files import write_json
from flashpoint.lab.config import Config
from flashpoint.lab.data.tokens import TokenDataset
from flashpoint.lab.training.snapshots import Twin
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.manifest import Environment, Parent, Resumption


def describe_run(
    folder: RunFolder,
    config: Config,
    tokens: TokenDataset,
    model: nn.Module,
    initial_weights: str,
    environment: Environment,
    parent: Parent | None,
    twin: Twin | None,
) -> None:
    """Write the configuration and manifest of a run that begins."""
    write_json(folder.config, {**config.to_dict(), "resume": None, "trust": False})
    write_json(
        folder.manifest,
        {
            "started": _now(),
            "hardware": environment.hardware,
            "environment": environment.model_dump(mode="json"),
            "data": {"path": str(tokens.path), **tokens.description()},
            "initial_weights": initial_weights,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "parent": parent.model_dump() if parent else None,
            "twin": {"run": twin.name, "differs_in": twin.differs_in} if twin else None,
        },
    )


def note_resumption(folder: RunFolder, config: Config, step: int, processes: int, environment: Environment) -> None:
    """Record that a run goes on; remove its old verdict."""
    write_json(folder.config, {**config.to_dict(), "resume": None, "allow_world_size_change": False, "trust": False})
    folder.note_resumption(Resumption(time=_now(), step=step, processes=processes, environment=environment))
    folder.outcome.unlink(missing_ok=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
