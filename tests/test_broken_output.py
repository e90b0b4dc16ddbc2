"""Training whose output nobody reads, or cannot be written; the measure is the digest of an undisturbed run."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import ASCII, environment, train_command, wait_until

BREAK = {
    "readers gone": "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); os.dup2(writer, 2)",
    "stderr closed": "os.close(2); sys.stderr = None",
    "all closed": "os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = None",
    "disk full": "full = os.open('/dev/full', os.O_WRONLY); os.dup2(full, 1); os.dup2(full, 2)",
}
"""What a shell does before the program begins: ``2>&1 | head -1``, ``2>&-``, ``<&- >&- 2>&-``, ``> FILE 2>&1``."""


def broken(how: str, folder: Path, text_file: Path, *arguments: str) -> warm.Process:
    """Start a training whose streams are so."""
    program = folder / "broken.py"
    as_python_begins = (
        "import io, os, runpy, sys\n"
        f"{BREAK[how]}\n"
        "if sys.stdout: sys.stdout = io.TextIOWrapper(open(1, 'wb', closefd=False))\n"
        "if sys.stderr: sys.stderr = io.TextIOWrapper(open(2, 'wb', closefd=False), line_buffering=True)\n"
    )
    program.write_text(f"{as_python_begins}del sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
    interpreter, *script = train_command(*arguments, tiny=True, text_file=text_file)
    return warm.Process([interpreter, str(program), *script], cwd=folder, env=environment())


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.parametrize("how", BREAK)
def test_a_run_whose_output_breaks_trains_on(recorded: Path, tmp_path: Path, text_file: Path, how: str) -> None:
    assert broken(how, tmp_path, text_file, "run_name=broken").wait(120) == 0
    run = tmp_path / "runs/broken"
    outcome, undisturbed = (json.loads((one / "outcome.json").read_text()) for one in (run, recorded / "runs/original"))
    assert outcome["interrupted"] is None
    assert {name: outcome[name] for name in outcome if "digest" in name} == {
        name: undisturbed[name] for name in undisturbed if "digest" in name
    }
    for name in ("chain.bin", "tape.bin"):  # nothing that was to be printed
        assert (run / name).read_bytes() == (recorded / "runs/original" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.lab
def test_ctrl_c_after_the_reader_has_gone_ends_in_order(tmp_path: Path, text_file: Path) -> None:
    """A terminal's Ctrl-C ends the ``tee`` of ``2>&1 | tee log``, too."""
    process = broken("readers gone", tmp_path, text_file, "train.steps=100000", "run_name=stopped")
    run = tmp_path / "runs/stopped"
    wait_until(
        lambda: (run / "metrics.jsonl").is_file() and '"val_loss"' in (run / "metrics.jsonl").read_text(), process
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert json.loads((run / "outcome.json").read_text())["interrupted"] == "SIGINT"


def test_an_ascii_locale_has_the_same_help() -> None:
    """Of training see test_parallel.py."""
    command = [sys.executable, "-m", "flashpoint", "diagnose", "--help"]
    shown = subprocess.run(command, env=environment() | ASCII, capture_output=True, timeout=120)
    assert "δ" in shown.stdout.decode()
