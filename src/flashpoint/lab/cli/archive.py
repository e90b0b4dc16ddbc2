"""``flashpoint archive``: add runs to the evidence tables, and take them out."""

from __future__ import annotations

from pathlib import Path

import click

from flashpoint.cli.run_words import select_runs
from flashpoint.cli.selection import tell_errors
from flashpoint.errors import UserError, answer
from flashpoint.lab.cli.shared_options import refuse_given
from flashpoint.lab.evidence.archiving import archive, remove
from flashpoint.lab.evidence.arrow import HEAD_DIGITS, RUN_DIGITS
from flashpoint.runs.folder import EVIDENCE, RunFolder
from flashpoint.runs.run import Run


def _unreadable(run: Run) -> UserError | None:
    try:
        _ = run.config, run.manifest, run.outcome, run.columns, run.chain
    except UserError as error:
        return error
    return None


def _is_run(word: str) -> bool:
    try:
        RunFolder.open(word)
    except UserError:
        return False
    return True


@click.command("archive")
@click.argument("words", nargs=-1, required=True, metavar="RUN... EXPERIMENT | --remove RUN...")
@click.option("--remove", "removes", is_flag=True, help="Take these runs out of the evidence; nothing else keeps them.")
@click.option(
    "--every", type=click.IntRange(1), default=10, show_default=True, help="Of per-step values keep one in N."
)
@click.option("--only", multiple=True, metavar="NAME", help="A metric to keep; repeatable. Default: all.")
@click.option("--spacing", type=click.IntRange(1), default=1, metavar="STEPS", help="Between values of other metrics.")
@click.option(
    "--digits",
    type=click.IntRange(1),
    default=HEAD_DIGITS,
    show_default=True,
    help=f"Significant digits of values by head; values of the run have {RUN_DIGITS} at least.",
)
@click.pass_context
def command(
    context: click.Context,
    words: tuple[str, ...],
    removes: bool,
    every: int,
    only: tuple[str, ...],
    spacing: int,
    digits: int,
) -> None:
    """Add runs that have ended to the evidence in runs/reference, as EXPERIMENT.

    Configuration, manifest and outcome are kept whole, of the digest chain the first hundred steps, each hundredth and
    the last. Of what is measured at each step, as the loss is, every N-th value stays; what is measured at intervals
    stays whole, or --spacing STEPS apart.
    """
    root = Path("runs") / EVIDENCE
    if removes:
        refuse_given(context, "--remove", ("every", "only", "spacing", "digits"))
        runs = select_runs(words)
        remove(runs, root)
        answer(f"{root}: {len(runs)} removed")
        return
    *named, experiment = words
    if not named:
        raise UserError(f"{experiment}: only one word; give one run or more, and then the name of the experiment")
    if _is_run(experiment):
        raise UserError(f"{experiment}: a run; behind the runs give the name of the experiment")
    runs = select_runs(named)
    damaged = [error for run in runs if (error := _unreadable(run))]
    if damaged:  # evidence takes all runs or none
        *others, last = damaged
        tell_errors(others)
        raise last
    archive(runs, experiment, root, every=every, only=only or None, spacing=spacing, digits=digits)
    answer(f"{root}: {len(runs)} added, '{experiment}:*' names the runs of {experiment}")
