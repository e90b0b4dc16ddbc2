"""``flashpoint watch`` follows runs that other processes train meanwhile, until the last of them has ended."""

import contextlib
import fcntl
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashpoint.cli.watch import Followed
from flashpoint.runs.folder import RunFolder, sweep_lock
from tests import warm
from tests.conftest import environment, train_command, wait_until
from tests.records import call, refusal, write_run
from tests.verdicts import losses_of

WATCHING = Path(__file__).with_name("watching.py")
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
"""By which rich takes a test's file for a terminal, and writes every frame to it."""
REFRESH = '<meta http-equiv="refresh"'

Start = Callable[..., warm.Process]


@pytest.fixture
def training(recorded: Path, text_file: Path, tmp_path: Path) -> Iterator[Start]:
    """Begins a run of that name under ``tmp_path`` that would go on for hours, and waits for its first steps."""
    with contextlib.ExitStack() as ends:

        def start(name: str, *options: str) -> warm.Process:
            arguments = "train.steps=100000", f"runs_dir={tmp_path}", f"run_name={name}", *options
            command = train_command(*arguments, tiny=True, text_file=text_file)
            process = warm.Process(command, cwd=recorded, env=environment())
            ends.callback(process.send_signal, signal.SIGKILL)
            metrics = tmp_path / name / "metrics.jsonl"
            wait_until(lambda: metrics.is_file() and metrics.stat().st_size, process)
            return process

        yield start


@contextlib.contextmanager
def watching(*arguments: Path | str, **variables: str) -> Iterator[warm.Process]:
    command = [sys.executable, str(WATCHING), *map(str, arguments)]
    process = warm.Process(command, env={**environment(), **variables})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)


def steps_of(name: str, shown: str) -> list[int]:
    """What each frame says of how far a run is."""
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    found = re.findall(rf"\b{name} .*?([\d,]+) of 100,000", text, re.DOTALL)
    return [int(steps.replace(",", "")) for steps in found]


def end(process: warm.Process, number: signal.Signals) -> None:
    process.send_signal(number)
    process.wait(timeout=60)


@pytest.mark.slow
def test_a_terminal_shows_a_run_until_it_has_ended(training: Start, tmp_path: Path) -> None:
    run = training("run")
    with watching(tmp_path / "run", **TERMINAL) as watch:
        wait_until(lambda: len({*steps_of("run", watch.printed())}) > 1, watch)
        end(run, signal.SIGTERM)
        shown, errors = watch.communicate(timeout=60)
    assert (watch.returncode, errors) == (0, "")
    steps = len(losses_of(tmp_path / "run"))
    seen = steps_of("run", shown)
    assert seen == sorted(seen)
    assert seen[0] < seen[-1] == steps
    assert shown.splitlines()[-1] == f"run: stopped at {steps:,}"


@pytest.mark.slow
def test_a_page_is_written_anew_until_its_run_has_ended(training: Start, tmp_path: Path) -> None:
    page = tmp_path / "live.html"
    pages: dict[int, str] = {}

    def two_seen() -> bool:
        now = page.read_text() if page.is_file() else ""
        if so_far := re.search(r"<td>([\d,]+) so far</td>", now):
            pages[int(so_far[1].replace(",", ""))] = now
        return len(pages) == 2

    run = training("run", "probes.weights_interval=0", "probes.attention_interval=0")  # fewer figures to wait for
    with watching(tmp_path / "run", "--html", page) as watch:
        wait_until(two_seen, watch)
        end(run, signal.SIGTERM)
        shown, errors = watch.communicate(timeout=60)
    assert (watch.returncode, errors) == (0, "")
    steps = len(losses_of(tmp_path / "run"))
    assert shown.splitlines() == [page.as_uri(), f"run: stopped at {steps:,}"]
    assert all(REFRESH in one for one in pages.values())
    first, second = pages
    assert first < second <= steps
    last = page.read_text()
    assert REFRESH not in last
    assert f'<td class="stopped">stopped at {steps:,}</td>' in last
    assert {path.name for path in tmp_path.iterdir()} == {"run", "live.html"}


def test_runs_of_sweeps_in_a_folder_are_of_the_folder(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for name in ("one", "two"):
        write_run(sweep / name, {"name": "flash_bf16"})
    (sweep / "two/outcome.json").unlink()
    assert [run.where for run in Followed(str(tmp_path)).now()] == [str(sweep / "two")]  # with no run beside it
    write_run(tmp_path / "beside", {"name": "flash_bf16"})
    write_run(tmp_path / "beside/kept", {"name": "flash_bf16"})  # within a run, and no run of a sweep
    (tmp_path / "beside/kept/outcome.json").unlink()
    write_run(tmp_path / "reference/kept", {"name": "flash_bf16"})
    assert [run.where for run in Followed(str(tmp_path)).now()] == [str(sweep / "two")]
    (sweep / "two").rename(tmp_path / "two")
    assert [run.where for run in Followed(str(tmp_path)).now()] == [str(tmp_path / "two")]


@pytest.mark.slow
def test_runs_of_a_folder_are_followed_until_the_last_has_ended_or_was_killed(training: Start, tmp_path: Path) -> None:
    first, second = training("first"), training("second")
    with watching(tmp_path, **TERMINAL) as watch:
        wait_until(lambda: steps_of("first", watch.printed()), watch)
        end(first, signal.SIGTERM)
        wait_until(lambda: "stopped at" in watch.printed(), watch)
        before = steps_of("second", watch.printed())[-1]
        wait_until(lambda: steps_of("second", watch.printed())[-1] > before, watch)
        end(second, signal.SIGKILL)
        os.utime(tmp_path / "second/metrics.jsonl", (0, 0))  # as if that were long ago
        shown, errors = watch.communicate(timeout=60)
    assert (watch.returncode, errors) == (0, "")
    assert shown.splitlines()[-2:] == [
        f"first: stopped at {len(losses_of(tmp_path / 'first')):,}",
        f"second: not ended, and no process trains it any more; resume={tmp_path}/second goes on with it",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--html", "page.html"]])
def test_runs_that_begin_later_are_followed_while_others_are_under_way_or_their_sweep_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """It showed the runs that were under way when it began, and no other."""
    sweep, lock = tmp_path / "sweep", sweep_lock(tmp_path / "sweep")

    def begin(name: str, *, ended: bool = False) -> None:
        write_run(sweep / name, {"name": "flash_bf16"}, metrics=[{"step": 0, "loss": 2.0}])
        if not ended:
            (sweep / name / "outcome.json").rename(sweep / name / "verdict")

    def end(name: str) -> None:
        (sweep / name / "verdict").rename(sweep / name / "outcome.json")

    begin("before", ended=True)
    begin("goes-on", ended=True)
    begin("first")
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        happens = [
            lambda: (begin("beside"), (sweep / "unwritten").mkdir(), (sweep / "unwritten/config.json").touch()),
            lambda: (end("first"), end("beside")),  # nothing is under way but the sweep
            lambda: (begin("next"), (sweep / "goes-on/outcome.json").rename(sweep / "goes-on/verdict")),
            lambda: (held.close(), end("goes-on")),
            lambda: end("next"),
        ]
        monkeypatch.setattr("time.sleep", lambda _: happens.pop(0)())
        result = call("watch", sweep, *options, cwd=tmp_path)
    assert (result.returncode, result.stderr, happens) == (0, "", [])
    names = ("first", "beside", "goes-on", "next")
    assert result.stdout.splitlines()[-4:] == [f"{name}: stable to 1,000" for name in names]
    assert "before" not in result.stdout
    if options:
        page = (tmp_path / "page.html").read_text()
        assert all(name in page for name in names)


@pytest.mark.parametrize("before", [[], ["ended", "ended-too"]])
def test_a_run_that_has_not_begun_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: list[str]
) -> None:
    """A run has a folder when it is prepared, and the command that follows it may be typed at once."""
    runs = tmp_path / "runs"
    happens = [
        lambda: None,
        lambda: (write_run(runs / "new", {"name": "flash_bf16"}), (runs / "new/outcome.json").rename(runs / "verdict")),
        lambda: (runs / "verdict").rename(runs / "new/outcome.json"),
    ]
    monkeypatch.setattr("time.sleep", lambda _: happens.pop(0)())
    for name in before:
        write_run(runs / name, {"name": "flash_bf16"})
    assert "name one run" in refusal(call("watch", runs, "--once")) if before else "no run there"
    result = call("watch", runs)
    why = "none of its 2 runs is under way" if before else "no run there yet"
    assert (result.returncode, result.stderr) == (0, f"{runs}: {why}; waiting for one to begin, Ctrl-C ends\n")
    assert result.stdout.splitlines()[-1] == "new: stable to 1,000"
    assert not happens


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--html", "page.html"]])
def test_a_killed_run_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    """One whose process may live is: it holds the lock, has just written, or is somebody's own loop, without a lock."""

    class Waited(Exception):
        pass

    def wait(_: float) -> None:
        raise Waited

    def watch() -> str:
        return call("watch", run, *options, cwd=tmp_path).stdout.splitlines()[-1]

    monkeypatch.setattr("time.sleep", wait)
    run = write_run(tmp_path / "run", {"name": "flash_bf16"}, metrics=[{"step": 0, "loss": 2.0}])
    outcome, metrics, lock = (tmp_path / "run" / name for name in ("outcome.json", "metrics.jsonl", ".lock"))
    verdict = outcome.read_text()
    outcome.unlink()
    os.utime(metrics, (0, 0))
    with pytest.raises(Waited):
        watch()
    with RunFolder(Path(run)).locked(), pytest.raises(Waited):
        watch()
    told = f"run: not ended, and no process trains it any more; resume={run} goes on with it"
    with lock.open("rb") as another_reader:
        fcntl.flock(another_reader, fcntl.LOCK_SH)
        assert watch() == told
    os.utime(metrics, (2**31, 2**31))  # not silent, however long this test takes
    with pytest.raises(Waited):
        watch()
    outcome.write_text(verdict)
    (tmp_path / ".logs").mkdir()
    with sweep_lock(tmp_path).open("w") as of_its_sweep:
        fcntl.flock(of_its_sweep, fcntl.LOCK_EX)
        assert watch() == "run: stable to 1,000"
