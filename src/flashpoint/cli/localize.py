"""``flashpoint localize``: which layers, heads and choices of the attention made a run explode."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from flashpoint.cli.selection import format_option
from flashpoint.cli.table import Table, show


@click.command("localize")
@click.argument("word", metavar="RUN")
@click.option("--steps", type=click.IntRange(10), default=300, show_default=True, help="Of a branch.")
@click.option("--starts", type=click.IntRange(1), default=3, show_default=True, help="Checkpoints to branch from.")
@click.option("--minutes", type=click.FloatRange(0), help="Begin no further branch after so many.")
@format_option
def command(word: str, steps: int, starts: int, minutes: float | None, form: str) -> None:
    """Find what of its attention makes a run explode, by branches on the recorded batches.

    RUN is a run of flashpoint train that exploded, with checkpoints before the onset. A branch trains for some hundreds
    of steps from a checkpoint. In some of its layers, heads or choices it has the run's attention, elsewhere the twin:
    the same attention with every row of dS summing to zero. A branch grows if W_Q comes nearer to the run's than to the
    twin's. Asked are, in this order: the smallest set of layers that grows, of heads in these layers, the choices that
    stop the growth when they are changed, and the last checkpoint from which the twin still holds.

    Branches are kept in RUN/localize.jsonl: the same command goes on where it was stopped.
    """
    from flashpoint.localize.branches import Branches
    from flashpoint.localize.questions import answers
    from flashpoint.runs.folder import RunFolder

    branches = Branches(RunFolder.open(Path(word)), steps, starts, minutes)
    rows = []
    for answer in answers(branches):
        print(f"{answer.question}: {answer.verdict} ({answer.evidence})", file=sys.stderr, flush=True)
        rows.append([answer.question, answer.verdict, answer.evidence])
    heading = (
        f"{branches.run.name}: {branches.run.title}, seed {branches.run.config['seed']}, {branches.run.verdict}; "
        f"{branches.known} branches, {branches.trained} of them trained now; {branches.run.manifest['hardware']}, "
        f"torch {branches.run.manifest['environment']['torch']}; {branches.run.manifest['started'][:10]}"
    )
    show(Table(("question", "verdict", "evidence"), rows), form, heading)
