"""What a run recorded arrives at a W&B server: at once, or later with ``wandb sync``."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashpoint.run_folder import RunFolder
from flashpoint.tracking import read_metrics
from tests.conftest import environment
from tests.wandb_server import KEY, WandbServer

RECORD = """
import sys
from pathlib import Path
import numpy as np
from matplotlib.image import imsave
from flashpoint.config import TrackingConfig
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import Tracker
run = RunFolder(Path(sys.argv[1]))
config = TrackingConfig(wandb=sys.argv[2], tags=("a", "b"), group="sweep")
tracker = Tracker(run, config, run_config={"seed": 3, "train": {"lr": 0.5}}, notify=print)
for step in range(4, 7):
    tracker.log(step, {"loss": 3.0 - step, "layer/2/head/3/w_q_spectral_norm": 0.5 * step})
    tracker.log(step, {"val_loss": float("nan")})
picture, tape = run.path / "curves.png", run.tape
imsave(picture, np.linspace(0, 1, 16).reshape(4, 4))
tape.write_bytes(b"tape")
tracker.close({"outcome": "exploded", "onset_step": 5}, [picture], [tape])
"""


IMPATIENT = """
import os
os.environ["WANDB_HTTP_TIMEOUT"] = "1"
import flashpoint.wandb_service
flashpoint.wandb_service.FINISH_TIMEOUT_SECONDS = 2
"""

HASTY = """
import flashpoint.wandb_service
flashpoint.wandb_service.FINISH_TIMEOUT_SECONDS = flashpoint.wandb_service.GRACE_SECONDS = 1
"""
STOP = """
import os, signal
os.kill(tracker._service._process.pid, signal.SIGSTOP)
"""
FOLLOWING = """
following = RunFolder.create(run.path.parent, "following")
Tracker(following, TrackingConfig(wandb="offline"), run_config={}, notify=print).close({})
sys.exit(3)
"""


def python(
    tmp_path: Path, *arguments: str, server: WandbServer | None = None, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Ends once W&B's service has ended, too: it holds the pipes."""
    variables = {"HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    if server:
        variables |= {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result


def assert_complete(server: WandbServer, run: RunFolder) -> None:
    assert server.refused == []
    assert (server.run["project"], server.run["displayName"]) == ("flashpoint", "tracked")
    assert (server.run["groupName"], server.run["tags"]) == ("sweep", ["a", "b"])
    config = json.loads(server.run["config"])
    assert {name: config[name]["value"] for name in ("seed", "train")} == {"seed": 3, "train": {"lr": 0.5}}
    assert_drawn_over_steps(config["_wandb"]["value"]["m"])

    measured = [row for row in server.history if "loss" in row]
    assert [(row["step"], row["loss"]) for row in measured] == [(4, -1), (5, -2), (6, -3)]
    assert [row["layer/2/head/3/w_q_spectral_norm"] for row in measured] == [2, 2.5, 3]
    assert [row["heads/w_q_spectral_norm"]["_type"] for row in measured] == ["histogram"] * 3
    assert [row["step"] for row in server.history if math.isnan(row.get("val_loss", 0))] == [4, 5, 6]
    assert (server.summary["outcome"], server.summary["onset_step"]) == ("exploded", 5)
    (picture,) = [row["figures/curves"] for row in server.history if "figures/curves" in row]
    assert (picture["_type"], picture["width"]) == ("image-file", 4)
    assert server.files[picture["path"]] == (run.path / "curves.png").read_bytes()
    maps = [row["heat_map/w_q_spectral_norm"] for row in server.history if "heat_map/w_q_spectral_norm" in row]
    assert [(shown["_type"], shown["width"], shown["height"]) for shown in maps] == [("image-file", 720, 12)] * 3
    assert "layer 2, head 3 (top)" in maps[-1]["caption"]
    assert "steps 4 to 6" in maps[-1]["caption"]
    assert server.files[maps[-1]["path"]].startswith(b"\x89PNG")
    assert server.exit_code == 0


def assert_holds_the_records(server: WandbServer) -> None:
    assert server.files["artifact/tape.bin"] == b"tape"
    assert server.committed == [f"records-{server.run['name']}"]


def assert_drawn_over_steps(metrics: list[dict[str, Any]]) -> None:
    """W&B's protocol writes fields as numbers: 1 a name, 2 a pattern, 5 which of these, from 1, is the axis."""
    axis = next(number for number, metric in enumerate(metrics, 1) if metric.get("1") == "step")
    assert [metric["5"] for metric in metrics if metric.get("2") == "*"] == [axis]


def test_wandb_sync_takes_a_run_that_was_recorded_offline(run: RunFolder, tmp_path: Path) -> None:
    assert python(tmp_path, "-c", RECORD, str(run.path), "offline").stdout == ""
    (recorded,) = (run.path / "wandb").glob("offline-run-*")
    with WandbServer() as server:
        python(tmp_path, "-m", "wandb", "sync", str(recorded), server=server)
    assert_complete(server, run)
    assert_holds_the_records(server)
    assert list(recorded.glob("*.synced"))  # the client is done with it


def test_an_online_run_needs_no_sync(run: RunFolder, tmp_path: Path) -> None:
    with WandbServer() as server:
        assert python(tmp_path, "-c", RECORD, str(run.path), "online", server=server).stdout == ""
    assert_complete(server, run)
    assert_holds_the_records(server)
    assert not list((run.path / "wandb").glob("offline-run-*"))


def test_wandb_sync_brings_what_a_dying_network_kept_back(run: RunFolder, tmp_path: Path) -> None:
    with WandbServer(dies_after_start=True) as server:
        told = python(tmp_path, "-c", IMPATIENT + RECORD, str(run.path), "online", server=server).stdout
        assert "W&B is off" in told
        assert server.history == []
    (recorded,) = (run.path / "wandb").glob("run-*")
    with WandbServer() as server:
        python(tmp_path, "-m", "wandb", "sync", "--include-online", str(recorded), server=server)
    assert_complete(server, run)


@pytest.mark.parametrize("dies_at", ["ServerFeaturesQuery", "/upload/artifact/manifest"])
def test_a_network_that_dies_during_the_artifact_does_not_hold_the_end(
    run: RunFolder, tmp_path: Path, dies_at: str
) -> None:
    """In these two moments W&B's own limit of the end does not hold."""
    with WandbServer(dies_at=dies_at) as server:
        script = HASTY + RECORD + FOLLOWING
        told = python(tmp_path, "-c", script, str(run.path), "online", server=server, status=3).stdout
    (line,) = told.splitlines()
    assert "W&B is off for this run (TimeoutError: the upload did not end)" in line
    assert list((run.path.parent / "following/wandb").glob("offline-run-*"))


@pytest.mark.parametrize("end", ["tracker.close(", "sys.exit(3)  # tracker.close("])
def test_a_service_that_answers_nothing_does_not_hold_the_end(run: RunFolder, tmp_path: Path, end: str) -> None:
    script = HASTY + RECORD.replace("tracker.close(", STOP + end) + FOLLOWING
    python(tmp_path, "-c", script, str(run.path), "offline", status=3)
    assert read_metrics(run.metrics)["loss"][1].tolist() == [-1, -2, -3]
