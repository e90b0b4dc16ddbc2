"""``trainer_state.json`` of Transformers' ``Trainer``."""

from __future__ import annotations

import json
import math
from pathlib import Path

from flashpoint.errors import UserError
from flashpoint.logs.record import Record, number_of, step_of

_HISTORY = "log_history"
_LOSS, _GRAD_NORM = "loss", "grad_norm"


def is_trainer_state(head: bytes) -> bool:
    """Whether a file that begins so is one: a JSON object with a log of entries."""
    return head.lstrip().startswith(b"{") and f'"{_HISTORY}"'.encode() in head


def read_trainer_state(path: Path) -> Record:
    """Return the entries of the log, without the summary that stands at its end.

    The Trainer leaves losses that are NaN or infinite out of the mean that it logs, so that entries of them alone say 0
    (``logging_nan_inf_filter``). A loss of 0 beside a gradient norm that is no finite number is taken as NaN.

    Raises:
        UserError: the file is no such log.
    """
    try:
        entries = json.loads(path.read_bytes())[_HISTORY]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path}: no whole trainer_state.json ({error}); give that of an earlier checkpoint") from error
    rows, hidden = [], []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or (step := step_of(entry.get("step"))) is None or "train_runtime" in entry:
            continue
        numbers = {name: found for name, value in entry.items() if (found := number_of(value)) is not None}
        del numbers["step"]
        if numbers.get(_LOSS) == 0 and not math.isfinite(numbers.get(_GRAD_NORM, 0.0)):
            numbers[_LOSS] = math.nan
            hidden.append(step)
        rows.append((step, numbers))
    remarks = [
        f"the Trainer logged the losses of {len(hidden)} entries as 0, from step {hidden[0]:,} on, where the gradient "
        "norm is no finite number: they are taken as NaN (its logging_nan_inf_filter)"
    ] if hidden else []  # fmt: skip
    return Record("Transformers", rows, remarks)
