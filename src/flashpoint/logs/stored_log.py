"""A log of another tool as a run that every reader takes, with all that it does not tell left unknown."""

from __future__ import annotations

import datetime
import glob
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flashpoint.errors import UserError
from flashpoint.logs.judgement import Judgement
from flashpoint.logs.log import log_files, logs_at, read_log
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.runs.configuration import WatchedConfig, WatchedCriterion, WatchedTraining
from flashpoint.runs.manifest import Environment, Manifest, Tokens
from flashpoint.runs.metric_table import VALIDATION_LOSS
from flashpoint.runs.metrics import Columns
from flashpoint.runs.outcome import Outcome
from flashpoint.runs.run import Run

if TYPE_CHECKING:
    from flashpoint.runs.chain import Chain

UNKNOWN = "unknown"


@dataclass(frozen=True)
class InLog:
    """A run of which there is a log alone.

    Args:
        path: a file, the folder of one log, or a run in a database.
        loss: the column that is the training loss; None where names are to tell.
    """

    path: Path
    loss: str | None

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def experiment(self) -> None:
        return None

    @property
    def where(self) -> str:
        return str(self.path)

    @property
    def folder(self) -> None:
        return None

    @property
    def ended(self) -> bool:
        """Always, for a log does not tell: its verdict is of what it has."""
        return True

    @cached_property
    def judged(self) -> Judgement:
        """What the log shows. Raises UserError: it cannot be read, or does not say which column is the loss."""
        return Judgement(read_log(self.path, self.loss))

    def config(self) -> WatchedConfig:
        judged = self.judged
        window, hold = judged.bounds.window * judged.spacing, judged.bounds.hold_steps * judged.spacing
        criterion = WatchedCriterion(window=window, hold_steps=hold, margin=math.nan)
        training = WatchedTraining(steps=None, warmup_steps=0)
        return WatchedConfig(AttentionVariant(name=f"{UNKNOWN} attention"), None, training, criterion)

    def manifest(self) -> Manifest:
        """The day is that of the file."""
        files = log_files(self.path)
        written = max((file.stat().st_mtime for file in files), default=0.0)
        nothing: dict[str, Any] = dict.fromkeys(Environment.model_fields)
        return Manifest(
            started=datetime.datetime.fromtimestamp(written, datetime.UTC).isoformat(timespec="seconds"),
            hardware=UNKNOWN,
            environment=Environment(**{**nothing, "torch": UNKNOWN}),
            data=Tokens(path=None, fingerprint=None),
            initial_weights=self.where,  # nobody's but its own
            parameters=0,
            parent=None,
            twin=None,
            resumed=(),
            probes_off=(),
            watched=True,
            first_step=int(self.judged.losses[0][0]),
            not_recorded=(),
        )

    def outcome(self) -> Outcome:
        steps, losses = self.judged.losses
        nothing = np.empty(0, np.int64), np.empty(0)
        at, validated = self.judged.log.columns.get(VALIDATION_LOSS.name, nothing)
        return Outcome(
            outcome=self.judged.verdict,
            step=int(steps[-1]),
            onset_step=self.judged.onset,
            nonfinite=None,
            loss=float(losses[-1]),
            val_loss=float(validated[-1]) if len(validated) else None,
            val_step=int(at[-1]) if len(at) else None,
            digest="",
            chain_digest=None,
            weights_digest="",
            tape_digest="",
            tape_steps=0,
            interrupted=None,
            seconds=math.nan,
            run=self.where,
        )

    def metrics(self) -> Columns:
        return self.judged.log.columns

    def chain(self) -> Chain:
        raise UserError(f"{self.where}: a log has no digest chain; give a run's folder")


def logged_runs(word: str) -> list[Run]:
    """Return the runs of the logs that a word names; none where it names no file and no folder with a log.

    A word is ``PATH``, or ``PATH:NAME`` with the column that is the loss; there PATH may be a pattern of the shell.
    """
    if logs := logs_at(Path(word)):
        return [Run(InLog(log, None)) for log in logs]
    for at in (at for at, letter in enumerate(word) if letter == ":"):
        path, loss = word[:at], word[at + 1 :]
        logs = logs_at(Path(path)) or [log for one in sorted(glob.glob(path)) for log in logs_at(Path(one))]
        if loss and logs:
            return [Run(InLog(log, loss)) for log in logs]
    if log_files(Path(word)):  # of a database that has no such run, as reading it tells
        return [Run(InLog(Path(word), None))]
    return []


def is_logged(run: Run) -> bool:
    """Whether there is a log alone of a run."""
    return isinstance(run.stored, InLog)


def judgement_of(run: Run) -> Judgement | None:
    """Return what the log of a run shows; None of a run that is more than a log."""
    return run.stored.judged if isinstance(run.stored, InLog) else None


def reread(run: Run) -> Run:
    """Return the run of a log as its files are now: each is read once."""
    assert isinstance(run.stored, InLog), run.where
    return Run(InLog(run.stored.path, run.stored.loss))


def written(run: Run) -> list[tuple[int, int]]:
    """Return size, bytes, and time of the last change, ns, of the files of a log; they change when it grows."""
    assert isinstance(run.stored, InLog), run.where
    return [(found.st_size, found.st_mtime_ns) for file in log_files(run.stored.path) for found in [file.stat()]]
