"""``flashpoint report``: a page of runs."""

from __future__ import annotations

from pathlib import Path

import click

from flashpoint.cli.log_table import tell_of_logs
from flashpoint.cli.selection import ended_runs, runs_argument, some_were_left_out
from flashpoint.errors import UserError, answer, remedy
from flashpoint.lab.cli.shared_options import own_folder


@click.command("report")
@runs_argument
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    callback=own_folder,
    help="Folder. Default: report/ in the run's folder; of several runs comparison/ in that of the first.",
)
def command(words: tuple[str, ...], out: Path | None) -> None:
    """Write one HTML file that opens without a network, and its figures as PNG. Several runs stand side by side."""
    from flashpoint.lab.report.curves import draw_curves
    from flashpoint.lab.report.page import write_report

    runs = ended_runs(words, metrics=True)
    undrawn = None
    if out is None:
        if runs[0].folder is None:
            raise UserError(f"{runs[0].where}: no folder of a run, to put the report in; choose one with --out")
        first, alone = runs[0].folder, len(runs) == 1 and not some_were_left_out()
        out = (first.report if alone else first.comparison).path  # the first keeps its own page
        if len(runs) == 1 and runs[0].ended and not runs[0].watched and not first.figure.is_file():
            undrawn = first  # the run was killed between its verdict and its figure
    try:
        if undrawn:
            draw_curves(undrawn)
        page = write_report(runs, out)
    except OSError as error:  # as where somebody else's run lies on a disk that cannot be written
        said = error.strerror or str(error)
        raise UserError(f"{out}: {said}; {remedy(error)}, or choose another folder with --out") from error
    answer(str(page))
    tell_of_logs(runs)
