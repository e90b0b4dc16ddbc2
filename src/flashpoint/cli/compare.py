"""``flashpoint compare``: are two runs equal, and if not, where do they first differ?"""

from __future__ import annotations

import click

from flashpoint.cli.run_words import open_run
from flashpoint.cli.selection import format_option
from flashpoint.cli.table import Cell, Table, number, show
from flashpoint.errors import UserError, answer
from flashpoint.runs.chain import Difference, first_difference, loss_differences, steps_of_both
from flashpoint.runs.comparison import compared
from flashpoint.runs.run import Run

_COLUMNS = (
    "runs", "steps of both", "equal before", "first difference", "in", "values", "largest difference of losses",
    "at step", "batches",
)  # fmt: skip


@click.command("compare")
@click.argument("run", metavar="RUN")
@click.argument("other", metavar="OTHER")
@format_option
def command(run: str, other: str, form: str) -> int:
    """Say whether two runs computed the same bits, or the first step that differs, and in what. Of a run of the
    evidence, which keeps the first hundred steps, each hundredth and the last, a later one is known within a hundred.

    Two watched runs are compared by the losses that their loops handed over, and by the batches where both handed them
    over. Steps of one number are compared: they count from 0, or from what the loop gave as first_step=.

    The exit status is 0 if they are equal over the steps that both have, 1 if not, 2 on bad input.
    """
    runs = [open_run(word) for word in (run, other)]
    note, row = _watched(*runs) if any(map(_is_watched, runs)) else _recorded(*runs)
    if form == "markdown":
        answer(note)
    else:
        show(Table(_COLUMNS, [row], note), form)
    return 0 if row[0] == "equal" else 1


def _is_watched(run: Run) -> bool:
    return run.watched if run.folder is None else run.folder.watched


def _recorded(*runs: Run) -> tuple[str, list[object]]:
    """Return what is said of two runs by their digest chains, in words and as a row."""
    one, two = (run.whole_chain for run in runs)
    shared = steps_of_both(one, two)
    if difference := first_difference(one, two):
        losses, values, equal = loss_differences(one, two), _values(difference), difference.after + 1
        where = f"at step {difference.step:,}"
        if equal < difference.step:
            where = f"after step {difference.after:,}, {where} or before"
        note = (
            f"first difference {where}: {difference.quantity} {values.text}; losses differ by up to "
            f"{losses.largest:.2g} nats (step {losses.largest_at:,}), by {losses.last:.2g} at step {losses.last_at:,}"
        )
        note += _places(*runs)
        found = [equal, difference.step, difference.quantity, values]
        return note, ["different", shared, *found, number(losses.largest, ".2g"), losses.largest_at, None]
    shorter, longer = sorted((one.steps, two.steps))
    if shared < shorter:
        note = f"equal for {shared:,} steps; of later ones no digest is kept of both"
    elif shorter < longer:
        note = f"equal for the {shared:,} steps that both have; one has {longer:,}"
    else:
        note = f"equal: {shared:,} steps"
    return note, ["equal", shared, *[None] * (len(_COLUMNS) - 2)]


def _watched(one: Run, other: Run) -> tuple[str, list[object]]:
    """Return what is said of two watched runs, in words and as a row."""
    found = compared(one, other)
    apart, differences = found.apart, list[tuple[int, object, object, str]]()
    batches = "no batches of both were handed over"
    if found.batch:
        differences.append((*found.batch, "batch"))
        batches = f"other batches from step {found.batch[0]:,} on"
    elif found.with_batch:
        batches = f"the same batches in {found.with_batch:,} steps"
    if found.loss:
        differences.append((*found.loss, "loss"))
        said = (
            f"losses differ from step {found.loss[0]:,} on, {found.loss[1]:.9g} against {found.loss[2]:.9g}, by up to "
            f"{apart.largest:.2g} nats (step {apart.largest_at:,}), by {apart.last:.2g} at step {apart.last_at:,}"
        )
    else:
        said = "equal losses"
    note = f"{found.steps:,} steps of both: {batches}; {said}"
    if max(found.lengths) > found.steps:
        note += f"; one has {found.lengths[0]:,}, the other {found.lengths[1]:,}"
    note += "".join(f"; {run.where} has not ended" for run in (one, other) if not run.ended)
    if not differences:
        return note, ["equal", found.steps, *[None] * (len(_COLUMNS) - 3), found.batches]
    step, here, there, what = min(differences, key=lambda difference: difference[0])
    values = Cell({"one": here, "other": there}, f"{here} against {there}")
    largest = [number(apart.largest, ".2g"), apart.largest_at] if found.loss else [None, None]
    return note + _places(one, other), ["different", found.steps, step, step, what, values, *largest, found.batches]


def _places(one: Run, other: Run) -> str:
    """Return where the runs were made, if not on the same hardware and version; nothing of runs that do not know."""
    try:
        here, there = one.manifest.place, other.manifest.place
    except UserError:
        return ""
    return f"; one was made on {here}, the other on {there}" if here != there else ""


def _values(difference: Difference) -> Cell:
    form = {"state": "016x", "digest": "s"}.get(difference.quantity, "")
    one, other = (f"{value:{form}}" for value in difference.values)
    return Cell({"one": one, "other": other}, f"{one} against {other}")
