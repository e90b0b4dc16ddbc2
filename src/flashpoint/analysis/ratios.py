"""The onset against the onset of the same seed in another experiment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashpoint.analysis.survival import grouped
from flashpoint.errors import UserError
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class OnsetRatio:
    """One run against the control of its seed."""

    ratio: float
    """How many times the control's onset the run's is, or its length, if it held."""
    exploded: bool


def onset_ratios(runs: Sequence[Run], controls: Sequence[Run]) -> dict[str, dict[int, OnsetRatio]]:
    """Return the ratios by seed, of each attention and setting.

    Raises:
        UserError: a control did not explode or failed at its first step, a run's seed has none, or two of a group, or
            two controls, have one seed.
    """
    onsets: dict[int, int] = {}
    for control in controls:
        if control.failed_at is None:
            raise UserError(f"{control.where}: {control.verdict}, no onset to compare with; leave it out")
        if (seed := control.config["seed"]) in onsets:
            raise UserError(f"{control.where}: a second control of seed {seed}; name one of each")
        if not control.failed_at:
            raise UserError(f"{control.where}: {control.verdict}, no time to compare with; leave it out")
        onsets[seed] = control.failed_at
    return {
        f"{label} {setting}".strip(): _by_seed(members, onsets) for (setting, label), members in grouped(runs).items()
    }


def _by_seed(runs: Sequence[Run], onsets: dict[int, int]) -> dict[int, OnsetRatio]:
    ratios: dict[int, OnsetRatio] = {}
    for run in runs:
        seed = run.config["seed"]
        if seed in ratios:
            raise UserError(f"{run.where}: a second run of seed {seed} in its row; leave one of them out")
        if seed not in onsets:
            raise UserError(f"{run.where}: no control of seed {seed}; add one, or leave the run out")
        steps = run.outcome["step"] if run.failed_at is None else run.failed_at
        ratios[seed] = OnsetRatio(steps / onsets[seed], run.failed_at is not None)
    return ratios
