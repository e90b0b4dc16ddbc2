"""``flashpoint watch``: follow runs under way, in the terminal or in a browser."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from flashpoint.analysis.progress import cut_short, unended
from flashpoint.cli.selection import answered
from flashpoint.errors import UserError
from flashpoint.files import whole
from flashpoint.runs.run import Run
from flashpoint.runs.select import select_runs
from flashpoint.runs.tables import EVIDENCE

_TERMINAL_SECONDS, _PAGE_SECONDS = 2.0, 15.0
"""Between two frames in the terminal, and between two pages: a page has many figures."""


@click.command("watch")
@click.argument("word", metavar="RUN|FOLDER")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.html",
    help="Write the report as a page there. A browser loads it again while the runs go on.",
)
@click.option("--once", is_flag=True, help="Show the present state and end.")
def command(word: str, html: Path | None, once: bool) -> None:
    """Follow a run, or all runs of a folder that have no verdict yet, until the last has ended or was killed.

    The runs of a sweep in the folder count as the folder's.

    Shown are loss, gradient norm, the heads with the largest W_Q, warnings, the rate and the time left. Everything is
    read from the runs' own files, so another terminal or another machine that sees them will do. Ctrl-C ends the view,
    not the runs.
    """
    runs = [run for run, _ in answered(followed(word), lambda run: (run.config, run.manifest))]
    if html:
        _keep_page(runs, html, once)
    else:
        _keep_frame(runs, once)
    for run in runs:
        run = Run.of_folder(run.folder) if run.folder else run  # noqa: PLW2901 - as it is now
        click.echo(f"{run.name}: {_how_it_went(run)}")


def followed(word: str) -> list[Run]:
    """Return the one run that the word names, or those of several runs that are under way.

    Raises:
        UserError: the word names no run, or several of which none is under way.
    """
    folder = Path(word)
    sweeps = _sweeps_in(folder)
    named = select_runs([*([word] if not sweeps or any(folder.glob("*/config.json")) else []), *sweeps])
    going = [run for run in named if unended(run)]
    if len(named) > 1 and not going:
        raise UserError(f"{word}: none of its {len(named)} runs is under way; name one run to see how it went")
    return named if len(named) == 1 else going


def _sweeps_in(folder: Path) -> list[str]:
    """Return the folders in this one that are no runs and hold runs. The evidence's have ended."""
    sweeps = {config.parent.parent for config in folder.glob("*/*/config.json")}
    return sorted(str(path) for path in sweeps if path.name != EVIDENCE and not (path / "config.json").exists())


def _how_it_went(run: Run) -> str:
    if run.folder and cut_short(run):
        return f"not ended, and no process trains it any more; resume={run.folder.path} goes on with it"
    return run.verdict


def _go_on(runs: Sequence[Run]) -> bool:
    """Return whether there is more to come of any of the runs."""
    return any(unended(run) and not cut_short(run) for run in runs)


def _present(runs: Sequence[Run]) -> list[Run]:
    """Return the runs as their files are now: a ``Run`` reads each file once."""
    return [Run.of_folder(run.folder) for run in runs if run.folder]


def _keep_frame(runs: Sequence[Run], once: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    from flashpoint.report.live import frame

    console = Console()
    if once:
        console.print(frame(_present(runs), console.width, console.height))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal, transient=True) as live:
        while True:
            began, now = time.monotonic(), _present(runs)
            ended = not _go_on(now)
            live.update(frame(now, console.width, console.height), refresh=True)
            if ended:
                break
            # A long run takes a while to read: most of the time is to be left for it.
            time.sleep(max(_TERMINAL_SECONDS, 3 * (time.monotonic() - began)))
    # The screen with the last frame is gone; a file has had none so far.
    console.print(frame(_present(runs), console.width, console.height))


def _keep_page(runs: Sequence[Run], html: Path, once: bool) -> None:
    from flashpoint.report.page import page

    told = False
    while True:
        began, now = time.monotonic(), _present(runs)
        goes_on = not once and _go_on(now)
        try:
            with whole(html, durable=False) as partial:
                partial.write_text(page(now, reload_seconds=_PAGE_SECONDS if goes_on else None), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {html}: {error.strerror}; choose a file that can be written") from error
        if not told:
            click.echo(f"{html.resolve().as_uri()}")
            told = True
        if not goes_on:
            return
        time.sleep(max(1.0, _PAGE_SECONDS - (time.monotonic() - began)))
