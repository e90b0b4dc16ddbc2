"""What a run of ``train.py`` printed and recorded, as the tests of whole runs read it."""

import json
import re
import subprocess
from pathlib import Path

OUTCOME = re.compile(
    r"outcome=(stable|stopped|exploded|nonfinite) step=(\d+) onset=(\d+|none) loss=([\d.]+|nan|inf) "
    r"digest=([0-9a-f]{16})(?: interrupted=(?:SIGINT|SIGTERM|SIGHUP))? run=(\S+)"
)


def outcome_of(result: "subprocess.CompletedProcess[str]") -> re.Match[str]:
    assert result.returncode == 0, result.stderr
    match = OUTCOME.fullmatch(result.stdout.splitlines()[-1])
    assert match, result.stdout
    return match


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(run) if "loss" in line]


def assert_one_line(result: "subprocess.CompletedProcess[str]", *fragments: str) -> None:
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.returncode == 2, result.stderr
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == errors[0]
    for fragment in fragments:
        assert fragment in errors[0]
