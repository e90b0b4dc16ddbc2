"""A sweep as processes: a queue over devices, runs that fail alone, and going on with what is missing."""

import json
from pathlib import Path

import pytest

from hydra_plugins.flashpoint_launcher import gpus
from tests.conftest import Command

SWEEP = ("hydra/launcher=gpus", "hydra.launcher.sweep=s", "hydra.launcher.runs_per_gpu=2", "train.steps=4", "-m")


def outcomes(folder: Path) -> dict[str, str]:
    return {path.parent.name: json.loads(path.read_text())["digest"] for path in folder.glob("*/outcome.json")}


def test_a_failed_run_stops_no_other_and_the_same_command_runs_what_is_missing(train: Command, tmp_path: Path) -> None:
    # attn.layers=[9] is refused: the model has two.
    command = ("attn.elsewhere=flash_fp32", "attn.layers=[1],[9]", "seed=range(2)", *SWEEP)
    first = train(*command)
    assert first.returncode == 2
    (line,) = [line for line in first.stderr.splitlines() if line.startswith("error: ")]
    assert "2 of 4 runs failed" in line
    assert "hydra.launcher.sweep=s runs what is missing" in line
    folder = tmp_path / "runs/s"
    done = outcomes(folder)
    assert set(done) == {"attn.layers--1-_seed-0", "attn.layers--1-_seed-1"}
    assert "the model has layers 1 to 2" in (folder / "attn.layers--9-_seed-0.log").read_text()
    assert first.stdout.count("outcome=stable step=4") == 2
    configs = [json.loads(path.read_text()) for path in folder.glob("*/config.json")]
    assert [config["tracking"]["group"] for config in configs] == ["s", "s"]

    (folder / "attn.layers--1-_seed-1/outcome.json").unlink()  # as if killed
    again = train(*command)
    assert again.stdout.count("done before: ") == 1
    assert again.stdout.count("outcome=stable") == 1
    assert outcomes(folder) == done


@pytest.mark.parametrize(("visible", "expected"), [("3,5", ["3", "5"]), ("", [None])])
def test_it_fills_the_devices_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str | None]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus._devices() == expected


def test_names_hold_what_differs() -> None:
    jobs = [["experiment=ignite", "attn=flash_bf16", "seed=0"], ["experiment=ignite", "attn=flash_fp32", "seed=0"]]
    assert [name for name, _ in gpus._named(jobs)] == ["flash_bf16", "flash_fp32"]
    assert [name for name, _ in gpus._named([["seed=0"]])] == ["run"]
