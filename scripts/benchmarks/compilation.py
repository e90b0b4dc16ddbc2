"""Seconds from the start of a process to the first steps of a training, with nothing prepared and with warm caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.first_step import BESIDE
from benchmarks.shapes import TrainingShape, configured, overrides_of
from benchmarks.shown import Report, heading
from flashpoint.cli.table import Cell, Table
from flashpoint.errors import UserError

SHAPES = {"cuda": ["ignite"], "cpu": ["laptop"]}
ATTENTIONS = ["flash_bf16"]
PHASES = [
    "PyTorch",
    "other imports",
    "device",
    "model",
    "Dynamo",
    "AOTAutograd",
    "Inductor",
    "rest of the first pass",
    "first step",
    "steps to the graph",
]
CACHES = ("empty", "warm")


def measure(device: torch.device, shapes: Sequence[TrainingShape], attentions: Sequence[str], out: Path | None) -> None:
    """Print and write the table.

    Args:
        attentions: ``NAME[,KEY=VALUE…]`` each.
        out: folder for the files.

    Raises:
        UserError: a shape or attention is none, or does not train.
    """
    for shape in shapes:
        for attention in attentions:
            configured(shape, attention)  # before the first is measured
    what = "seconds from the start of a process, on random tokens, one process a row"
    report = Report("compile", heading(device, what), out)
    for shape in shapes:
        for attention in attentions:
            overrides = [*shape.overrides, *overrides_of(attention)]
            if device.type == "cpu":
                overrides.append("train.compile=true")  # which is a GPU's default
            try:
                found, failure = _cold_and_warm(device, overrides), ""
            except UserError as error:
                found, failure = {}, f"Not measured at {shape.name}: {attention} ({error})."
            report.add(phases_table(shape.name, attention, found, failure))


def phases_table(shape: str, attention: str, found: Mapping[str, Mapping[str, float]], failure: str) -> Table:
    """Return the table of one attention at one shape.

    Args:
        found: seconds by phase, by the state of the caches.
        failure: a line where it was not measured.
    """

    def shown(seconds: float) -> Cell:
        return Cell(round(seconds, 3), f"{seconds:.1f}")

    name = Cell(attention, f"`{attention}`")
    rows = []
    for caches, phases in found.items():
        seconds = [phases[phase] for phase in PHASES]
        rows.append([shape, name, caches, *map(shown, (*seconds, sum(seconds), phases[BESIDE]))])
    return Table(["shape", "attention", "caches", *PHASES, "sum", BESIDE], rows, failure)


def _cold_and_warm(device: torch.device, overrides: Sequence[str]) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        return {state: _first_step(device, overrides, caches) for state in CACHES}


def _first_step(device: torch.device, overrides: Sequence[str], caches: Mapping[str, str]) -> dict[str, float]:
    scripts = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (scripts, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "benchmarks.first_step", str(time.monotonic()), device.type, *overrides]
    result = subprocess.run(
        command, env={**os.environ, **caches, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode:
        raise UserError(f"status {result.returncode} of the training; what it said stands above")
    phases: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return phases
