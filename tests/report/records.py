"""Made-up records of runs, as small as the scripts that read them allow, and those scripts."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flashpoint.report.survival import OPTIMISATION, VERDICT
from tests import warm
from tests.conftest import REPOSITORY, environment

MANIFEST: Mapping[str, Any] = {
    "hardware": "a CPU",
    "environment": {"torch": "2.99"},
    "started": "2026-11-21T",
    "data": {},
}


def write_run(
    run: Path,
    attn: Mapping[str, Any],
    *,
    seed: int = 1,
    steps: int = 1000,
    onset: int | None = None,
    outcome: str = "",
    val_loss: float | None = None,
    train: Mapping[str, float] | None = None,
    detector: Mapping[str, float] | None = None,
    manifest: Mapping[str, Any] | None = None,
    metrics: Iterable[Mapping[str, Any]] = (),
) -> str:
    """The run's path. Settings of the training that ``train`` does not name are 0.5."""
    run.mkdir(parents=True)
    for name, value in {
        "config": {
            "attn": attn,
            "seed": seed,
            "model": {"n_layer": 2},
            "train": {**dict.fromkeys(OPTIMISATION, 0.5), "warmup_steps": 0, **(train or {})},
            "detector": {**dict.fromkeys(VERDICT, 1), **(detector or {})},
        },
        "manifest": {**MANIFEST, **(manifest or {})},
        "outcome": {
            "outcome": outcome or ("exploded" if onset else "stable"),
            "step": steps,
            "onset_step": onset,
            "val_loss": val_loss,
        },
    }.items():
        (run / f"{name}.json").write_text(json.dumps(value))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in metrics))
    return str(run)


def call(script: str, *arguments: Path | str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """``scripts/SCRIPT`` in a process of its own."""
    command = [sys.executable, str(REPOSITORY / "scripts" / script), *map(str, arguments)]
    return warm.run(command, cwd=cwd, env=environment(), timeout=120)


def refusal(result: "subprocess.CompletedProcess[str]") -> str:
    """The one line in which the script refused its input."""
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line
