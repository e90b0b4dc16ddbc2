"""``flashpoint compare``: are two runs equal, and if not, where do they first differ?"""

from __future__ import annotations

import click

from flashpoint.analysis.provenance import place
from flashpoint.cli.cells import number
from flashpoint.cli.selection import format_option
from flashpoint.cli.table import Cell, Table, show
from flashpoint.errors import UserError
from flashpoint.runs.chain import Difference, first_difference, loss_differences, steps_of_both
from flashpoint.runs.run import Run
from flashpoint.runs.select import open_run


@click.command("compare")
@click.argument("run", metavar="RUN")
@click.argument("other", metavar="OTHER")
@format_option
def command(run: str, other: str, form: str) -> int:
    """Say whether two runs computed the same bits, or the first step that differs, and in what. Of a run of the
    evidence, which keeps the first hundred steps, each hundredth and the last, a later one is known within a hundred.

    The exit status is 0 if they are equal over the steps that both have, 1 if not, 2 on bad input.
    """
    compared = [open_run(word) for word in (run, other)]
    one, two = (run.whole_chain for run in compared)
    shared = steps_of_both(one, two)
    names = ("runs", "steps of both", "equal before", "first difference", "in", "values")
    columns = (*names, "largest difference of losses", "at step")
    if difference := first_difference(one, two):
        losses, values, equal = loss_differences(one, two), _values(difference), difference.after + 1
        where = f"at step {difference.step:,}"
        if equal < difference.step:
            where = f"after step {difference.after:,}, {where} or before"
        note = (
            f"first difference {where}: {difference.quantity} {values.text}; losses differ by up to "
            f"{losses.largest:.2g} nats (step {losses.largest_at:,}), by {losses.last:.2g} at step {losses.last_at:,}"
        )
        note += _places(*compared)
        found = [equal, difference.step, difference.quantity, values]
        row = ["different", shared, *found, number(losses.largest, ".2g"), losses.largest_at]
    else:
        shorter, longer = sorted((one.steps, two.steps))
        if shared < shorter:
            note = f"equal for {shared:,} steps; of later ones no digest is kept of both"
        elif shorter < longer:
            note = f"equal for the {shared:,} steps that both have; one has {longer:,}"
        else:
            note = f"equal: {shared:,} steps"
        row = ["equal", shared, *[None] * (len(columns) - 2)]
    if form == "markdown":
        click.echo(note)
    else:
        show(Table(columns, [row], note), form)
    return 1 if difference else 0


def _places(one: Run, other: Run) -> str:
    """Return where the runs were made, if not on the same hardware and version; nothing of runs that do not know."""
    try:
        here, there = place(one.manifest), place(other.manifest)
    except UserError:
        return ""
    return f"; one was made on {here}, the other on {there}" if here != there else ""


def _values(difference: Difference) -> Cell:
    form = {"state": "016x", "digest": "s"}.get(difference.quantity, "")
    one, other = (f"{value:{form}}" for value in difference.values)
    return Cell({"one": one, "other": other}, f"{one} against {other}")
