"""What a run hands to W&B arrives there, and nothing that W&B or the network does reaches the run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imsave

from flashpoint.files import write_json
from flashpoint.lab.config import Config, DataConfig, ProbesConfig, TrackingConfig, TrainConfig
from flashpoint.lab.wandb_tracking.listener import WandbListener
from flashpoint.logs.wandb_file import read_wandb_file
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import Outcome
from tests import warm
from tests.conftest import Command, environment, train_command
from tests.lab.wandb_tracking.server import KEY, WandbServer
from tests.records import MANIFEST
from tests.watching.loops import loop

pytestmark = pytest.mark.usefixtures("no_login")
forked = pytest.mark.usefixtures("forked_wandb")
"""The tests without it have clients as users have them."""
SYNC = (sys.executable, "-m", "wandb", "sync")


def outcome(run: RunFolder) -> Outcome:
    return Outcome(
        outcome="exploded", step=7, onset_step=5, nonfinite=None, loss=1.0, val_loss=None, val_step=None, digest="d",
        chain_digest="c", weights_digest="w", tape_digest="t", tape_steps=7, interrupted=None, seconds=1.0,
        run=str(run.path),
    )  # fmt: skip


def track(run: RunFolder, mode: str, finish_seconds: float = 60.0, **ended: Any) -> None:
    """Three steps of a run with one layer of two heads, a figure and a tape."""
    write_json(run.manifest, dict(MANIFEST))
    config = TrackingConfig(wandb=mode, tags=("a", "b"), group="sweep")  # type: ignore[arg-type]
    listener = WandbListener(config, finish_seconds)
    write_json(run.config, Config(seed=3).to_dict())
    listener.begun(run, 0)
    for step in range(4, 7):
        listener.logged(step, {"loss": 3.0 - step})
        listener.logged(step, {"w_q_spectral_norm": np.array([[0.25 * step, 0.5 * step]])})
        listener.logged(step, {"val_loss": math.nan})
    (run.path / "report/figures").mkdir(parents=True)
    imsave(run.path / "report/figures/layers.png", np.linspace(0, 1, 16).reshape(4, 4))
    run.tape.write_bytes(b"tape")
    listener.ended(run, dataclasses.replace(outcome(run), **ended))


def track_steps(run: RunFolder, mode: str, steps: range) -> None:
    """Begin at the first of the steps, as a new run or a resumed one; log and end."""
    write_json(run.manifest, dict(MANIFEST))
    write_json(run.config, Config(train=TrainConfig(steps=steps.stop)).to_dict())
    listener = WandbListener(TrackingConfig(wandb=mode), 60.0)  # type: ignore[arg-type]
    listener.begun(run, steps.start)
    for step in steps:
        listener.logged(step, {"loss": float(step)})
    listener.ended(run, dataclasses.replace(outcome(run), step=steps.stop))


def login(monkeypatch: pytest.MonkeyPatch, server: WandbServer) -> None:
    for name, value in {"BASE_URL": server.url, "API_KEY": KEY, "ERROR_REPORTING": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)


def offline_lines(run: RunFolder) -> list[dict[str, Any]]:
    """The one offline run in the folder, as W&B's own command reads it."""
    (folder,) = (run.path / "wandb").glob("offline-run-*")
    return lines_of(folder)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    from wandb.util import get_core_path

    (file,) = folder.glob("*.wandb")
    arguments = ("--no-observability", "--json", "--run-file", str(file), str(folder.parent))
    command = [get_core_path(), "leet", "inspect", *arguments]  # as "wandb leet inspect" calls it
    shown = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60)
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


@pytest.mark.slow
@forked
def test_offline_everything_is_kept_on_the_disk(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    track(run, "offline")
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{run.path}/wandb" in line
    lines = offline_lines(run)
    (started,) = [line["run"] for line in lines if line["type"] == "run"]
    assert started["config"]["update"]["seed"] == 3
    assert (started["display_name"], started["project"], started["run_group"]) == ("tracked", "flashpoint", "sweep")
    assert started["tags"] == ["a", "b", "a CPU"]
    rows = [line["history"]["item"] for line in lines if line["type"] == "history"]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(4, -1), (5, -2), (6, -3)]
    norms = [row for row in rows if "layer/1/head/2/w_q_spectral_norm" in row]
    assert [row["layer/1/head/2/w_q_spectral_norm"] for row in norms] == [2, 2.5, 3]
    assert [sum(row["heads/w_q_spectral_norm.values"]) for row in norms] == [2, 2, 2]  # two heads
    assert sum("heat_map/w_q_spectral_norm.path" in row for row in rows) == 3
    assert sum("figures/layers.path" in row for row in rows) == 1
    (artifact,) = [line["artifact"] for line in lines if line["type"] == "artifact"]
    assert {entry["path"] for entry in artifact["manifest"]["contents"]} == {"tape.bin", "manifest.json", "config.json"}
    axes = [line["metric"] for line in lines if line["type"] == "metric"]
    assert any((axis.get("glob_name"), axis.get("step_metric")) == ("*", "step") for axis in axes)
    summary: dict[str, Any] = {}
    for line in lines:
        summary |= line.get("summary", {}).get("update", {})
    assert (summary["outcome"], summary["onset_step"]) == ("exploded", 5)


@pytest.mark.slow
@forked
@pytest.mark.parametrize("asked", [False, True])
def test_paths_of_this_machine_are_handed_over_where_they_are_asked_for(run: RunFolder, asked: bool) -> None:
    data = DataConfig(source="text", path="/home/somebody/secret/words.txt", root="/home/somebody/data")
    probes = ProbesConfig(attention=("ties", "/home/somebody/own.py:Mine"))
    tracking = TrackingConfig(paths=asked)
    config = Config(data=data, probes=probes, tracking=tracking, replay="/home/somebody/runs/first")
    write_json(run.config, {**config.to_dict(), "runs_dir": "/home/somebody/runs"})
    off = {"probe": "/home/somebody/own.py:Mine", "step": 2, "error": "/home/somebody/own.py:3: no a/b of 1/2"}
    environment = {**MANIFEST["environment"], "command": ["train.py", "data.path=/home/somebody/secret/words.txt"]}
    parent = {"run": "/home/somebody/runs/first", "from_step": None}
    records = {**MANIFEST, "environment": environment, "parent": parent, "probes_off": [off]}
    write_json(run.manifest, {**records, "data": {**MANIFEST["data"], "path": "/home/somebody/data/text-bpe-12"}})
    listener = WandbListener(tracking, 60.0)
    listener.begun(run, 0)
    listener.logged(1, {"loss": 1.0})
    listener.ended(run, dataclasses.replace(outcome(run), run=f"/home/somebody/runs/{run.path.name}"))
    folder = next((run.path / "wandb").glob("offline-run-*"))
    told = [line for line in lines_of(folder) if line["type"] != "header"]
    (artifact,) = [line["artifact"] for line in told if line["type"] == "artifact"]
    kept = [Path(entry.pop("local_path")) for entry in artifact["manifest"]["contents"]]
    uploaded = json.dumps(told) + "".join(path.read_text(errors="replace") for path in kept)
    uploaded += "".join(path.read_text() for path in (folder / "files").iterdir() if path.is_file())
    for private in ("/home/somebody", str(run.path)):
        assert (private in uploaded) == asked, private
    (started,) = [line["run"] for line in told if line["type"] == "run"]
    assert (started["host"] == platform.node()) == asked
    for name in ("words.txt", "own.py:Mine", "first", "text-bpe-12", "no a/b of 1/2"):
        assert name in uploaded


@pytest.mark.slow
@forked
@pytest.mark.parametrize("asked", [False, True])
def test_a_watched_loop_hands_over_paths_where_it_asks_for_it(tmp_path: Path, asked: bool) -> None:
    run = loop(tmp_path, wandb="offline", wandb_paths=asked)
    assert run.folder is not None
    lines = offline_lines(run.folder)
    (started,) = [line["run"] for line in lines if line["type"] == "run"]
    assert (started["host"] == platform.node()) == asked
    summaries = json.dumps([line["summary"] for line in lines if line["type"] == "summary"])
    assert "own" in summaries
    assert (str(tmp_path) in summaries) == asked


@pytest.mark.slow
@forked
def test_a_loss_of_nan_stands_in_no_summary_once_a_number_follows_nor_in_the_configuration(run: RunFolder) -> None:
    """W&B's own minimum, maximum and mean of a metric stay NaN after one, and of NaN in a configuration it keeps
    none."""
    losses = [3.0, math.nan, 1.0]
    write_json(run.manifest, dict(MANIFEST))
    write_json(run.config, Config().to_dict())
    listener = WandbListener(TrackingConfig(wandb="offline"), 60.0)
    listener.begun(run, 0)
    for step, loss in enumerate(losses):
        listener.logged(step, {"loss": loss, "w_q_spectral_norm": np.full((1, 40), loss)})
    listener.ended(run, dataclasses.replace(outcome(run), val_loss=math.nan))

    lines = offline_lines(run)
    (kept,) = [line["run"]["config"]["update"] for line in lines if line["type"] == "run"]
    assert json.loads(json.dumps(Config().to_dict())) == {name: kept[name] for name in kept if name != "_wandb"}
    summary: dict[str, Any] = {}
    for line in lines:
        summary |= line.get("summary", {}).get("update", {})
    assert [name for name, value in summary.items() if str(value).lower() == "nan"] == ["val_loss"]
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    rows = [values for _, values in read_wandb_file(file).rows]
    np.testing.assert_array_equal([row["loss"] for row in rows if "loss" in row], losses)
    of_head = "layer/1/head/40/w_q_spectral_norm"
    np.testing.assert_array_equal([row[of_head] for row in rows if of_head in row], losses)


def children() -> set[str]:
    return {child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()}


@pytest.mark.slow
def test_of_a_run_that_fails_the_client_keeps_what_it_has_and_ends(run: RunFolder) -> None:
    """It lived on beside the next runs of the process."""
    write_json(run.manifest, dict(MANIFEST))
    write_json(run.config, Config().to_dict())
    before = children()
    listener = WandbListener(TrackingConfig(wandb="offline"), 60.0)
    listener.begun(run, 0)
    listener.logged(3, {"loss": 2.0})
    assert children() - before
    listener.failed(run)
    assert not children() - before
    rows = [line["history"]["item"] for line in offline_lines(run) if line["type"] == "history"]
    assert [(row["step"], row["loss"]) for row in rows] == [(3, 2)]


@pytest.mark.slow
@forked
def test_a_process_that_the_run_forked_does_not_hold_up_its_end(
    run: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers of a DataLoader have the pipe to the client open, too: it waited for its end until it was killed."""
    write_json(run.manifest, dict(MANIFEST))
    write_json(run.config, Config().to_dict())
    listener = WandbListener(TrackingConfig(wandb="offline"), 30.0)
    listener.begun(run, 0)
    worker = os.fork()
    if not worker:
        signal.pause()
    try:
        listener.logged(3, {"loss": 2.0})
        listener.ended(run, outcome(run))
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    assert "did not end" not in capfd.readouterr().err
    assert any(line["type"] == "exit" for line in offline_lines(run))


@pytest.mark.slow
def test_with_a_login_it_arrives_at_once(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with WandbServer() as server:
        login(monkeypatch, server)
        track(run, "online")
    assert_arrived(server)


@pytest.mark.slow
def test_a_whole_run_is_tracked_with_its_hardware_and_uploads_nothing_unasked(train: Command, tmp_path: Path) -> None:
    """There is a login in its environment, and one in a file."""
    (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {KEY}")
    with WandbServer() as server:
        asked = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "WANDB_MODE": "online", "HOME": str(tmp_path)}
        others = {"HTTPS_PROXY": server.url, "HTTP_PROXY": server.url}  # whoever else is called
        tracked = ("tracking=offline", "tracking.tags=[mine]", "run_name=kept")
        result = train(*tracked, env={**environment(), **asked, **others})
        assert result.returncode == 0, result.stderr
        assert server.connections == 0
    folder = RunFolder(tmp_path / "runs/kept")
    lines = offline_lines(folder)
    (started,) = [line["run"] for line in lines if line["type"] == "run"]
    assert started["tags"] == ["mine", json.loads(folder.manifest.read_text())["hardware"]]
    assert any("heat_map/w_q_spectral_norm.path" in line.get("history", {}).get("item", {}) for line in lines)


@pytest.mark.slow
@forked
def test_online_without_a_login_is_kept_on_the_disk(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    track(run, "online")
    (line,) = capfd.readouterr().err.splitlines()
    assert "no login" in line
    assert f"{run.path}/wandb" in line
    assert offline_lines(run)


@pytest.mark.slow
@forked
def test_a_run_that_was_ended_early_is_stopped_in_its_summary(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with WandbServer() as server:
        login(monkeypatch, server)
        track(run, "online", outcome="stable", onset_step=None, interrupted="SIGTERM")
    assert (server.summary["outcome"], server.summary["interrupted"]) == ("stopped", "SIGTERM")


@pytest.mark.slow
@forked
def test_wandb_sync_brings_what_a_dying_network_kept_back(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_HTTP_TIMEOUT", "1")
    with WandbServer(dies_after_start=True) as server:
        login(monkeypatch, server)
        track(run, "online", finish_seconds=2)
        assert server.history == []
    assert "W&B" in capfd.readouterr().err
    (kept,) = (run.path / "wandb").glob("run-*")
    with WandbServer() as server:
        login(monkeypatch, server)
        warm.run([*SYNC, "--include-online", str(kept)], cwd=run.path, env=os.environ).check_returncode()
    assert [row["loss"] for row in server.history if "loss" in row] == [-1, -2, -3]


@pytest.mark.slow
@forked
@pytest.mark.parametrize("modes", [("online", "online"), ("offline", "offline"), ("online", "offline")])
def test_a_resumed_run_goes_on_as_the_same_run_with_or_without_a_login(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, modes: tuple[str, str]
) -> None:
    """From a checkpoint before the last step that was logged."""
    with WandbServer() as server:
        login(monkeypatch, server)
        for mode, steps in zip(modes, (range(4), range(2, 6)), strict=True):
            track_steps(run, mode, steps)
        if "offline" in modes:
            warm.run([*SYNC, "--yes"], cwd=run.path, env=os.environ).check_returncode()
    assert len(server.ids) == 1
    rows = [row for row in server.history if "loss" in row]
    assert [(row["step"], row["loss"]) for row in rows] == [(step, step) for step in (0, 1, 2, 3, 2, 3, 4, 5)]
    assert [row["_step"] for row in server.history] == list(range(len(server.history)))  # W&B refuses others
    assert json.loads(server.run["config"])["train"]["value"]["steps"] == 6
    assert server.summary["step"] == 6
    assert server.refused == []


@pytest.mark.slow
@forked
def test_a_part_on_the_disk_takes_no_place_of_what_went_on_online(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WandbServer() as server:
        login(monkeypatch, server)
        track_steps(run, "offline", range(2))
        track_steps(run, "online", range(2, 4))
        warm.run([*SYNC, "--yes"], cwd=run.path, env=os.environ).check_returncode()
    assert len(server.ids) == 1
    assert sorted(row["loss"] for row in server.history if "loss" in row) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_resume_is_the_same_run_and_a_replay_or_a_branch_another(train: Command, tmp_path: Path) -> None:
    for arguments in (
        ["run_name=one", "train.steps=2", "checkpoints.interval=2", "tracking=offline"],
        ["resume=one", "train.steps=4"],
        ["replay=one", "run_name=again", "tracking=offline"],
        ["replay=one", "from_step=2", "run_name=branch", "tracking=offline"],
    ):
        result = train(*arguments, tiny="run_name=one" in arguments)
        assert result.returncode == 0, result.stderr
    ids = {
        name: [next(line["run"]["run_id"] for line in lines_of(folder) if line["type"] == "run") for folder in folders]
        for name in ("one", "again", "branch")
        if (folders := sorted((tmp_path / f"runs/{name}/wandb").glob("offline-run-*")))
    }
    first, resumed = ids["one"]
    assert first == resumed
    assert len({first, *ids["again"], *ids["branch"]}) == 3


def assert_arrived(server: WandbServer) -> None:
    assert server.refused == []
    assert (server.run["displayName"], server.run["groupName"]) == ("tracked", "sweep")
    assert [(row["step"], row["loss"]) for row in server.history if "loss" in row] == [(4, -1), (5, -2), (6, -3)]
    assert [row["step"] for row in server.history if math.isnan(row.get("val_loss", 0))] == [4, 5, 6]
    assert (server.summary["outcome"], server.summary["onset_step"]) == ("exploded", 5)
    assert sum("figures/layers" in row for row in server.history) == 1
    assert server.files["artifact/tape.bin"] == b"tape"
    assert server.exit_code == 0


BROKEN = {
    "killed": "import os\nos.kill(os.getpid(), 9)",
    "exit": "raise SystemExit(3)",
    "import": "raise ImportError('no such library')",
    "init": "class Settings:\n  def __init__(self, **_): self.base_url = ''\ndef init(**_): raise RuntimeError('gone')",
}


@pytest.mark.slow
@pytest.mark.parametrize("failing", BROKEN)
def test_whatever_fails_in_wandb_is_one_line(
    run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    failing: str,
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/wandb.py").write_text(BROKEN[failing])
    monkeypatch.syspath_prepend(tmp_path / "broken")
    track(run, "offline")
    _where, line = capfd.readouterr().err.splitlines()
    assert line.startswith("W&B is off for this run (")


@pytest.mark.slow
def test_a_client_that_answers_nothing_is_ended(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/wandb.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.setattr("flashpoint.lab.wandb_tracking.listener.GRACE_SECONDS", 1.0)
    track(run, "offline", finish_seconds=1)
    _where, line = capfd.readouterr().err.splitlines()
    assert "did not end" in line


NETRC_FILES = [
    ("", False),
    (f"machine api.wandb.ai login user password {KEY}", True),
    (f"machine example.org login user password {KEY}", False),
    ("mach", False),
]


@pytest.mark.slow
@forked
@pytest.mark.parametrize(("netrc", "found"), NETRC_FILES)
def test_a_login_is_a_key_in_a_netrc_file(tmp_path: Path, netrc: str, found: bool) -> None:
    (tmp_path / ".netrc").write_text(netrc)  # HOME is here
    assert logs_in(tmp_path) == found


@pytest.mark.slow
@forked
@pytest.mark.parametrize(("netrc", "found"), NETRC_FILES[:2])
def test_a_login_is_found_also_where_the_environment_says_offline(tmp_path: Path, netrc: str, found: bool) -> None:
    (tmp_path / ".netrc").write_text(netrc)
    assert logs_in(tmp_path, WANDB_MODE="offline") == found


@pytest.mark.slow
@forked
def test_a_login_is_a_key_in_the_environment_whatever_a_netrc_file_has(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("mach")
    assert logs_in(tmp_path, WANDB_API_KEY=KEY)


def logs_in(folder: Path, **variables: str) -> bool:
    """Whether a process of its own finds a login: W&B keeps what it has found."""
    program = folder / "asks.py"
    program.write_text("from flashpoint.lab.wandb_tracking.client import without_login; print(not without_login())")
    result = warm.run([sys.executable, str(program)], env={**os.environ, **variables})
    assert result.returncode == 0, result.stderr
    return result.stdout == "True\n"


@pytest.mark.slow
@forked
def test_a_login_that_wandb_cannot_read_is_one_line_and_all_is_kept_on_the_disk(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "no key")
    track(run, "online")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("W&B: the login cannot be read (")
    assert f"{run.path}/wandb" in line
    assert list((run.path / "wandb").glob("offline-run-*"))


@pytest.mark.slow
def test_a_run_without_wandb_has_its_page(tmp_path: Path, text_file: Path) -> None:
    interpreter, *script = train_command("tracking=disabled", "run_name=alone", tiny=True, text_file=text_file)
    drawn = tmp_path / "drawn.py"  # the other runs of such processes have no page
    drawn.write_text(
        "import runpy, sys\nfrom flashpoint.lab.report import ending, page\n"
        "ending.write_report = page.write_report\n"
        "del sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [interpreter, str(drawn), *script]
    warm.run(command, cwd=tmp_path, env=environment(), timeout=120).check_returncode()
    assert (tmp_path / "runs/alone/report/report.html").is_file()
    assert not (tmp_path / "runs/alone/wandb").exists()
