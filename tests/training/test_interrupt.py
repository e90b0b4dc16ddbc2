"""Ctrl-C reaches the run even where Python drops exceptions."""

import gc
import os
import signal

import pytest

from flashpoint.training.interrupt import surely_interrupted


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


def test_without_one_nothing_happens() -> None:
    with surely_interrupted():
        pass
