"""Made-up runs, as small as the verbs that read them allow, and those verbs."""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from flashpoint.analysis.survival import SETTINGS
from flashpoint.cli.main import main

MANIFEST: Mapping[str, Any] = {
    "hardware": "a CPU",
    "environment": {"torch": "2.99"},
    "started": "2026-11-21T",
    "data": {},
}


def settings(section: str, value: float) -> dict[str, float]:
    """Every setting of a section that makes an experiment, at this value."""
    return {key.partition(".")[2]: value for key in SETTINGS if key.startswith(f"{section}.")}


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
    config: Mapping[str, Any] | None = None,
    digest: str = "",
) -> str:
    """The run's path. Settings of the training that ``train`` does not name are 0.5; ``config`` replaces sections."""
    run.mkdir(parents=True)
    for name, value in {
        "config": {
            "attn": attn,
            "seed": seed,
            "model": {"n_layer": 2},
            "train": {**settings("train", 0.5), "warmup_steps": 0, **(train or {})},
            "detector": {**settings("detector", 1), **(detector or {})},
            **(config or {}),
        },
        "manifest": {**MANIFEST, **(manifest or {})},
        "outcome": {
            "outcome": outcome or ("exploded" if onset else "stable"),
            "step": steps,
            "onset_step": onset,
            "val_loss": val_loss,
            "digest": digest or f"digest of {run.name}",
        },
    }.items():
        (run / f"{name}.json").write_text(json.dumps(value))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in metrics))
    return str(run)


def call(verb: str, *arguments: Path | str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """``flashpoint VERB`` in this process."""
    with contextlib.chdir(cwd or Path.cwd()):
        result = CliRunner().invoke(main, [verb, *map(str, arguments)], prog_name="flashpoint")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess([verb], result.exit_code, result.stdout, result.stderr)


def rows(result: "subprocess.CompletedProcess[str]") -> list[str]:
    """Rows of the Markdown tables that the verb printed, without their headings, each with one space around a cell."""
    assert result.returncode == 0, result.stderr
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", result.stdout, re.MULTILINE):
        found += [" | ".join(cell.strip() for cell in row.split("|")).strip() for row in table.splitlines()[2:]]
    return found


def values(verb: str, *arguments: Path | str) -> list[dict[str, Any]]:
    """Rows of the first table as JSON has them."""
    result = call(verb, *arguments, "--format", "json")
    assert result.returncode == 0, result.stderr
    found: list[dict[str, Any]] = json.loads(result.stdout)["tables"][0]["rows"]
    return found


def refusal(result: "subprocess.CompletedProcess[str]") -> str:
    """The one line in which the verb refused its input."""
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line
