"""A process's output is read while it writes: a write is seen page by page, also within a character."""

import signal
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import environment, wait_until

WRITING = """
import signal
import sys

sys.stdout.buffer.write("⣿ is three bytes, ⣿".encode()[:-1])
sys.stdout.buffer.flush()
signal.pause()
"""


@pytest.mark.slow
def test_a_character_is_printed_when_it_is_all_there(tmp_path: Path) -> None:
    script = tmp_path / "writing.py"
    script.write_text(WRITING)
    process = warm.Process([sys.executable, str(script)], env=environment())
    try:
        wait_until(process.printed, process)
        assert process.printed() == "⣿ is three bytes, "
    finally:
        process.send_signal(signal.SIGKILL)
