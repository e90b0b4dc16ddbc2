"""A case hangs by its own time, whatever else the machine computes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.judge import Command, run

_STAYS = {
    "waits": "import time; time.sleep(999)",
    "computes": "while True: pass",
    "waits for a child": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "reads a pipe": "import os; os.mkfifo('pipe'); open('pipe')",
}
_COMPUTES = "import time\nwhile time.process_time() < 0.25: pass"


def _hung(tree: Path, code: str, seconds: float) -> bool:
    (tree / "work").mkdir(parents=True, exist_ok=True)
    (tree / "home").mkdir(exist_ok=True)
    script = tree / "script.py"
    script.write_text(code)
    return run(Command(script, (), seconds=seconds), tree).hung


@pytest.mark.slow
@pytest.mark.parametrize("how", _STAYS)
def test_what_never_ends_hangs(tmp_path: Path, how: str) -> None:
    assert _hung(tmp_path, _STAYS[how], seconds=0.3)


@pytest.mark.slow
def test_what_others_keep_from_a_core_does_not_hang(tmp_path: Path) -> None:
    """Beside 8 processes computing takes several times as long by the clock, of which it has twice as much."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        assert not _hung(tmp_path, _COMPUTES, seconds=0.5)
    finally:
        for process in busy:
            process.kill()
