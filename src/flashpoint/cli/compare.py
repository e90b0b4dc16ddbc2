"""``flashpoint compare``: are two runs equal, and if not, where do they first differ?"""

from __future__ import annotations

import click

from flashpoint.analysis.provenance import place
from flashpoint.cli.cells import number
from flashpoint.cli.selection import format_option
from flashpoint.cli.table import Cell, Table, show
from flashpoint.errors import UserError
from flashpoint.runs.chain import Chain, Difference, first_difference, loss_differences
from flashpoint.runs.run import Run
from flashpoint.runs.select import open_run


@click.command("compare")
@click.argument("run", metavar="RUN")
@click.argument("other", metavar="OTHER")
@format_option
def command(run: str, other: str, form: str) -> int:
    """Say whether two runs computed the same bits, or the first step that differs, and in what.

    The exit status is 0 if they are equal over the steps that both have, 1 if not, 2 on bad input.
    """
    compared = [open_run(word) for word in (run, other)]
    one, two = map(_whole_chain, compared)
    shared = min(one.steps, two.steps)
    columns = ("runs", "steps of both", "first difference", "in", "values", "largest difference of losses", "at step")
    if difference := first_difference(one, two):
        largest, at, last = loss_differences(one, two)
        values = _values(difference)
        note = (
            f"first difference at step {difference.step:,}: {difference.quantity} {values.text}; losses differ by up "
            f"to {largest:.2g} nats (step {at:,}), by {last:.2g} at step {shared - 1:,}"
        )
        note += _places(*compared)
        row = ["different", shared, difference.step, difference.quantity, values, number(largest, ".2g"), at]
    else:
        note = f"equal: {shared:,} steps"
        if one.steps != two.steps:
            note = f"equal for the {shared:,} steps that both have; one has {max(one.steps, two.steps):,}"
        row = ["equal", shared, None, None, None, None, None]
    if form == "markdown":
        click.echo(note)
    else:
        show(Table(columns, [row], note), form)
    return 1 if difference else 0


def _whole_chain(run: Run) -> Chain:
    """Return the chain of a run; refuse that of one that has ended, if it lacks steps."""
    if run.ended and run.chain.steps < run.outcome["step"]:
        raise UserError(
            f"{run.where}: its chain ends at step {run.chain.steps:,}, the run at {run.outcome['step']:,}; restore "
            "chain.bin"
        )
    return run.chain


def _places(one: Run, other: Run) -> str:
    """Return where the runs were made, if not on the same hardware and version; nothing of runs that do not know."""
    try:
        here, there = place(one.manifest), place(other.manifest)
    except UserError:
        return ""
    return f"; one was made on {here}, the other on {there}" if here != there else ""


def _values(difference: Difference) -> Cell:
    one, other = (f"{value:016x}" if difference.quantity == "state" else f"{value!r}" for value in difference.values)
    return Cell({"one": one, "other": other}, f"{one} against {other}")
