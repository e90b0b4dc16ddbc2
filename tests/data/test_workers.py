"""What is done beside: its result, its error, and nothing left of it where the caller fails."""

import subprocess
import time
from pathlib import Path

import pytest

from flashpoint.data.workers import beside
from flashpoint.errors import UserError


def doubled(number: int) -> int:
    return 2 * number


def refused(word: str) -> None:
    raise UserError(f"{word}: refused")


def slow(folder: Path) -> None:
    """Start a program, as pip is one, in a folder that goes with it."""
    unfinished = folder / "unfinished"
    unfinished.mkdir()
    try:
        subprocess.run(["sleep", "60"], check=False)
    finally:
        unfinished.rmdir()


def test_the_result_comes_back() -> None:
    with beside(doubled, 21) as work:
        assert work.result() == 42


def test_an_error_comes_back_as_it_is() -> None:
    with pytest.raises(UserError, match=r"^data\.path: refused$"), beside(refused, "data.path") as work:
        work.result()


class Interrupted(BaseException):
    pass


def interrupted_at_work(folder: Path) -> None:
    with beside(slow, folder):
        while not list(folder.iterdir()):
            time.sleep(0.01)
        raise Interrupted


def test_where_the_caller_is_interrupted_the_work_ends_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        interrupted_at_work(tmp_path)
    assert not list(tmp_path.iterdir())
