"""How the process of a command ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment

BEGUN = """
import sys
from flashpoint.cli.process import quick_end

class Kept:
    def __del__(self):
        print("freed")

with quick_end():
    import atexit, os, threading, time
    from concurrent.futures import ThreadPoolExecutor

    kept = Kept()
    atexit.register(print, "at exit")
    left_open = open("left open", "w")
    left_open.write("written")
    idle = ThreadPoolExecutor(1)
    idle.submit(int).result()

    def began_another():
        threading.Thread(target=lambda: (time.sleep(0.2), print("of a thread's thread"))).start()

    threading.Thread(target=began_another).start()
    {end}
"""
DONE = ["of a thread's thread", "at exit"]


def ended(folder: Path, end: str, **options: object) -> "subprocess.CompletedProcess[str]":
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        [sys.executable, "-c", BEGUN.format(end=end)],
        cwd=folder, env={**environment(), "PYTHONUNBUFFERED": ""}, stderr=subprocess.PIPE, text=True, timeout=60,
        **options,
    )  # type: ignore[call-overload,no-any-return]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [("pass", 0, ""), ("sys.exit()", 0, ""), ("sys.exit(130)", 130, ""), ("sys.exit('why')", 1, "why\n")],
)
def test_what_was_begun_is_done_and_no_object_is_freed(tmp_path: Path, end: str, status: int, told: str) -> None:
    result = ended(tmp_path, end)
    assert (result.returncode, result.stderr) == (status, told)
    assert result.stdout.splitlines() == DONE
    assert (tmp_path / "left open").read_text() == "written"


def test_an_error_keeps_its_traceback_and_pythons_own_end(tmp_path: Path) -> None:
    result = ended(tmp_path, "1 / 0")
    assert result.returncode == 1
    assert "ZeroDivisionError" in result.stderr
    assert result.stdout.splitlines() == [*DONE, "freed"]


def test_what_cannot_be_printed_is_told(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        result = ended(tmp_path, "pass", stdout=full)
    assert result.returncode == 120  # as Python has it
    assert "No space left on device" in result.stderr


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_process_that_has_compiled_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = "import torch; print(torch.compile(lambda x: x.sin().sum())(torch.zeros(8)).item())"
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # which pays from the third kernel on
    assert sorted(ended(tmp_path, compiled).stdout.splitlines()) == sorted(["0.0", *DONE])
