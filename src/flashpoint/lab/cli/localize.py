"""``flashpoint localize``: which layers, heads and choices of the attention made a run explode."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flashpoint.cli.process import importing_pytorch
from flashpoint.cli.selection import format_option
from flashpoint.cli.table import Table, show
from flashpoint.errors import UserError, tell

if TYPE_CHECKING:
    from flashpoint.lab.localize.subject import Subject
    from flashpoint.runs.folder import RunFolder


@click.command("localize")
@click.argument("word", metavar="RUN")
@click.option("--steps", type=click.IntRange(10), default=300, show_default=True, help="Of a branch.")
@click.option(
    "--starts",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Checkpoints to branch from, of twice as many, --steps apart.",
)
@click.option("--minutes", type=click.FloatRange(0), help="Begin no branch that would end after so many.")
@click.option(
    "--gpus", type=click.IntRange(1), default=1, show_default=True, help="To train branches on, one at a time on each."
)
@click.option(
    "--function",
    metavar="FILE.py:step",
    help="Of a watched run: trains a branch of your own loop, step(checkpoint, attention, steps, watch).",
)
@click.option("--checkpoints", metavar="PATTERN", help="Of a watched run, e.g. 'ckpt/*.pt'; names end with the step.")
@click.option(
    "--attention", metavar="ENGINE", help="Of a watched run, as for diagnose. Default: the one that it was seen to use."
)
@format_option
def command(
    word: str,
    steps: int,
    starts: int,
    minutes: float | None,
    gpus: int,
    function: str | None,
    checkpoints: str | None,
    attention: str | None,
    form: str,
) -> None:
    """Find what of its attention makes a run explode, by branches on the recorded batches.

    RUN is a run of flashpoint train that exploded, with checkpoints before the onset; or a watched run of your own,
    with --function and --checkpoints. A branch trains for some hundreds of steps from a checkpoint. In some of its
    layers, heads or choices it has the run's attention, elsewhere the twin: the same attention with every row of dS
    summing to zero. A checkpoint counts if W_Q of some head grows beyond the twin's by more than chance: by more than a
    second twin's does, which rounds otherwise. A branch grows if W_Q of these heads comes nearer to the run's than to
    the twin's. First it asks which layers make them grow, and which heads of these layers. Then it asks which choices
    stop the growth when they are changed. At last it asks for the last checkpoint from which the twin still holds, and
    whether what was found explodes alone. The interval of a share is a 95 % one over starts of this run.

    When --minutes are over, layers, heads and choices have the answers of the starts that there was time for, and the
    last line names what is missing. Branches are kept in RUN/localize.jsonl: the same command goes on where it was
    stopped. The answers are in the page of flashpoint report, too.
    """
    from flashpoint.lab.localize.branches import Branches
    from flashpoint.lab.localize.questions import answers
    from flashpoint.lab.localize.subject import Answer
    from flashpoint.runs.folder import RunFolder
    from flashpoint.runs.localized import Localized

    folder = RunFolder.open(Path(word))
    subject = _subject(folder, function, checkpoints, attention)
    _check_gpus(gpus)
    columns = ("question", "verdict", "evidence")
    stand, seen, started = list[Answer](), set[Answer](), time.monotonic()
    with Branches(subject, folder, steps, minutes, gpus) as branches:
        for stand in answers(branches, starts):
            for answer in [one for one in stand if one not in seen]:
                evidence = f" ({answer.evidence})" if answer.evidence else ""
                tell(f"{answer.question}: {answer.verdict}{evidence}")
                seen.add(answer)
    rows = [(answer.question, answer.verdict, answer.evidence) for answer in stand]
    run, trained = subject.run, f"{branches.trained} of them trained now in {(time.monotonic() - started) / 60:.1f} min"
    seed = "" if function else f", seed {run.seed}"  # nobody knows that of somebody else's loop
    heading = (
        f"{run.name}: {run.title}{seed}, {run.verdict}; "
        f"{branches.known} branches, {trained}; {run.manifest.place}; {run.manifest.day}"
    )
    folder.write_localized(Localized(heading=heading, columns=columns, rows=tuple(rows)))
    show(Table(columns, rows), form, heading)


def _subject(folder: RunFolder, function: str | None, checkpoints: str | None, attention: str | None) -> Subject[Any]:
    """Return what branches are trained of.

    Raises:
        UserError: options are missing, or contradict the run.
    """
    if folder.tape.is_file():
        if given := [name for name in (function, checkpoints, attention) if name is not None]:
            raise UserError(f"{given[0]}: {folder.path} is a run of flashpoint train, whose branches need no function")
        with importing_pytorch():
            from flashpoint.lab.localize.replayed import ReplayedRun

        if (run := ReplayedRun(folder)).run.onset is None:
            raise UserError(f"{folder.path}: {run.run.verdict}; a run that exploded is localised")
        return run
    if function is None or checkpoints is None:
        raise UserError(
            f"{folder.path}: a run without a tape; for a watched run give --function FILE.py:step and --checkpoints"
        )
    from flashpoint.lab.localize.own_loop import OwnLoop

    return OwnLoop.of(folder, function, checkpoints, attention)


def _check_gpus(gpus: int) -> None:
    import torch

    if gpus > 1 and torch.cuda.device_count() < gpus:
        raise UserError(f"--gpus {gpus}: {torch.cuda.device_count()} are visible; give fewer")
