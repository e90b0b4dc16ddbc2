"""Losses at equal steps, on runs whose differences are known by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint.report.survival import OPTIMISATION
from tests.conftest import REPOSITORY, environment


def record(
    folder: Path, name: str, seed: int, losses: dict[int, float], onset: int | None = None, data: str = "a"
) -> str:
    """A run with validation losses by steps done, the last of them its length."""
    run = folder / f"{name}-{seed}-{data}"
    run.mkdir()
    for file, value in {
        "config": {
            "attn": {"name": name},
            "seed": seed,
            "model": {"n_layer": 2},
            "train": dict.fromkeys(OPTIMISATION, 0.5),
        },
        "manifest": {"data": {"fingerprint": data}},
        "outcome": {
            "outcome": "stable" if onset is None else "exploded",
            "step": max(losses),
            "onset_step": onset,
            "val_loss": losses[max(losses)],
        },
    }.items():
        (run / f"{file}.json").write_text(json.dumps(value))
    steps = [json.dumps({"step": done - 1, "val_loss": loss}) for done, loss in losses.items()]
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in steps[:-1]))
    return str(run)


def call(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(REPOSITORY / "scripts/loss.py"), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)


def test_differences_are_of_the_same_seed_and_data(tmp_path: Path) -> None:
    runs = [record(tmp_path, "flash_fp32", seed, {100: 9.0, 200: float(seed)}) for seed in (1, 2, 3)]
    runs += [record(tmp_path, "flash_fixed", seed, {100: 0.0, 200: 1.1 * seed}) for seed in (1, 2, 3)]
    runs += [
        record(tmp_path, "flash_fixed", 4, {100: 0.0, 200: 4.4}),
        record(tmp_path, "sdpa", 1, {200: 7.0}, data="b"),
    ]
    result = call(*runs)
    assert result.returncode == 0, result.stderr
    # Differences 0.1, 0.2, 0.3: t(0.975, 2) = 4.303 times 0.1 / √3 is 0.248. The spread is that of 1.1, 2.2, 3.3, 4.4.
    assert result.stdout.splitlines()[2:] == [
        "| `flash_fp32` | 3 | 0 | 2.0000 | 1.0000 |  |  |  |",
        "| `flash_fixed` | 4 | 0 | 2.7500 | 1.4201 | 3 | +0.2000 | -0.0484 to +0.4484 |",
        "| `sdpa` | 1 | 0 | 7.0000 |  |  |  |  |",
    ]
    assert "| `flash_fixed` | 4 | 0 | 0.0000 |" in call(*runs[:-1], "--at", "100").stdout


def test_a_run_that_had_exploded_is_counted_and_has_no_loss(tmp_path: Path) -> None:
    runs = [record(tmp_path, "flash_fp32", seed, {100: 2.0, 200: 1.0}) for seed in (1, 2)]
    runs += [record(tmp_path, "flash_bf16", seed, {100: 3.0, 150: 8.0}, onset=50 * seed) for seed in (1, 2)]
    assert "| `flash_bf16` | 0 | 2 |  |  |  |  |  |" in call(*runs).stdout
    at_100 = call(*runs, "--at", "100").stdout  # the second one's onset is no earlier
    assert "| `flash_bf16` | 1 | 1 | 3.0000 |  | 1 | +1.0000 |  |" in at_100


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--at", "150"], "not validated after step 150 but 100, 200"), ([], "no step at which all runs")],
)
def test_runs_without_a_common_step_are_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    runs = [record(tmp_path, "flash_fp32", 1, {100: 2.0, 200: 1.0}), record(tmp_path, "sdpa", 1, {300: 1.0})]
    result = call(*runs, *arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert told in line
