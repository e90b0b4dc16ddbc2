"""Metrics survive everything that W&B, the network and the disk can do to a run."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imsave

from flashpoint.config import TrackingConfig
from flashpoint.errors import UserError
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import Tracker, read_metrics
from tests.conftest import environment

LEET = (
    "layer/2/head/1/w_q_spectral_norm", "flashpoint", "tracked", "sweep", "stable", "heads/w_q_spectral_norm",
    "figures/heat_map", "records-", "histogram", "image-file",
)  # fmt: skip
"""What W&B's own reader shows of a run that was recorded offline."""


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "tracked")


def tracked(run: RunFolder, mode: str) -> list[str]:
    """A short record; the lines told to the user."""
    lines: list[str] = []
    config = TrackingConfig(wandb=mode, tags=("a", "b"), group="sweep")  # type: ignore[arg-type]
    tracker = Tracker(run, config, run_config={"seed": 3, "train": {"lr": 0.5}}, notify=lines.append)
    for step in range(3):
        tracker.log(step, {"loss": 3.0 - step, "layer/2/head/1/w_q_spectral_norm": 0.5 * step})
        tracker.log(step, {"lr": 0.1})
    picture, record = run.path.parent / "heat_map.png", run.path.parent / "tape.bin"
    imsave(picture, np.zeros((4, 4)))
    record.write_bytes(b"tape")
    tracker.close({"outcome": "stable", "onset_step": None}, [picture], [record])
    return lines


def assert_complete(run: RunFolder) -> None:
    columns = read_metrics(run.metrics)
    assert columns["loss"][0].tolist() == [0, 1, 2]
    assert columns["loss"][1].tolist() == [3.0, 2.0, 1.0]
    assert columns["lr"][1].tolist() == [0.1] * 3
    assert columns["layer/2/head/1/w_q_spectral_norm"][1].tolist() == [0.0, 0.5, 1.0]


def test_without_a_login_wandb_records_offline(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    assert tracked(run, "auto") == []
    assert_complete(run)
    (offline,) = (run.path / "wandb").glob("offline-run-*")
    shown = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(offline)],
        capture_output=True, text=True, env=environment(), timeout=60, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    for fragment in LEET:
        assert fragment in shown.stdout
    assert capfd.readouterr().out == ""


def test_disabled_writes_nothing_for_wandb(run: RunFolder) -> None:
    assert tracked(run, "disabled") == []
    assert_complete(run)
    assert [path.name for path in run.path.iterdir()] == ["metrics.jsonl"]


def test_online_without_a_login_is_offline_at_once_and_says_so(run: RunFolder) -> None:
    started = time.monotonic()
    (line,) = tracked(run, "online")
    assert time.monotonic() - started < 10
    assert "wandb login" in line
    assert list((run.path / "wandb").glob("offline-run-*"))
    assert_complete(run)


def test_wandb_mode_in_the_environment_decides_for_auto(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracked(run, "auto") == []
    assert not (run.path / "wandb").exists()


class Failing:
    """A wandb module of which one call fails."""

    summary: dict[str, Any]

    def __init__(self, failing: str) -> None:
        self.failing, self.summary = failing, {}

    def _maybe_fail(self, name: str) -> None:
        if name == self.failing:
            raise RuntimeError("the service\nis gone")

    def init(self, **_: object) -> "Failing":
        self._maybe_fail("init")
        return self

    def define_metric(self, *_: object, **__: object) -> None:
        pass

    def log(self, *_: object, **__: object) -> None:
        self._maybe_fail("log")

    def finish(self) -> None:
        self._maybe_fail("finish")

    def Settings(self, **_: object) -> None:
        return None


@pytest.mark.parametrize("failing", ["import", "init", "log", "finish"])
def test_whatever_fails_in_wandb_is_one_line_and_the_run_goes_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None if failing == "import" else Failing(failing))  # type: ignore[arg-type]
    (line,) = tracked(run, "offline")
    assert "W&B is off" in line
    assert "\n" not in line
    assert_complete(run)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_has_no_number_for_come_back(run: RunFolder, value: float) -> None:
    tracker = Tracker(run, TrackingConfig(wandb="disabled"), run_config={}, notify=print)
    tracker.log(7, {"loss": value})
    tracker.close({})
    record = json.loads(run.metrics.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record["step"] == 7
    assert read_metrics(run.metrics)["loss"][1].tolist() == pytest.approx([value], nan_ok=True)


def test_a_last_line_cut_short_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    assert read_metrics(path)["loss"][1].tolist() == [1.0]
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: damaged line"):
        read_metrics(path)
    with pytest.raises(UserError, match="none"):
        read_metrics(tmp_path / "none")


SCRIPT = """
import sys, time
from pathlib import Path
from flashpoint.config import TrackingConfig
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import Tracker
tracker = Tracker(RunFolder(Path(sys.argv[1])), TrackingConfig(wandb="disabled"), run_config={}, notify=print)
for step in range(10**6):
    tracker.log(step, {"loss": 1.0})
    if step == 100:
        print("going", flush=True)
"""


def test_a_killed_process_leaves_a_readable_record(run: RunFolder) -> None:
    command = [sys.executable, "-c", SCRIPT, str(run.path)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    process.kill()
    process.wait()
    assert len(read_metrics(run.metrics)["loss"][0]) > 100


def test_a_full_disk_is_raised_to_the_run(run: RunFolder) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run.path)],
        env=environment(), capture_output=True, text=True, preexec_fn=limit, check=False,
    )  # fmt: skip
    assert "OSError: [Errno 27]" in result.stderr
    assert len(read_metrics(run.metrics)["loss"][0]) > 100
