"""``flashpoint series``: metrics over steps, and which leaves the stable twin first."""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np

from flashpoint.cli.log_table import tell_of_logs
from flashpoint.cli.run_words import open_run
from flashpoint.cli.selection import ended_runs, format_option, provenance
from flashpoint.cli.table import Cell, Table, code, number, share, show
from flashpoint.errors import UserError
from flashpoint.lab.analysis.departure import Departure, departure, twins
from flashpoint.lab.analysis.metric_series import Head, metric_series, together
from flashpoint.lab.cli.shared_options import refuse_given
from flashpoint.runs.run import Run


def over_steps(run: Run, names: Sequence[str], head: Head | None, every: int, since: int, until: int | None) -> Table:
    """Return a row for the last of each ``every`` steps that has all metrics, of the steps ``since`` to before
    ``until``.

    Raises:
        UserError: there is none, or the run has not measured a metric.
    """
    steps, values = together([metric_series(run, name, head) for name in names], every)
    rows = [
        [int(step), *(number(float(value), ".4g") for value in at_step)]
        for step, at_step in zip(steps, values.T, strict=True)
        if since <= step and (until is None or step < until)
    ]
    if not rows:
        between = (
            f"steps {steps[0]:,} to {steps[-1]:,} have all; give other --since and --until"
            if len(steps)
            else ("no step has all; give fewer names")
        )
        raise UserError(f"{run.where}: no such step of {', '.join(names)}: {between}")
    return Table(("step", *names), rows)


def departures(found: Sequence[Departure]) -> Table:
    """Return a row for each metric, the earliest first."""
    rows = []
    for one in sorted(found, key=lambda one: -np.median(one.leads) if one.leads else np.inf):
        cells: list[Cell | None] = [None, None]
        if one.leads:
            least, most = min(one.leads), max(one.leads)
            cells = [
                number(float(np.median(one.leads)), ",.0f"),
                Cell({"least": least, "most": most}, f"{least:,} to {most:,}"),
            ]
        rows.append([code(one.metric), share(len(one.leads), one.pairs), *cells])
    return Table(("metric", "left the twin's range", "steps before the onset, median", "least to most"), rows)


def _head(_context: click.Context, _option: click.Parameter, value: str | None) -> Head | None:
    if value is None:
        return None
    layer, _, head = value.partition("/")
    if not (layer.isdecimal() and head.isdecimal()):
        raise click.BadParameter(f"{value}: give LAYER/HEAD, e.g. 2/1")
    return int(layer), int(head)


@click.command("series")
@click.argument("words", nargs=-1, required=True, metavar="RUN NAME... | RUN...")
@click.option("--head", callback=_head, metavar="LAYER/HEAD", help="Of metrics of heads; from 1.")
@click.option("--every", type=click.IntRange(1), default=1, metavar="N", help="Of N steps the last has a row; 1: all.")
@click.option("--since", type=int, default=0, metavar="STEP", help="First step that has a row.  [default: 0]")
@click.option("--until", type=int, metavar="STEP", help="First step that has none any more.  [default: the end]")
@click.option("--departures", "metrics", multiple=True, metavar="NAME", help="A metric of heads; repeatable.")
@click.option(
    "--hottest-head",
    is_flag=True,
    help="With --departures: the head whose W_Q is highest at the onset, not the largest over heads.",
)
@format_option
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    head: Head | None,
    every: int,
    since: int,
    until: int | None,
    metrics: tuple[str, ...],
    hottest_head: bool,
    form: str,
) -> None:
    """Print metrics of a run side by side, a row for each step at which all were measured.

    NAME is a metric of the run (loss) or of heads (w_q_spectral_norm, with --head 2/1; or 2/1/w_q_spectral_norm); of a
    log any of its columns.

    --departures NAME: which metric leaves the stable twin first. RUN... are runs that exploded and, for each, a twin: a
    stable run of the same seed, data and experiment. A metric departs when its largest value over heads leaves, for
    good, the range that the twin had after the warm-up. A row for each metric, the earliest first: in how many pairs it
    departed, and how many steps before the onset.
    """
    if metrics:
        refuse_given(context, "--departures", {"head", "every", "since", "until"})
        runs = ended_runs(words, metrics=True)
        pairs = twins(runs)
        show(departures([departure(metric, pairs, hottest_head) for metric in metrics]), form, provenance(runs))
        return
    if hottest_head:
        raise click.UsageError("--hottest-head: needs --departures")
    word, *names = words
    if not names:
        raise click.UsageError("missing NAME: give RUN and the names of metrics")
    run = open_run(word)
    show(over_steps(run, names, head, every, since, until), form, provenance([run]))
    tell_of_logs([run])
