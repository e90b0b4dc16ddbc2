"""Made-up runs, as small as the verbs that read them allow, and those verbs."""

import contextlib
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from flashpoint.cli.main import main
from flashpoint.lab.config import Config

MANIFEST: Mapping[str, Any] = {
    "hardware": "a CPU",
    "environment": {"torch": "2.99"},
    "started": "2026-11-21T",
    "data": {},
    "initial_weights": "w",
    "parameters": 1000,
}
_SETTINGS = {
    "model": {"n_layer": 2},
    "train": {"lr": 0.5, "warmup_steps": 0, "decay_steps": 1000, "micro_batch_size": 4, "threads": 1},
    "detector": {"window": 1, "margin": 1.0, "hold_steps": 1},
}
"""In which made-up runs are not as the defaults."""


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
    """The run's path. ``train``, ``detector`` and the sections of ``config`` add to the settings, with which the
    learning rate is 0.5."""
    run.mkdir(parents=True)
    values = {**Config().to_dict(), "attn": attn, "seed": seed}
    for added in (_SETTINGS, {"train": train or {}, "detector": detector or {}}, config or {}):
        values |= {name: {**values[name], **section} for name, section in added.items()}
    for name, value in {
        "config": values,
        "manifest": {**MANIFEST, **(manifest or {})},
        "outcome": {
            "outcome": outcome or ("exploded" if onset else "stable"),
            "step": steps,
            "onset_step": onset,
            "nonfinite": None,
            "loss": 2.5,
            "val_loss": val_loss,
            "val_step": steps,
            "digest": digest or f"digest of {run.name}",
            "chain_digest": "c",
            "weights_digest": "w",
            "tape_digest": "t",
            "tape_steps": steps,
            "interrupted": None,
            "seconds": 1.0,
            "run": str(run),
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
