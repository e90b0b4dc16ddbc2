"""A run's verdict."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A run's verdict: the last line on stdout and ``outcome.json``."""

    outcome: str
    step: int
    """Optimiser steps done."""
    onset_step: int | None
    nonfinite: str | None
    """Where the first NaN or infinity of a ``nonfinite`` run came from; None where nobody could look."""
    loss: float
    """Last training loss, nats."""
    val_loss: float | None
    """Last validation loss, nats."""
    val_step: int | None
    """Optimiser steps done when it was taken: fewer than ``step`` if the run was interrupted."""
    digest: str
    chain_digest: str
    weights_digest: str
    tape_digest: str
    tape_steps: int
    interrupted: str | None
    """Name of the signal that ended the run early."""
    seconds: float
    """Wall-clock time of the loop."""
    run: str

    def line(self) -> str:
        onset = "none" if self.onset_step is None else self.onset_step
        interrupted = f" interrupted={self.interrupted}" if self.interrupted else ""
        return (
            f"outcome={self.outcome} step={self.step} onset={onset} loss={self.loss:.4f} "
            f"digest={self.digest}{interrupted} run={self.run}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values; a loss that JSON has no number for is a string."""
        values = dataclasses.asdict(self)
        for name in ("loss", "val_loss"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = str(values[name])
        return values
