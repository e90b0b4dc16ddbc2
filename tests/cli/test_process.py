"""How the process of a command ends."""

import subprocess
import sys

import pytest

from tests.conftest import environment

BEGUN = """
import atexit, sys, threading, time
from flashpoint.cli.process import end_with

class Kept:
    def __del__(self):
        print("freed")

kept = Kept()
atexit.register(print, "at exit")

def command():
    threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread"))).start()
    print("of the command")
    {end}

end_with(command)
"""


def ended(end: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", BEGUN.format(end=end)], env=environment(), capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("sys.exit()", 0), ("sys.exit(130)", 130)])
def test_what_was_begun_is_done_and_no_object_is_freed(end: str, status: int) -> None:
    result = ended(end)
    assert result.returncode == status
    assert result.stdout.split("\n") == ["of the command", "of a thread", "at exit", ""]
    assert result.stderr == ""


def test_an_error_keeps_its_traceback() -> None:
    result = ended("1 / 0")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
