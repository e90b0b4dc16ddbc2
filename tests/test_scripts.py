"""Figures in the documents are what the scripts print from the committed runs."""

import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, environment


def throughput(*runs: Path | str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(REPOSITORY / "scripts/throughput.py"), *map(str, runs)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)


def test_the_throughput_in_the_documents_is_that_of_the_committed_runs() -> None:
    result = throughput(*sorted((REPOSITORY / "runs/reference/trainer-h200").iterdir()))
    assert result.returncode == 0, result.stderr
    assert f"```\n{result.stdout}```" in (REPOSITORY / "docs/measurements.md").read_text()


def test_a_missing_run_is_one_line() -> None:
    result = throughput("nowhere")
    assert result.returncode == 2
    assert result.stderr == "error: nowhere: no run there (no config.json); give a run's folder, e.g. runs/NAME\n"
