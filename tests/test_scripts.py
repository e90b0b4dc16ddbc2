"""Figures in the documents are what the scripts print from the committed runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint.data.tape import Tape
from tests.conftest import REPOSITORY, environment


def throughput(*runs: Path | str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(REPOSITORY / "scripts/throughput.py"), *map(str, runs)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)


def test_the_throughput_in_the_documents_is_that_of_the_committed_runs() -> None:
    result = throughput(*sorted((REPOSITORY / "runs/reference/trainer-h200").iterdir()))
    assert result.returncode == 0, result.stderr
    assert f"```\n{result.stdout}```" in (REPOSITORY / "docs/measurements.md").read_text()


@pytest.mark.parametrize(("table", "first"), [("bench.txt", "32×12×1024×64 "), ("compare.txt", "flash_bf16 ")])
def test_the_kernels_figures_in_the_documents_are_those_printed(table: str, first: str) -> None:
    printed = (REPOSITORY / "runs/reference/kernels-h200" / table).read_text().splitlines()
    blocks = (REPOSITORY / "docs/measurements.md").read_text().split("```\n")[1::2]
    (block,) = [block.splitlines() for block in blocks if f"\n{first}" in block]
    assert len(block) > 10
    assert set(block) <= set(printed)


@pytest.mark.parametrize(("name", "count"), [("explosion-h200", 5), ("twins-h200", 6)])
def test_outcomes_in_the_documents_are_those_of_the_committed_runs(name: str, count: int) -> None:
    document = (REPOSITORY / "docs/measurements.md").read_text()
    runs = sorted((REPOSITORY / "runs/reference" / name).iterdir())
    assert len(runs) == count
    for run in runs:
        outcome = json.loads((run / "outcome.json").read_text())
        onset = "none" if outcome["onset_step"] is None else outcome["onset_step"]
        row = f"| `{run.name}` | {outcome['outcome']} | {outcome['step']:,} | {onset} | `{outcome['digest']}` |"
        assert row in document


def test_the_committed_tape_is_whole_and_its_run_repeats_in_the_twin() -> None:
    original, again = (
        REPOSITORY / "runs/reference/explosion-h200" / name for name in ("flash_bf16_seed_0", "flash_bf16_seed_0-again")
    )
    outcome = json.loads((original / "outcome.json").read_text())
    tape = Tape.read(original / "tape.bin")
    assert (tape.steps, tape.digest) == (outcome["tape_steps"], outcome["tape_digest"])
    losses = [json.loads(line) for line in (original / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    by_step = {record["step"]: record for record in losses}
    thinned = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert len(thinned) > 500
    assert all(by_step[record["step"]] == record for record in thinned)


def test_a_missing_run_is_one_line() -> None:
    result = throughput("nowhere")
    assert result.returncode == 2
    assert result.stderr == "error: nowhere: no run there (no config.json); give a run's folder, e.g. runs/NAME\n"
