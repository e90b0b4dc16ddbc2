"""The part of a run folder that says how its run was made."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from flashpoint.files import write_json
from flashpoint.lab.config import Config
from flashpoint.lab.data.tokens import TokenDataset
from flashpoint.lab.training.snapshots import Twin
from flashpoint.runs.folder import RunFolder


def describe_run(
    folder: RunFolder,
    config: Config,
    tokens: TokenDataset,
    model: nn.Module,
    initial_weights: str,
    environment: dict[str, Any],
    parent: dict[str, Any] | None,
    twin: Twin | None,
) -> None:
    """Write the configuration and manifest of a run that begins."""
    write_json(folder.config, {**config.to_dict(), "resume": None})
    write_json(
        folder.manifest,
        {
            "started": _now(),
            "hardware": environment["hardware"],
            "environment": environment,
            "data": {"path": str(tokens.path), **tokens.sidecar},
            "initial_weights": initial_weights,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "parent": parent,
            "twin": {"run": twin.name, "differs_in": twin.differs_in} if twin else None,
        },
    )


def note_resumption(folder: RunFolder, config: Config, step: int, processes: int, environment: dict[str, Any]) -> None:
    """Record that a run goes on; remove its old verdict."""
    write_json(folder.config, {**config.to_dict(), "resume": None, "allow_world_size_change": False})
    manifest = folder.read_manifest()
    resumption = {"time": _now(), "step": step, "processes": processes, "environment": environment}
    write_json(folder.manifest, {**manifest, "resumed": [*manifest.get("resumed", []), resumption]})
    folder.outcome.unlink(missing_ok=True)


def note_probe_off(folder: RunFolder, probe: str, step: int, error: str) -> None:
    """Record that a probe of the user's own is off from this step on."""
    manifest = folder.read_manifest()
    off = {"probe": probe, "step": step, "error": error}
    write_json(folder.manifest, {**manifest, "probes_off": [*manifest.get("probes_off", []), off]})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
