"""Work in the background: its result, its error, and nothing left of it where the caller fails."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.lab.data.workers import in_background


def doubled(number: int) -> int:
    return 2 * number


def refused(word: str) -> None:
    raise UserError(f"{word}: refused")


def slow(folder: Path) -> None:
    """Start a program, as pip is one, in a folder that goes with it; ``begun`` says that both are there."""
    unfinished = folder / "unfinished"
    unfinished.mkdir()
    try:
        program = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
        try:
            (unfinished / "begun").touch()
            program.wait()
        finally:
            program.kill()
            program.wait()
    finally:
        shutil.rmtree(unfinished)


def test_the_result_comes_back() -> None:
    with in_background(doubled, 21) as work:
        assert work.result() == 42


def test_the_caller_goes_first() -> None:
    with in_background(os.nice, 0) as work:
        assert work.result() > os.nice(0)


def test_an_error_comes_back_as_it_is() -> None:
    with pytest.raises(UserError, match=r"^data\.path: refused$"), in_background(refused, "data.path") as work:
        work.result()


class Interrupted(BaseException):
    pass


def interrupted_at_work(folder: Path) -> None:
    with in_background(slow, folder):
        while not (folder / "unfinished/begun").exists():
            time.sleep(0.01)
        raise Interrupted


def test_where_the_caller_is_interrupted_the_work_ends_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        interrupted_at_work(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_a_second_interruption_does_not_wait_for_ever(tmp_path: Path, early: bool) -> None:
    """The first one ends the work; the second breaks off the wait for it, or comes before the work is told to end."""
    program = (
        "import os, pathlib, sys, time\n"
        "from flashpoint.lab.data import workers\n"
        "from flashpoint.lab.data.workers import in_background\n"
        "without = workers._without_ctrl_c\n"
        "def interrupted():\n"
        "    workers._without_ctrl_c = without\n"
        "    raise KeyboardInterrupt\n"
        f"if {early}:\n"
        "    workers._without_ctrl_c = interrupted\n"
        "from tests.lab.data.test_workers import slow\n"
        "if __name__ == '__main__':\n"
        "    folder = pathlib.Path(sys.argv[1])\n"
        "    with in_background(slow, folder):\n"
        "        while not (folder / 'unfinished/begun').exists():\n"
        "            time.sleep(0.01)\n"
        "        print('begun', flush=True)\n"
        "        time.sleep(60)\n"
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    (tmp_path / "work").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "work")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.03)
    process.communicate(timeout=60)
    assert process.returncode != 0


_IMPORTS_SLOWLY = """
import os
import pathlib
import time

from flashpoint.lab.data.workers import in_background

if __name__ == "__mp_main__":  # in the process that works
    pathlib.Path("importing").write_text(f"{os.getpid()} ")
    time.sleep(60)

if __name__ == "__main__":
    try:
        with in_background(print):
            time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.slow
def test_ctrl_c_does_not_reach_a_process_that_still_imports(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_IMPORTS_SLOWLY)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, start_new_session=True, **pipes)
    importing = tmp_path / "importing"
    while not importing.exists() or not importing.read_text().endswith(" "):
        assert program.poll() is None
        time.sleep(0.01)
    os.kill(int(importing.read_text()), signal.SIGINT)  # first, so that it has the time to print
    time.sleep(0.5)
    os.killpg(program.pid, signal.SIGINT)
    assert program.communicate(timeout=60) == ("interrupted\n", "")
