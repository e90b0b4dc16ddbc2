"""``trainer_state.json`` of Transformers' ``Trainer``."""

from __future__ import annotations

import json
from pathlib import Path

from flashpoint.errors import UserError
from flashpoint.logs.record import Record, number_of, step_of

_HISTORY = "log_history"


def is_trainer_state(head: bytes) -> bool:
    """Whether a file that begins so is one: a JSON object with a log of entries."""
    return head.lstrip().startswith(b"{") and f'"{_HISTORY}"'.encode() in head


def read_trainer_state(path: Path) -> Record:
    """Return the entries of the log, without the summary that stands at its end.

    Raises:
        UserError: the file is no such log.
    """
    try:
        entries = json.loads(path.read_bytes())[_HISTORY]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path}: no whole trainer_state.json ({error}); give that of an earlier checkpoint") from error
    rows = []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or (step := step_of(entry.get("step"))) is None or "train_runtime" in entry:
            continue
        numbers = {name: found for name, value in entry.items() if (found := number_of(value)) is not None}
        del numbers["step"]
        rows.append((step, numbers))
    return Record("Transformers", rows)
