"""``flashpoint loss``: what an attention costs in validation loss."""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np

from flashpoint.cli.selection import ended_runs, format_option, provenance, runs_argument
from flashpoint.cli.table import Table, code, number, show
from flashpoint.errors import tell
from flashpoint.lab.analysis.lifetimes import grouped, side_by_side
from flashpoint.lab.analysis.paired import Losses, last_common_step, losses_at, losses_beside
from flashpoint.lab.cli.interval_cells import interval, mean
from flashpoint.lab.cli.shared_options import (
    control_among,
    control_option,
    refuse_given,
    refuse_unknown_control,
    tell_of_texts,
)


def table(found: Sequence[Losses], after: int, control: str) -> Table:
    """Return a row for each attention; rows of other settings than the usual ones name them."""
    settings = any(losses.setting for losses in found)
    columns = ["attention", "runs", "exploded before", f"validation loss after {after:,} steps", "spread over seeds"]
    columns += ["pairs", f"minus {control}", "95 % interval"]
    rows = []
    for losses in sorted(found, key=lambda losses: losses.setting):
        pairs = len(losses.differences)
        rows.append(
            [
                *([losses.setting] if settings else []),
                code(losses.label),
                len(losses.losses),
                losses.exploded,
                number(float(np.mean(losses.losses)) if len(losses.losses) else None, ".4f"),
                number(losses.spread, ".4f"),
                pairs or None,
                *((mean(losses.differences, "+.4f"), interval(losses.differences, "+.4f")) if pairs else (None, None)),
            ]
        )
    return Table([*(["setting"] if settings else []), *columns], rows)


@click.command("loss")
@runs_argument
@click.option("--at", type=click.IntRange(1), metavar="STEPS", help="Default: the last that all stable runs have.")
@control_option("compare with")
@click.option("--paired", multiple=True, metavar="RUN", help="Runs to compare with, of any setting; repeatable.")
@format_option
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    at: int | None,
    control: str | None,
    paired: tuple[str, ...],
    form: str,
) -> None:
    """Compare validation losses after equal numbers of steps, a row for each attention.

    The difference is to the control's run of the same seed, data and experiment, with its 95 % interval over seeds
    (Student's t). A run that had exploded by then has no loss to compare: it is counted, and left out.

    --paired RUN: the difference is to the run of the same seed among RUN, whatever its settings.
    """
    runs = ended_runs(words, metrics=True)
    if paired:
        refuse_given(context, "--paired", {"control"})
        controls = ended_runs(paired, metrics=True)
        after = at or last_common_step([*runs, *controls])
        show(table(losses_beside(after, runs, controls), after, "its pair"), form, provenance([*runs, *controls]))
        return
    after, against = at or last_common_step(runs), control_among(control, runs)
    found = losses_at(after, runs, against)
    refuse_unknown_control(control and against, found)
    show(table(found, after, against), form, provenance(runs))
    tell_of_texts(side_by_side(grouped(runs)), "loss")
    if len(found) > 1 and not any(len(losses.differences) for losses in found):
        tell(_why_no_pairs(found, after, against))


def _why_no_pairs(found: Sequence[Losses], after: int, control: str) -> str:
    of_control = [losses for losses in found if control in (losses.label, losses.variant)]
    if of_control and not any(len(losses.losses) for losses in of_control):
        told = f"all runs of {control} had exploded before step {after:,}"
        return f"{told}; give an earlier step with --at, or choose another --control"
    told = f"no {control} of the same seed, data and experiment among these runs to compare with"
    return f"{told}; choose one with --control"
