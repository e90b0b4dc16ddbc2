"""The output of a command's process, and how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment
from tests.records import write_run

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
    [
        ("import gc; gc.freeze()", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(130)", 130, ""),
        ("sys.exit('why')", 1, "why\n"),
    ],
)
def test_what_was_begun_is_done_and_no_object_is_freed(tmp_path: Path, end: str, status: int, told: str) -> None:
    result = ended(tmp_path, end)
    assert (result.returncode, result.stderr) == (status, told)
    assert result.stdout.splitlines() == DONE
    assert (tmp_path / "left open").read_text() == "written"


def test_cycles_made_after_the_import_are_collected_and_a_second_import_keeps_none() -> None:
    program = """
import gc, sys, weakref
from flashpoint.cli.process import importing_pytorch
class Kept: pass
def cycle():
    kept = Kept()
    kept.itself = kept
    return weakref.ref(kept)
with importing_pytorch():
    assert not gc.isenabled()
    sys.modules["torch"] = sys
frozen, later = gc.get_freeze_count(), cycle()
with importing_pytorch():
    pass
gc.collect()
print(frozen > 1000, gc.get_freeze_count() == frozen, gc.isenabled(), later())
"""
    run = [sys.executable, "-c", program]
    result = subprocess.run(run, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout.split(), result.stderr) == (["True", "True", "True", "None"], "")


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


def shell(line: str, folder: Path, program: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command's program, ``"$@"`` in a line of Bash, whose status is that of the program."""
    begun = f"import os, sys\nfrom flashpoint.cli.process import own_process\nwith own_process():\n    {program}"
    return subprocess.run(
        ["bash", "-c", f'{line}; exit "${{PIPESTATUS[0]}}"', "bash", sys.executable, "-c", begun],
        cwd=folder, env={**environment(), **variables}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


ALIVE = "for number in range(20000): print('a line', number, file=sys.stderr)\n    open('end', 'w').write('reached')"


@pytest.mark.slow
@pytest.mark.parametrize("line", ['"$@" 2>&1 | head -1', '"$@" 2>&-', '"$@" >&- 2>&- <&-', '"$@" 2>/dev/full'])
def test_a_broken_stderr_raises_nothing(tmp_path: Path, line: str) -> None:
    assert shell(line, tmp_path, ALIVE).returncode == 0
    assert (tmp_path / "end").read_text() == "reached"


@pytest.mark.slow
@pytest.mark.parametrize("line", ['"$@" | head -1', '"$@" >&-', '"$@" >/dev/full'])
def test_a_broken_stdout_raises_nothing_in_a_command_that_works(tmp_path: Path, line: str) -> None:
    working = "from flashpoint.cli.process import make_stdout_lasting; make_stdout_lasting()\n    "
    result = shell(line, tmp_path, working + ALIVE.replace("stderr", "stdout"))
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "end").read_text() == "reached"


def test_a_command_that_only_prints_ends_when_its_reader_has_gone(tmp_path: Path) -> None:
    printing = ALIVE.replace("stderr", "stdout").replace("\n", "\n    ")
    result = shell(
        '"$@" | head -1',
        tmp_path,
        f"from flashpoint.errors import command_errors\n    with command_errors():\n        {printing}",
    )
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")
    assert not (tmp_path / "end").exists()


def test_a_file_that_is_opened_does_not_become_stderr(tmp_path: Path) -> None:
    """The next file gets the lowest number that is free, and libraries in C write to the number 2."""
    shell('"$@" 2>&- <&-', tmp_path, "file = open('data', 'w'); os.write(2, b'of a library')")
    assert (tmp_path / "data").read_text() == ""


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "δ é \\udcff"),
        ({"PYTHONIOENCODING": "ascii:strict"}, "δ é \\udcff"),
        ({"PYTHONIOENCODING": "latin-1"}, "\\u03b4 é \\udcff"),
        ({}, "δ é \\udcff"),
    ],
)
def test_every_character_is_printed_in_every_locale(tmp_path: Path, variables: dict[str, str], printed: str) -> None:
    text = r"print('\u03b4 \xe9 \udcff'); print('\u03b4 \xe9 \udcff', file=sys.stderr)"
    result = shell('"$@" >out 2>err', tmp_path, text, **variables)
    assert result.returncode == 0
    encoding = variables.get("PYTHONIOENCODING", "utf-8").replace("ascii:strict", "utf-8")
    assert [(tmp_path / name).read_text(encoding) for name in ("out", "err")] == [f"{printed}\n"] * 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_process_that_has_compiled_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = "import torch; print(torch.compile(lambda x: x.sin().sum())(torch.zeros(8)).item())"
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # which pays from the third kernel on
    assert sorted(ended(tmp_path, compiled).stdout.splitlines()) == sorted(["0.0", *DONE])


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["runs", "run"], ["watch", "run", "--once"], ["watch", "run"]])
def test_a_verb_whose_reader_has_gone_ends_as_by_sigpipe(tmp_path: Path, arguments: list[str]) -> None:
    write_run(tmp_path / "run", {"name": "sdpa"})
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "flashpoint", *arguments]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, env=environment(), check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
