"""``flashpoint watch``: follow runs under way, in the terminal or in a browser."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from flashpoint.cli.log_table import tell_of_logs
from flashpoint.cli.process import make_stdout_lasting
from flashpoint.cli.progress import cut_short, unended
from flashpoint.cli.run_words import select_runs, with_sweeps
from flashpoint.cli.selection import answered
from flashpoint.errors import UserError, answer, tell
from flashpoint.extras import from_lab, missing
from flashpoint.files import atomic_write, check_target, is_locked
from flashpoint.logs.stored_log import is_logged, reread, written
from flashpoint.runs.folder import sweep_lock
from flashpoint.runs.run import Run

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
    """Follow a run, or all runs of a folder that have no verdict yet, until the last has ended or was killed. Where
    none has begun, the next one is waited for.

    Runs that begin later are shown too, as long as others are under way, or their sweep has more to begin (but for
    hydra/launcher=slurm). The runs of a sweep in the folder count as the folder's.

    A log of another tool, as trainer_state.json, is read again whenever it has grown, until Ctrl-C.

    Shown are loss, gradient norm, the heads with the largest W_Q, warnings, the rate and the time left. Everything is
    read from the runs' own files, so another terminal or another machine that sees them will do. Ctrl-C ends the view,
    not the runs.
    """
    if html:
        check_target(html, "--html", ".html", ".htm")
        make_stdout_lasting()  # the page is what it is for
    followed = _begun(word, once=once)
    if html:
        _keep_page(followed, html, once)
    else:
        _keep_frame(followed, once)
    runs = followed.now()
    for run in runs:
        answer(f"{run.name}: {_how_it_went(run)}")
    tell_of_logs(runs)


class NoneYet(UserError):
    """No run is under way so far; one may begin."""

    def __init__(self, message: str, told: str) -> None:
        super().__init__(message)
        self.told = told
        """What is so, without a remedy."""


def _begun(word: str, *, once: bool) -> Followed | FollowedLogs:
    """Return what a word names, if need be when it has begun: a run is prepared before it has a folder.

    Raises:
        UserError: as of :class:`Followed`; of runs that may begin only with ``once``.
    """
    told = False
    while True:
        try:
            named = _named(word)
            return FollowedLogs(named) if all(map(is_logged, named)) else Followed(word)
        except NoneYet as none:
            if once:
                raise
            if not told:
                tell(f"{none.told}; waiting for one to begin, Ctrl-C ends")
                told = True
        time.sleep(_TERMINAL_SECONDS)


class Followed:
    """The one run that a word names, or those of several runs that are under way, and those that begin later.

    Raises:
        NoneYet: the word names no run, or several of which none is under way.
        UserError: what it names is not under way, or cannot be read.
    """

    def __init__(self, word: str) -> None:
        self._word = word
        named = _named(word)
        self._alone = len(named) == 1 and named[0].name == Path(word).resolve().name
        going = [run for run in named if unended(run)]
        if len(named) > 1 and not going:
            told = f"{word}: none of its {len(named)} runs is under way"
            raise NoneYet(f"{told}; name one run to see how it went", told)
        shown = named if len(named) == 1 else going
        self._runs = [run for run, _ in answered(shown, _identity)]
        self._ended_before = {run.where for run in named} - {run.where for run in going}

    def now(self) -> list[Run]:
        """Return the runs as their files are now: a ``Run`` reads each file once."""
        begun = [] if self._alone else list(filter(self._has_begun, _named(self._word)))
        self._runs = [Run.of_folder(run.folder) for run in [*self._runs, *begun] if run.folder]
        return self._runs

    def goes_on(self, runs: Sequence[Run]) -> bool:
        """Return whether there is more to come of any of the runs, or of a sweep that they are of."""
        if any(unended(run) and not cut_short(run) for run in runs):
            return True
        sweeps = set() if self._alone else {run.folder.path.parent for run in runs if run.folder}
        return any(is_locked(sweep_lock(folder)) for folder in sweeps)

    def _has_begun(self, run: Run) -> bool:
        """Whether a run has begun, or goes on, since the last look, and has written what it is."""
        if run.where in {one.where for one in self._runs} or (run.where in self._ended_before and not unended(run)):
            return False
        try:
            _identity(run)
        except (UserError, OSError):  # it writes its configuration first; what is damaged was told
            return False
        return True


class FollowedLogs:
    """Logs of other tools, which do not tell whether more is to come.

    Raises:
        UserError: none of them can be read.
    """

    def __init__(self, logs: Sequence[Run]) -> None:
        self._seen = {run.where: (written(run), run) for run, _ in answered(logs, _identity)}

    def now(self) -> list[Run]:
        """Return the logs as they are now. One that cannot be read, as while it is written, is shown as it was."""
        for where, (before, run) in self._seen.items():
            with suppress(UserError, OSError):
                if (state := written(run)) != before:
                    grown = reread(run)
                    _identity(grown)
                    self._seen[where] = state, grown
        return [run for _, run in self._seen.values()]

    def goes_on(self, _: Sequence[Run]) -> bool:
        """Return True: Ctrl-C ends the view."""
        return True


def _named(word: str) -> list[Run]:
    """Return the runs that a word names, with those of the sweeps in its folder.

    Raises:
        NoneYet: it names none, and one may be made there.
    """
    try:
        return select_runs(with_sweeps(word))
    except UserError as error:
        if not word or ":" in word or Path(word).is_file():
            raise
        raise NoneYet(str(error), f"{word}: no run there yet") from error


def _identity(run: Run) -> object:
    return run.config, run.manifest


def _how_it_went(run: Run) -> str:
    if run.folder and cut_short(run):
        return f"not ended, and no process trains it any more; {run.folder.resume_setting} goes on with it"
    return run.verdict


def _keep_frame(followed: Followed | FollowedLogs, once: bool) -> None:
    from rich.live import Live

    from flashpoint.cli.live import Terminal, frame

    console = Terminal()
    curves = None if missing("lab") else from_lab("report.terminal_curves:curves", "curves")
    if once:
        console.print(frame(followed.now(), console.width, console.height, curves))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal, transient=True) as live:
        while True:
            began, now = time.monotonic(), followed.now()
            ended = not followed.goes_on(now)
            live.update(frame(now, console.width, console.height, curves), refresh=True)
            if ended:
                break
            # A long run takes a while to read: most of the time is to be left for it.
            time.sleep(max(_TERMINAL_SECONDS, 3 * (time.monotonic() - began)))
    # The screen with the last frame is gone; a file has had none so far.
    console.print(frame(followed.now(), console.width, console.height, curves))


def _keep_page(followed: Followed | FollowedLogs, html: Path, once: bool) -> None:
    page = from_lab("report.page:page", "--html")
    told = False
    while True:
        began, now = time.monotonic(), followed.now()
        goes_on = not once and followed.goes_on(now)
        try:
            with atomic_write(html, durable=False) as partial:
                partial.write_text(page(now, reload_seconds=_PAGE_SECONDS if goes_on else None), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {html}: {error.strerror}; choose a file that can be written") from error
        if not told:
            answer(html.resolve().as_uri())
            told = True
        if not goes_on:
            return
        time.sleep(max(1.0, _PAGE_SECONDS - (time.monotonic() - began)))
