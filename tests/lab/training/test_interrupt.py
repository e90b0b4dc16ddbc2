"""Signals end a run cleanly, and Ctrl-C reaches it even where Python drops exceptions."""

import errno
import gc
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from flashpoint.errors import notify
from flashpoint.lab.training.interrupt import StopRequests, surely_interrupted


class InterruptedDestructor:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # the signal's handler runs between two of these
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_lost_in_a_destructor_is_raised_at_the_end() -> None:
    before, went_on = signal.getsignal(signal.SIGINT), []

    @surely_interrupted()
    def block() -> None:
        InterruptedDestructor()
        gc.collect()
        went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        block()
    assert went_on, "it was not lost: the test shows nothing"
    assert signal.getsignal(signal.SIGINT) is before


def test_any_other_interrupt_is_raised_where_it_comes() -> None:
    @surely_interrupted()
    def block() -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        block()


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    """A shell without job control starts ``flashpoint train … &`` so, and Ctrl-C is for what runs in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with surely_interrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_without_one_nothing_happens() -> None:
    with surely_interrupted():
        pass


@pytest.fixture
def unheeded() -> Iterator[list[int]]:
    """What reaches the handlers that were there before."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    yield received
    for number, handler in before.items():
        signal.signal(number, handler)


def test_after_an_answer_the_next_signal_of_any_kind_ends_the_process(
    unheeded: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM after Ctrl-C was promised to quit at once, and did not; SIGHUP, of a closed terminal, ended a run."""
    with StopRequests("ending soon") as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not unheeded
        signal.raise_signal(signal.SIGTERM)
    assert stop.received == [signal.SIGHUP]
    assert unheeded == [signal.SIGTERM]
    assert capsys.readouterr().err == "SIGHUP: ending soon\n"


def test_without_an_answer_all_are_noted_but_those_that_were_ignored(unheeded: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with StopRequests() as stop:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
    signal.raise_signal(signal.SIGINT)
    assert stop.received == [signal.SIGINT, signal.SIGTERM]
    assert unheeded == [signal.SIGINT]


@pytest.mark.usefixtures("unheeded")
def test_a_signal_while_a_line_waits_to_be_read_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Telling of it in the midst of that line raised an error, which ended the run without a checkpoint."""
    main = threading.main_thread().ident
    assert main is not None

    def read_late() -> None:
        while select.select([], [writing], [], 0)[1]:  # not full yet
            time.sleep(0.01)
        while not stop.received:
            signal.pthread_kill(main, signal.SIGTERM)
            time.sleep(0.05)
        while os.read(reading, 1 << 16):
            pass

    reading, writing = os.pipe()
    reader = threading.Thread(target=read_late)
    with open(writing, "w") as stderr, StopRequests("ending") as stop:
        monkeypatch.setattr(sys, "stderr", stderr)
        reader.start()
        stderr.write("progress" * (1 << 16))
        stderr.flush()
    reader.join()
    os.close(reading)
    assert stop.received == [signal.SIGTERM]


def test_a_closed_terminal_does_not_end_a_run_that_tells_something(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("sys.stderr", Closed())
    notify("a line")
