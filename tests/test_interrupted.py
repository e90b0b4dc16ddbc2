"""Runs that end before their time: by a signal, a kill, a full disk, or before their first step."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from flashpoint.errors import UserError
from flashpoint.lab.build_config import build_config
from flashpoint.lab.model import GPT
from flashpoint.lab.probes.instrumented import InstrumentedPass
from flashpoint.lab.report.ending import EndOfRunDrawing
from flashpoint.lab.training import plan
from flashpoint.lab.training.execution import run
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import Outcome
from tests import warm
from tests.composed import CONFIGS
from tests.conftest import Command, environment, train_command, wait_until
from tests.verdicts import OUTCOME, assert_one_line, losses_of, metrics_of, outcome_of


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_cleanly(text_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = train_command("train.steps=100000", "run_name=stopped", tiny=True, text_file=text_file)
    process = warm.Process(command, cwd=tmp_path, env=environment())
    run = tmp_path / "runs/stopped"
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and "val_loss" in metrics.read_text(), process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + number, stderr
    match = OUTCOME.fullmatch(stdout.splitlines()[-1])
    assert match
    assert match[1] == "stopped"
    assert f" interrupted={number.name} " in match[0]
    outcome = json.loads((tmp_path / "runs/stopped/outcome.json").read_text())
    assert outcome["interrupted"] == number.name
    assert outcome["tape_steps"] == outcome["step"] == int(match[2]) == len(losses_of(tmp_path / "runs/stopped"))
    validated = [(line["step"] + 1, line["val_loss"]) for line in metrics_of(run) if "val_loss" in line]
    assert (outcome["val_step"], outcome["val_loss"]) == validated[-1]
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == "stopped; flashpoint train resume=runs/stopped goes on with it"


@pytest.mark.slow
def test_a_second_ctrl_c_says_how_the_run_goes_on(tmp_path: Path, train: Command) -> None:
    """It said that the same command does, which begins another run."""
    (tmp_path / "own.py").write_text(
        "import signal\nfrom flashpoint.lab.probes.attention import Probe\n"
        "class Interrupts(Probe):\n"
        "    def measure(self, seen):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        signal.raise_signal(signal.SIGINT)\n"
    )
    result = train("probes.attention=[own.py:Interrupts]", "runs_dir=my runs", "run_name=stopped")
    assert result.returncode == 128 + signal.SIGINT
    assert result.stderr.splitlines()[-1] == (
        "interrupted; flashpoint train 'resume=my runs/stopped' trust=true goes on with it"
    )


class Interrupted(EndOfRunDrawing):
    """A signal arrives as the figure is about to be drawn."""

    def ended(self, folder: RunFolder, outcome: Outcome) -> None:
        signal.raise_signal(signal.SIGTERM)
        super().ended(folder, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("late", ["verdict", "figure"])
def test_a_signal_after_the_last_step_loses_nothing(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """The verdict and the figure are still made, and the run counts as finished."""
    written, unheeded = Outcome.to_dict, []

    def interrupted(outcome: Outcome) -> dict[str, object]:
        signal.raise_signal(signal.SIGTERM)
        return written(outcome)

    values = json.loads((recorded / "runs/original/config.json").read_text())
    monkeypatch.chdir(recorded)  # the data are there
    monkeypatch.setattr(plan, "fix_numerics", lambda *_: None)  # which outlasts the test
    if late == "verdict":
        monkeypatch.setattr(Outcome, "to_dict", interrupted)
    drawing = (Interrupted if late == "figure" else EndOfRunDrawing)()
    before = signal.signal(signal.SIGTERM, lambda *_: unheeded.append(True))
    try:
        outcome = run(build_config({**values, "runs_dir": str(tmp_path)}, CONFIGS / "attn"), [drawing])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not unheeded
    assert (outcome.step, outcome.interrupted) == (12, None)
    assert json.loads((tmp_path / "original/outcome.json").read_text())["interrupted"] is None
    assert (tmp_path / "original/curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "original/report/report.html").is_file()


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_figure_is_complete(recorded: Path, tmp_path: Path, train: Command) -> None:
    run = tmp_path / "runs/killed"
    shutil.copytree(recorded / "runs/original", run)
    (run / "curves.png").unlink()
    told = "the run is complete (stable at step 12)", ", flashpoint report runs/killed draws it"
    assert_one_line(train("resume=killed", tiny=False), *told)


@pytest.mark.slow
def test_ctrl_c_while_data_are_prepared_ends_in_one_line(tmp_path: Path, text_file: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for part in range(12):
        (shards / f"{part:02}.txt").write_text(f"{part} {text_file.read_text()}" * 4)
    command = train_command(f"data.path={shards}", "data.workers=2", tiny=True, text_file=text_file)
    interpreter, *script = command
    alone = tmp_path / "alone.py"
    alone.write_text(
        "import os, runpy, sys\nif __name__ == '__main__':\n"  # which the processes that tokenise import
        "    os.setsid()\n    del sys.argv[0]\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    process = warm.Process([interpreter, str(alone), *script], cwd=tmp_path, env=environment())
    wait_until(lambda: list(tmp_path.glob("data/.*.partial/shard-*")), process)  # most are left
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("interrupted;")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_killed_run_replays_as_far_as_its_tape(text_file: Path, tmp_path: Path, train: Command) -> None:
    command = train_command("train.steps=100000", "run_name=killed", tiny=True, text_file=text_file)
    process = warm.Process(command, cwd=tmp_path, env=environment())
    tape = tmp_path / "runs/killed/tape.bin"
    wait_until(lambda: tape.is_file() and tape.stat().st_size > 1000, process)
    process.send_signal(signal.SIGSTOP)  # each step more is replayed below
    assert_one_line(train("resume=killed", tiny=False), "runs/killed: another process runs it; wait")
    process.send_signal(signal.SIGKILL)
    process.wait()
    losses = losses_of_killed(tmp_path / "runs/killed")
    match = outcome_of(train("replay=killed", "run_name=again", tiny=False))
    again = losses_of(tmp_path / "runs/again")
    assert len(again) == int(match[2]) >= len(losses) > 0
    assert again[: len(losses)] == losses


@pytest.mark.slow
@pytest.mark.parametrize("left", [["config.json"], ["config.json", "manifest.json", "tape.bin", "chain.bin"]])
def test_a_run_stopped_before_its_tape_starts_again_in_its_folder(
    recorded: Path, train: Command, left: list[str]
) -> None:
    original, early = recorded / "runs/original", recorded / f"runs/early{len(left)}"
    early.mkdir()
    for name in left:
        (early / name).write_bytes((original / name).read_bytes() if name.endswith(".json") else b"")
    result = train(f"resume={early.name}", tiny=False, cwd=recorded)
    outcome_of(result)
    assert f"runs/{early.name}: stopped before its first step; starting it again" in result.stderr
    for name in ("tape.bin", "chain.bin"):
        assert (early / name).read_bytes() == (original / name).read_bytes()
    config, manifest = (json.loads((early / name).read_text()) for name in ("config.json", "manifest.json"))
    assert config["resume"] is None
    assert manifest["parent"] is None


@pytest.mark.slow
def test_a_model_that_does_not_fit_leaves_no_run(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    values = json.loads((recorded / "runs/original/config.json").read_text())
    monkeypatch.chdir(recorded)
    monkeypatch.setattr(plan, "fix_numerics", lambda *_: None)  # which outlasts the test
    monkeypatch.setattr(GPT, "to", full)
    with pytest.raises(UserError, match="the memory of device cpu is full"):
        run(build_config({**values, "runs_dir": "unmade"}, CONFIGS / "attn"))
    assert not (recorded / "unmade").exists()


@pytest.mark.slow
def test_where_the_probes_do_not_fit_their_own_keys_are_named(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named keys of the training, which may well fit."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    values = json.loads((recorded / "runs/original/config.json").read_text())
    values["probes"] |= {"attention_interval": 1, "sequences": 2}
    monkeypatch.chdir(recorded)
    monkeypatch.setattr(plan, "fix_numerics", lambda *_: None)  # which outlasts the test
    monkeypatch.setattr(InstrumentedPass, "_run", full)
    with pytest.raises(UserError, match=r"lower probes\.sequences=2, or give probes\.attention_interval=0"):
        run(build_config({**values, "runs_dir": str(tmp_path)}, CONFIGS / "attn"))


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_keeps_the_records(
    recorded: Path, text_file: Path, tmp_path: Path, train: Command
) -> None:
    """The kernel refuses to grow any file past a limit that the records pass within some dozen steps."""
    shutil.copytree(recorded / "data", tmp_path / "data")
    limited = tmp_path / "limited.py"
    limited.write_text(
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    interpreter, *script = train_command("train.steps=100000", "run_name=full", tiny=True, text_file=text_file)
    result = warm.run([interpreter, str(limited), *script], cwd=tmp_path, env=environment(), timeout=120)
    assert_one_line(result, "runs/full", "File too large")
    assert len(losses_of_killed(tmp_path / "runs/full")) > 5
    outcome_of(train("replay=full", "run_name=after", "train.steps=5", tiny=False))


def losses_of_killed(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]  # the last may be cut short
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]
