"""Logs of other tools as people are shown them: what they say of an explosion, and what they cannot say."""

from __future__ import annotations

from collections.abc import Sequence

from flashpoint.cli.table import Cell, Table, code, step
from flashpoint.errors import tell
from flashpoint.logs.judgement import Judgement
from flashpoint.logs.stored_log import judgement_of
from flashpoint.runs.metric_table import GRAD_NORM, LOSS
from flashpoint.runs.run import Run

LIMITS = (
    "A log does not tell which layer or head explodes, nor whether δ is biased: flashpoint.watch in the loop does, by "
    "a capture (docs/own_run.md)."
)


def without_logs(runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, Judgement]]]:
    """Return the runs that are more than a log, and the logs with what they show."""
    judged = [(run, judgement_of(run)) for run in runs]
    return [run for run, found in judged if found is None], [(run, found) for run, found in judged if found is not None]


def log_outcomes(logs: Sequence[tuple[Run, Judgement]]) -> Table:
    """Return a row for each log, and below it what is to be told of each."""
    columns = ("log", "format", "loss", "outcome", "onset", "not finite", "gradient norm rose", "resumed")
    rows = [
        [
            code(run.name), judged.log.format, code(judged.log.names[LOSS.name]), run.verdict,
            step(judged.onset, "none"), _not_finite(judged), _rose(judged), _resumed(judged),
        ]
        for run, judged in logs
    ]  # fmt: skip
    return Table(columns, rows, "\n\n".join([*(line for run, judged in logs for line in told(run, judged)), LIMITS]))


def told(run: Run, judged: Judgement) -> list[str]:
    """Return lines of a log: what was passed over in it, and how far its verdict goes."""
    log, lines = judged.log, list[str]()
    lines += log.remarks
    if log.repeated:
        lines.append(f"{log.repeated:,} losses stand again with another value at the same step: the last one counts")
    if any(one.step <= log.columns[LOSS.name][0][0] for one in log.resumes):
        lines.append("it begins anew at its first step: of several trainings in a log the last is judged, so part them")
    lines += [
        f"the loss rose from {jump.before:.3g} to {jump.after:.3g} where it went on at step {jump.resume.step:,}: look "
        "at optimiser state, schedule and order of the data first"
        for jump in judged.jumps
        if jump.jumped
    ]
    if judged.undecided:
        lines.append(f"it {judged.undecided}")
    elif judged.verdict == "stable" and judged.is_short:
        lines.append(
            f"{len(judged.losses[0]):,} losses are too few for an explosion to be seen, which takes "
            f"{judged.bounds.window + judged.bounds.hold_steps}"
        )
    return [f"{run.name}: {line}" for line in lines]


def tell_of_logs(runs: Sequence[Run]) -> None:
    """Tell on stderr, a line each, what is to be told of logs among the runs, and what they cannot say."""
    _, logs = without_logs(runs)
    for line in [*(line for run, judged in logs for line in told(run, judged)), *([LIMITS] if logs else [])]:
        tell(line)


def _not_finite(judged: Judgement) -> Cell:
    """Return how many losses, and gradient norms, are NaN or infinite, and of which steps."""
    parts, values = list[str](), dict[str, int]()
    for metric in (LOSS, GRAD_NORM):
        steps = judged.not_finite(metric.name)
        values[metric.name] = len(steps)
        if len(steps):
            total = len(judged.log.columns[metric.name][0])
            between = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
            parts.append(f"{metric.label} {len(steps):,} of {total:,}, {between}")
    return Cell(values, "; ".join(parts) or "none")


def _rose(judged: Judgement) -> Cell:
    """Return how many steps before the loss the gradient norm rose."""
    if GRAD_NORM.name not in judged.log.columns:
        return Cell({"step": None, "before": None}, "not logged")
    if judged.onset is None:
        return Cell({"step": None, "before": None}, "")
    if judged.norm_rose is None:
        return Cell({"step": None, "before": None}, "not before")
    before = judged.onset - judged.norm_rose
    return Cell({"step": judged.norm_rose, "before": before}, f"{judged.norm_rose:,}, {before:,} before")


def _resumed(judged: Judgement) -> Cell:
    """Return at which steps the training went on, and after which of them the loss jumped."""
    resumes = judged.log.resumes
    jumped = [jump.resume.step for jump in judged.jumps if jump.jumped]
    shown = ", ".join(f"{one.step:,}" for one in resumes[:3]) + (f", {len(resumes):,} times" if resumes[3:] else "")
    jumps = f"; jumped at {', '.join(f'{at:,}' for at in jumped)}" if jumped else ""
    return Cell({"times": len(resumes), "jumps": len(jumped)}, f"at {shown}{jumps}" if resumes else "")
