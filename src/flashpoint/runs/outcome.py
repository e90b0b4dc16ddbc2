"""A run's verdict: what ``outcome.json`` holds."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from flashpoint.runs import migrations
from flashpoint.schema import RESTORE, Kind, Number, Step, kind_of, read_record, understood

Verdict = Literal["stable", "exploded", "nonfinite"]
Ending = Verdict | Literal["stopped"]
STRICT_PROBES = "probes.strict"
"""What ``interrupted`` says of a run that a failed probe stopped."""
NO_LOSS = "no loss was read"
"""What ``interrupted`` says of a watched loop without steps, or with losses that cannot be read: nobody judged it."""


def ending(verdict: Verdict, interrupted: str | None) -> Ending:
    """Return the word that readers are shown: a run that was ended early without an explosion is ``stopped``.

    ``stable`` alone would say that it held to its last step.
    """
    return "stopped" if verdict == "stable" and interrupted else verdict


@dataclass(frozen=True)
class Outcome:
    """A run's verdict: the last line on stdout and ``outcome.json``.

    :func:`flashpoint.runs.migrations.outcome` fills what an earlier version did not write.
    """

    outcome: Verdict
    """By the losses and gradient norms alone; people are shown :attr:`ending`."""
    step: Step
    """Optimiser steps done."""
    onset_step: Step | None
    nonfinite: str | None
    """Where the first NaN or infinity of a ``nonfinite`` run came from; None where nobody could look."""
    loss: Number
    """Last training loss, nats."""
    val_loss: Number | None
    """Last validation loss, nats."""
    val_step: Step | None
    """Optimiser steps done when it was taken: fewer than ``step`` if the run was interrupted."""
    digest: str
    chain_digest: str | None
    """None of a run that is older than digest chains."""
    weights_digest: str
    tape_digest: str
    tape_steps: Step
    interrupted: str | None
    """What ended the run early: the name of a signal, :data:`STRICT_PROBES`, or an error of a watched loop; or
    :data:`NO_LOSS`."""
    seconds: float
    """Wall-clock time of the loop."""
    run: str

    @property
    def ending(self) -> Ending:
        return ending(self.outcome, self.interrupted)

    @property
    def in_words(self) -> str:
        """``exploded at 1,344``, ``turned NaN or infinite at 389``, ``was stopped at 900``, ``held through 3,000``."""
        match self.ending:
            case "exploded":
                return f"exploded at {self.onset_step:,}"
            case "nonfinite":
                return f"turned NaN or infinite at {self.step if self.onset_step is None else self.onset_step:,}"
            case "stopped":
                return f"was stopped at {self.step:,}"
            case "stable":
                return f"held through {self.step:,}"

    def line(self) -> str:
        onset = "none" if self.onset_step is None else self.onset_step
        interrupted = f" interrupted={self.interrupted}" if self.interrupted else ""
        return (
            f"outcome={self.ending} step={self.step} onset={onset} loss={self.loss:.4f} "
            f"digest={self.digest}{interrupted} run={self.run}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values; a loss that JSON has no number for is a string."""
        values = dataclasses.asdict(self)
        for name in ("loss", "val_loss"):
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = str(values[name])
        return values


def _check(values: Any) -> Any:
    has_onset = values.onset_step is not None  # which may be step 0
    if (values.outcome == "exploded" and not has_onset) or (values.outcome == "stable" and has_onset):
        raise ValueError(f"onset_step: found {values.onset_step} beside outcome {values.outcome}")
    return values


_OUTCOME = kind_of(
    Outcome,
    required=[field.name for field in dataclasses.fields(Outcome)],
    validators={"check": model_validator(mode="after")(_check)},
)


def read_outcome(path: Path) -> Outcome:
    """Return what ``outcome.json`` says.

    Raises:
        UserError: the file is missing, or is no outcome.
    """
    return _of(read_record(path, _OUTCOME, migrations.outcome))


def outcome_of(text: bytes | str, where: str, remedy: str = RESTORE) -> Outcome:
    """Return what the text of an ``outcome.json`` says.

    Args:
        where: what messages begin with.

    Raises:
        UserError: it is no outcome.
    """
    return _of(understood(text, _OUTCOME, where, remedy, migrations.outcome))


Where = Literal["batch", "forward", "backward", "optimizer", "start"]


class NonfiniteOrigin(Kind):
    """Where NaN or infinity came from in a watched loop: a line of ``nonfinite.jsonl``."""

    step: Step
    where: Where
    """The pass in which it appeared. ``optimizer`` is what the loop does between a backward and a forward pass, and
    ``start`` what it did before the first step that was watched."""
    tensors: tuple[str, ...]
    """q, k, v, O, dO, dQ, dK, dV of one attention; or batch, loss, gradients, weights."""
    layer: Annotated[int, Field(ge=1)] | None
    """Of the attentions that are recorded, from 1; None where it was none of them, or nobody saw which."""
    call: Annotated[int, Field(ge=1)] | None
    """Of the attentions of the forward pass, recorded or not, from 1; None where nobody saw one."""
    heads: tuple[Annotated[int, Field(ge=1)], ...]
    """From 1; none where they are not known."""
    parameters: tuple[str, ...]
    """The first of those whose gradients, or that themselves, held it."""
    lasting: bool
    """Whether weights hold it from the next step on."""
    text: str


def _of(found: Kind) -> Outcome:
    return Outcome(**dict(found))
