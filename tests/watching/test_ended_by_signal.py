"""Loops whose process is ended from outside, or whose output nobody reads any more."""

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import nn

from flashpoint.runs.metrics import MetricsFile
from flashpoint.watching.loop import Watch
from flashpoint.watching.observer import Observer
from tests import warm
from tests.conftest import environment, wait_until
from tests.watching.loops import loop, plain

ENDLESS = """
import signal, sys, time
from pathlib import Path
import flashpoint
from tests.watching.loops import Pair, plain
{before}
model = Pair()
with flashpoint.watch(model, name="own", log_interval=2) as watched:
    for number in range(10**6):
        plain(model, number, watched)
        {each}
        time.sleep(0.001)
"""


def begun(folder: Path, program: str) -> warm.Process:
    """Start a program in a process of its own."""
    script = folder / "own.py"
    script.write_text(program)
    return warm.Process([sys.executable, str(script)], cwd=folder, env=environment())


def started(folder: Path, before: str = "", each: str = "") -> warm.Process:
    """Start a loop that does not end by itself, and wait for its first losses."""
    handled = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{before}"
    process = begun(folder, ENDLESS.format(before=handled, each=each))
    metrics = folder / "runs/own/metrics.jsonl"
    wait_until(lambda: metrics.is_file() and metrics.read_text().count("\n") > 4, process)
    return process


def interrupted(folder: Path) -> str | None:
    """Return what ended the run, which has an outcome."""
    said: str | None = json.loads((folder / "runs/own/outcome.json").read_text())["interrupted"]
    return said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_kills_leaves_an_outcome_and_kills(tmp_path: Path, number: signal.Signals) -> None:
    process = started(tmp_path)
    process.send_signal(number)
    assert process.wait(60) == -number
    assert interrupted(tmp_path) == number.name


@pytest.mark.slow
def test_a_signal_waits_for_what_is_being_written(tmp_path: Path) -> None:
    """It ended the run in the middle of a step, and left the hidden file of a record that was half written."""
    program = (
        "import json\nfrom flashpoint.watching.watched_run import WatchedRun\n"
        "def dump(*given, **options):\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    whole(*given, **options)\n"
        "whole = json.dump\n"
        "def describe(self, calls):\n"
        "    json.dump = dump\n"
        "    described(self, calls)\n"
        "    json.dump = whole\n"
        "described, WatchedRun.describe = WatchedRun.describe, describe\n"
    )
    process = begun(tmp_path, ENDLESS.format(before=program, each=""))
    assert process.wait(120) == -signal.SIGTERM, process.communicate()
    assert interrupted(tmp_path) == "SIGTERM"
    assert json.loads((tmp_path / "runs/own/config.json").read_text())["model"]["n_layer"] == 2
    assert not list(tmp_path.rglob("*.partial"))


def test_a_loop_in_a_thread_is_told_that_it_takes_no_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop(tmp_path / "main")
    assert "SIGTERM" not in capsys.readouterr().err
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loop, tmp_path / "other").result()
    assert capsys.readouterr().err.count("SIGTERM") == 1


def test_ctrl_c_before_the_first_step_leaves_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block was not begun, and so was not left: what the watch had put into the model stayed, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Observer, "begin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path / "runs")
    assert interrupted(tmp_path) == "SIGINT"


@pytest.mark.slow
def test_a_handler_of_the_host_stays_in_its_place(tmp_path: Path) -> None:
    """It saves and leaves the loop by an error of its own."""
    process = started(tmp_path, before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 7
    assert interrupted(tmp_path) == "SystemExit"


@pytest.mark.slow
def test_ctrl_c_after_whoever_read_the_output_has_gone_leaves_an_outcome(tmp_path: Path) -> None:
    """The terminal's Ctrl-C ends ``tee`` too, and the lines of a capture find a broken pipe."""
    gone = (
        "import os\n"
        "def leave():\n"
        "    reader, writer = os.pipe()\n"
        "    os.close(reader)\n"
        "    os.dup2(writer, 1)\n"
        "    os.dup2(writer, 2)\n"
    )
    process = started(tmp_path, before=gone, each="number == 8 and leave(); watched.capture(sequences=0)")
    metrics = tmp_path / "runs/own/metrics.jsonl"
    lines = metrics.read_text().count("\n")
    wait_until(lambda: metrics.read_text().count("\n") > lines + 10, process)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert interrupted(tmp_path) == "SIGINT"


def test_a_second_ctrl_c_waits_until_the_outcome_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers send one beside the terminal's."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        plain(model, number, watched)
        if number == 2:
            raise KeyboardInterrupt

    def close(self: MetricsFile) -> None:
        signal.raise_signal(signal.SIGINT)
        whole(self)

    whole = MetricsFile.close
    monkeypatch.setattr(MetricsFile, "close", close)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path / "runs", step=step)
    assert interrupted(tmp_path) == "SIGINT"
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_loop_that_ends_leaves_signals_as_they_were(tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    loop(tmp_path)
    assert [signal.getsignal(number) for number in numbers] == handlers


@pytest.mark.slow
@pytest.mark.parametrize(("error", "said"), [("1 / 0", "ZeroDivisionError"), ("sys.exit()", "exit")])
def test_a_watch_that_a_callback_enters_ends_with_the_process(tmp_path: Path, error: str, said: str) -> None:
    program = (
        "import sys, flashpoint\nfrom tests.watching.loops import Pair, plain\nmodel = Pair()\n"
        f"watched = flashpoint.watch(model, name='own').__enter__()\nplain(model, 0, watched)\n{error}\n"
    )
    begun(tmp_path, program).wait(60)
    assert interrupted(tmp_path) == said
