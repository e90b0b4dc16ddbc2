"""``flashpoint runs``: how runs ended, and other questions to each run alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from flashpoint.cli.log_table import log_outcomes, without_logs
from flashpoint.cli.run_words import with_sweeps
from flashpoint.cli.selection import answered, format_option, named_runs, provenance
from flashpoint.cli.table import Cell, Table, code, number, share, share_interval, show, step
from flashpoint.early_warning import LEAST_LEAD, foretold, warning_of
from flashpoint.errors import UserError
from flashpoint.runs.metric_table import TOKENS_PER_SECOND, W_Q_NORM
from flashpoint.runs.recovery import lasting, recovery
from flashpoint.runs.run import Run

RUNS = "runs"
"""Where runs are made unless somebody says otherwise."""


def outcomes(runs: Sequence[Run]) -> Table:
    """Return how each run ended; runs that are under way, or were killed, have a row as well.

    Where a run turned NaN and knows why, a column has the reasons. Attention, seed and hardware have a column where the
    runs differ in them.
    """
    told: dict[str, Callable[[Run], object]] = {
        "attention": lambda run: code(run.title),
        "seed": lambda run: run.config.seed,
        "hardware": lambda run: run.manifest.hardware,
    }
    known = [run for run, _ in answered(runs, lambda run: (run.title, run.config, run.manifest))]
    differing = {name: total for name, total in told.items() if len({str(total(run)) for run in known}) > 1}

    names = _names(known)

    def row(run: Run) -> list[object]:
        where = [total(run) for total in differing.values()]
        if not run.ended:
            return [names[run.where], *where, run.verdict, _logged(run), None, None, None]
        outcome = run.outcome
        onset = step(outcome.onset_step, "none")
        return [
            names[run.where], *where, run.ending, outcome.step, onset, code(outcome.digest),
            outcome.nonfinite,
        ]  # fmt: skip

    columns = ["run", *differing, "outcome", "steps", "onset", "digest", "first NaN or infinity"]
    rows = [cells for _, cells in answered(known, row)]
    if not any(cells[-1] for cells in rows):
        columns, rows = columns[:-1], [cells[:-1] for cells in rows]
    return Table(columns, rows)


def _names(runs: Sequence[Run]) -> dict[str, Cell]:
    """Return what rows call each run, by where it is: its name, or that place if another has the name, too."""
    times = Counter(run.name for run in runs)
    return {run.where: code(run.name if times[run.name] == 1 else run.where) for run in runs}


def _logged(run: Run) -> int | None:
    """Return how many steps a run has logged; None without any, or where the metrics are missing or damaged."""
    try:
        return run.logged_steps or None
    except UserError:
        return None


def rates(runs: Sequence[Run]) -> Table:
    """Return the tokens per second: median and quartiles without the first fifth of the readings."""
    rate = TOKENS_PER_SECOND.unit
    columns = ["run", "attention", "model", rate, "quartiles", "readings", "hardware", "torch", "seed", "day"]
    rows, names = [], _names(runs)
    for run, found in answered(runs, throughput):
        model, manifest = run.config.model, run.manifest
        rows.append(
            [
                names[run.where],
                code(run.title),
                f"{model.n_layer} × {model.d_model}, T {model.context}" if model else None,
                number(found.median, ",.0f"),
                Cell({"low": found.low, "high": found.high}, f"{found.low:,.0f} to {found.high:,.0f}"),
                found.readings,
                manifest.hardware,
                manifest.environment.torch,
                run.config.seed,
                manifest.day,
            ]
        )
    return Table(columns, rows, "Median and quartiles of the readings, without their first fifth.")


def hottest(runs: Sequence[Run]) -> Table:
    """Return the spectral norm of W_Q at the end, of each head."""
    found = answered(runs, lambda run: run.measured_by_head(W_Q_NORM.name)[1][..., -1])
    count = max(len(norms) for _, norms in found)
    rows, names = [], _names(runs)
    for run, norms in found:
        layers = [
            Cell(
                {f"head {head}": float(norm) for head, norm in enumerate(heads, 1)},
                " ".join(f"{norm:.1f}" for norm in heads),
            )
            for heads in norms
        ]
        rows.append([names[run.where], run.verdict, *layers, *[None] * (count - len(layers))])
    columns = ["run", "verdict", *(f"layer {layer + 1}" for layer in range(count))]
    return Table(columns, rows, "Spectral norm of W_Q of each head at the end of the run.")


def recoveries(runs: Sequence[Run]) -> Table:
    """Return the validation losses before the onset and at the end, of the runs that exploded."""
    found, names = answered([run for run in runs if run.onset is not None], recovery), _names(runs)
    rows = [
        [
            names[run.where],
            run.onset,
            run.outcome.step,
            number(one.before, ".2f"),
            number(one.end, ".2f"),
            number(one.rise, "+.2f"),
            step(one.above_since, "none"),
            {True: "yes", False: "no", None: "short tail"}[lasting(run)],
        ]
        for run, one in found
    ]
    above = sum(one.above for _, one in found)
    note = f"{above} of {len(found)} ended above the loss before the onset by more than the detector's margin"
    if not found:
        note = "None of these runs has exploded."
    columns = (
        "run",
        "onset",
        "ended at",
        "loss before, nats",
        "loss at the end, nats",
        "difference",
        "above since",
        "lasting",
    )
    return Table(columns, rows, note)


def warnings(runs: Sequence[Run]) -> Table:
    """Return what the early warning says, and how many explosions it foretold."""
    found, names = answered(runs, warning_of), _names(runs)
    rows = [
        [
            names[run.where],
            run.verdict,
            step(warning.step if warning else None, "none"),
            f"L{warning.layer}H{warning.head}" if warning else None,
            number(warning.norm if warning else None, ".1f"),
            Cell(warning.growth, f"×{warning.growth:.2f}") if warning else None,
        ]
        for run, warning in found
    ]
    told = foretold(found)
    leads = told.leads
    several = f" to {max(leads):,} steps before (median {np.median(leads):,.0f})" if len(leads) > 1 else " steps before"
    lead = f", {min(leads):,}{several}" if leads else ""
    late = f", and {told.late} less than {LEAST_LEAD} steps before" if told.late else ""
    stable = [
        _of(total.warned, total.held, f"stable runs of attentions that exploded in {where} run")
        for total, where in ((told.at_risk, "another"), (told.others, "no"))
        if total.held
    ]
    alarms = f"; warned of {' and of '.join(stable)}" if stable else ""
    note = f"foretold {_of(len(leads), told.exploded, 'explosions')}{lead}{late}{alarms}"
    return Table(("run", "verdict", "warned at", "head", "W_Q norm", "growth"), rows, note)


def _of(count: int, total: int, what: str) -> str:
    told = f"{share(count, total).text} {what}"
    return f"{told} ({share_interval(count, total).text})" if total else told


def overhead(runs: Sequence[Run]) -> Table:
    """Return the mean time of a step of each run against the first run's."""
    base, *others = runs
    fastest, names = step_milliseconds(base), _names(runs)
    rows: list[list[object]] = [[names[base.where], number(fastest, ".3f"), None]]
    for run, milliseconds in answered(others, step_milliseconds):
        more = 100 * (milliseconds / fastest - 1)
        rows.append([names[run.where], number(milliseconds, ".3f"), Cell(more, f"{more:+.1f} %")])
    return Table(("run", "ms a step", "against the first run"), rows, "Means over the second half of each run's steps.")


def _all() -> list[str]:
    """Return words that name every run here.

    Raises:
        UserError: there is none.
    """
    if not Path(RUNS).is_dir():
        raise UserError(f"{RUNS}: no such folder here; flashpoint train makes it, or name a RUN elsewhere")
    return with_sweeps(RUNS)


def read(run: Run) -> object:
    """Read what every question needs."""
    return run.config, run.manifest, run.outcome if run.ended else None


@dataclass(frozen=True)
class Throughput:
    """Quartiles of a run's readings, tokens per second."""

    low: float
    median: float
    high: float
    readings: int
    """All of them; the first fifth, when code is compiled and caches fill, is not in the quartiles."""


def throughput(run: Run) -> Throughput:
    """Return a run's rates. Raises UserError if the run has no reading."""
    rates = _tokens_per_second(run)
    low, median, high = np.percentile(rates[int(len(rates) * 0.2) :], [25, 50, 75])
    return Throughput(float(low), float(median), float(high), len(rates))


def step_milliseconds(run: Run) -> float:
    """Return the mean time of a step over the second half of the run, without compilation and validation.

    A mean, not a median: what is done every 200 steps must show.

    Raises:
        UserError: the run has no reading.
    """
    rates = _tokens_per_second(run)
    tokens = run.batch_size * run.shape.context
    return float(1e3 * tokens * (1 / rates[int(len(rates) * 0.5) :]).mean())


def _tokens_per_second(run: Run) -> NDArray[np.float64]:
    """Return the readings of a run, [n]."""
    if TOKENS_PER_SECOND.name not in run.columns:
        why = "give a run of more steps" if run.folder else "it keeps none"
        raise UserError(f"{run.where}: no reading of {TOKENS_PER_SECOND.name}; {why}")
    return run.columns[TOKENS_PER_SECOND.name][1]


QUESTIONS: dict[str, Callable[[Sequence[Run]], Table]] = {
    "outcomes": outcomes,
    "rates": rates,
    "hottest": hottest,
    "recovery": recoveries,
    "warnings": warnings,
    "overhead": overhead,
}


@click.command("runs")
@click.argument("words", nargs=-1, metavar="[RUN...]")
@click.option(
    "--show",
    "question",
    type=click.Choice(list(QUESTIONS)),
    default="outcomes",
    show_default=True,
    help="The question.",
)
@format_option
def command(words: tuple[str, ...], question: str, form: str) -> None:
    """Print a row for each run; without RUN, for each in runs/ and in the sweeps there.

    \b
    outcomes  verdict, steps, onset and digest; of a log of another tool losses that are no numbers, jumps of the loss
              after a resume, and whether the gradient norm rose before the loss
    rates     tokens per second
    hottest   spectral norm of W_Q at the end, of each head
    recovery  validation loss before the onset and at the end, and the step of the first validation from which on all
              are above what was before by more than the detector's margin; of the runs that exploded. Lasting: still
              0.3 nats above it 5,000 steps after the onset, 1,000 from 50 M parameters on
    warnings  what the early warning said, how many explosions it foretold by 100 steps or more, and of which stable
              runs it warned: those of attentions that exploded in another of the runs, and the others
    overhead  mean time of a step, against the first run's
    """
    found = [run for run, _ in answered(named_runs(words or _all()), read)]
    runs, logs = without_logs(found) if question == "outcomes" else (found, [])
    tables = [QUESTIONS[question](runs)] if runs else []
    show([*tables, *([log_outcomes(logs)] if logs else [])], form, provenance(runs))
