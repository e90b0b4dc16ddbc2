"""The file of a W&B run on this disk, ``run-ID.wandb``, with the reader of the command ``wandb``."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from flashpoint.errors import UserError, pip_install
from flashpoint.logs.record import Record, number_of, own_step, step_of

PATTERN = "*.wandb"
"""Of the names of such files."""


def is_wandb_file(head: bytes) -> bool:
    """Whether a file that begins so is one."""
    return head.startswith(b":W&B")


def read_wandb_file(path: Path) -> Record:
    """Return what the run logged.

    Raises:
        UserError: W&B is not installed, is too old, or cannot read the file.
    """
    if find_spec("wandb") is None:
        raise UserError(f"{path}: needs wandb; {pip_install('flashpoint[logs]')}")
    read = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)], capture_output=True, check=False
    )
    said = read.stderr.decode(errors="replace").strip().splitlines()
    if read.returncode:
        why = said[-1] if said else "no reason given"
        raise UserError(f"{path}: wandb leet inspect cannot read it ({why}); wandb 0.31 can")
    records = [json.loads(line) for line in read.stdout.splitlines()]
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    own = own_step(items)
    rows = [(step, _numbers(item)) for item in items if (step := step_of(item.get(own or "_step"))) is not None]
    remarks = [f"its steps are those of {own}"] if own else []
    if any("corrupt" in line for line in said):
        remarks.append("a part of it is damaged, and passed over")
    if all(record["type"] != "exit" for record in records):
        remarks.append("it has no record of an end: its run goes on, was killed, or the file is cut short")
    return Record("W&B", rows, remarks)


def _numbers(item: dict[str, object]) -> dict[str, float]:
    """Return the numbers of an item, without W&B's own, whose names begin with a line."""
    named = ((name, number_of(value)) for name, value in item.items() if not name.startswith("_"))
    return {name: number for name, number in named if number is not None}
