"""Metrics survive everything that W&B and the network can do to a run."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imsave

from flashpoint.config import TrackingConfig
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import Tracker, read_metrics
from tests.conftest import Command, environment
from tests.wandb_server import KEY, WandbServer

pytestmark = pytest.mark.usefixtures("no_login")

RUN_CONFIG = {"seed": 3, "train": {"lr": 0.5}}
SUMMARY = {"outcome": "stable", "onset_step": None}


def tracked(run: RunFolder, mode: str) -> list[str]:
    """A short record; the lines told to the user."""
    lines: list[str] = []
    config = TrackingConfig(wandb=mode, tags=("a", "b"), group="sweep")  # type: ignore[arg-type]
    tracker = Tracker(run, config, run_config=RUN_CONFIG, notify=lines.append)
    for step in range(3):
        tracker.log(step, {"loss": 3.0 - step, "layer/2/head/1/w_q_spectral_norm": 0.5 * step})
        tracker.log(step, {"lr": 0.1})
    picture, record = run.path.parent / "heat_map.png", run.path.parent / "tape.bin"
    imsave(picture, np.zeros((4, 4)))
    record.write_bytes(b"tape")
    tracker.close(SUMMARY, [picture], [record])
    return lines


def assert_complete(run: RunFolder) -> None:
    columns = read_metrics(run.metrics)
    assert columns["loss"][0].tolist() == [0, 1, 2]
    assert columns["loss"][1].tolist() == [3.0, 2.0, 1.0]
    assert columns["lr"][1].tolist() == [0.1] * 3
    assert columns["layer/2/head/1/w_q_spectral_norm"][1].tolist() == [0.0, 0.5, 1.0]


def offline_records(run: RunFolder) -> list[dict[str, Any]]:
    """The one offline run in the folder, as W&B's own command reads it."""
    (folder,) = (run.path / "wandb").glob("offline-run-*")
    shown = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    return [json.loads(line) for line in shown.stdout.splitlines()]


def test_without_a_login_wandb_records_everything_offline(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert tracked(run, "auto") == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert capfd.readouterr() == ("", "")
    assert_complete(run)

    records = offline_records(run)
    (started,) = [record["run"] for record in records if record["type"] == "run"]
    assert {name: started["config"]["update"][name] for name in RUN_CONFIG} == RUN_CONFIG
    assert (started["display_name"], started["project"]) == ("tracked", "flashpoint")
    assert (started["run_group"], started["tags"]) == ("sweep", ["a", "b"])
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(0, 3), (1, 2), (2, 1)]
    norms = [row["layer/2/head/1/w_q_spectral_norm"] for row in rows if "loss" in row]
    assert norms == [0, 0.5, 1]
    assert [(row["step"], row["lr"]) for row in rows if "lr" in row] == [(0, 0.1), (1, 0.1), (2, 0.1)]
    assert [sum(row["heads/w_q_spectral_norm.values"]) for row in rows if "loss" in row] == [1, 1, 1]  # one head
    (picture,) = [row for row in rows if "figures/heat_map.path" in row]
    assert (picture["figures/heat_map._type"], picture["figures/heat_map.width"]) == ("image-file", 4)
    (artifact,) = [record["artifact"] for record in records if record["type"] == "artifact"]
    assert [entry["path"] for entry in artifact["manifest"]["contents"]] == ["tape.bin"]
    axes = [record["metric"] for record in records if record["type"] == "metric"]
    assert any((axis.get("glob_name"), axis.get("step_metric")) == ("*", "step") for axis in axes)
    summary: dict[str, Any] = {}
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    assert {name: summary[name] for name in SUMMARY} == SUMMARY


def test_disabled_writes_nothing_for_wandb(run: RunFolder) -> None:
    assert tracked(run, "disabled") == []
    assert_complete(run)
    assert [path.name for path in run.path.iterdir()] == ["metrics.jsonl"]


def test_disabled_does_not_import_wandb(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    assert tracked(run, "disabled") == []


LOGINS = {
    "none": {},
    "key": {"WANDB_API_KEY": KEY},
    "netrc": {".netrc": f"machine api.wandb.ai login user password {KEY}"},
    "netrc of the newer host": {".netrc": f"machine api.forge.coreweave.com login user password {KEY}"},
    "another netrc": {"NETRC": "elsewhere", "elsewhere": f"machine api.wandb.ai login user password {KEY}"},
    "another host": {".netrc": f"machine example.org login user password {KEY}"},
    "unreadable netrc": {".netrc": "mach"},
}


@pytest.mark.parametrize(
    ("mode", "wandb_mode", "login", "chosen"),
    [
        ("auto", None, "none", "offline"),
        ("auto", None, "key", "online"),
        ("auto", None, "netrc", "online"),
        ("auto", None, "netrc of the newer host", "online"),
        ("auto", None, "another netrc", "online"),
        ("auto", None, "another host", "offline"),
        ("auto", None, "unreadable netrc", "offline"),
        ("auto", "online", "key", "online"),
        ("auto", "offline", "key", "offline"),
        ("auto", "dryrun", "key", "offline"),
        ("auto", "disabled", "key", None),
        ("online", "disabled", "key", "online"),
        ("offline", "online", "key", "offline"),
        ("disabled", "online", "key", None),
    ],
)
def test_the_mode_follows_the_login_and_wandb_mode_rules_auto_only(
    run: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mode: str,
    wandb_mode: str | None,
    login: str,
    chosen: str | None,
) -> None:
    import wandb

    for name, value in LOGINS[login].items():
        if name.isupper():
            monkeypatch.setenv(name, str(tmp_path / value) if name == "NETRC" else value)
        else:
            (tmp_path / name).write_text(value + "\n")
    if wandb_mode:
        monkeypatch.setenv("WANDB_MODE", wandb_mode)
    modes: list[str] = []

    def init(**settings: Any) -> Any:
        modes.append(settings["mode"])
        raise RuntimeError("not in this test")

    monkeypatch.setattr(wandb, "init", init)
    tracked(run, mode)
    assert modes == ([chosen] if chosen else [])


ONLINE = """
import sys, time
from pathlib import Path
from flashpoint.config import TrackingConfig
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import Tracker
began = time.monotonic()
lines = []
tracker = Tracker(
    RunFolder(Path(sys.argv[1])), TrackingConfig(wandb=sys.argv[2]), run_config={}, notify=lines.append
)
tracker.log(0, {"loss": 1.0})
tracker.close({})
Path(sys.argv[1], "told").write_text("\\n".join(lines))
Path(sys.argv[1], "seconds").write_text(str(time.monotonic() - began))
"""


@pytest.mark.parametrize(("mode", "variables"), [("online", {}), ("auto", {"WANDB_MODE": "online"})])
def test_online_without_a_login_goes_offline_and_never_prompts(
    run: RunFolder, mode: str, variables: dict[str, str]
) -> None:
    terminal, inside = pty.openpty()  # without a terminal W&B would not dare to prompt
    process = subprocess.Popen(
        [sys.executable, "-c", ONLINE, str(run.path), mode],
        env={**environment(), **variables},
        stdin=inside,
        stdout=inside,
        stderr=inside,
    )
    os.close(inside)
    try:
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    (line,) = (run.path / "told").read_text().splitlines()
    assert "no W&B login is stored; logging offline" in line
    assert float((run.path / "seconds").read_text()) < 5
    assert list((run.path / "wandb").glob("offline-run-*"))
    assert read_metrics(run.metrics)["loss"][1].tolist() == [1.0]


@pytest.mark.parametrize("failing", ["import", "init", "log", "finish"])
def test_whatever_fails_in_wandb_is_one_line_and_the_run_goes_on(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    import wandb

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the service\nis gone")

    if failing == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    else:
        monkeypatch.setattr(wandb if failing == "init" else wandb.Run, failing, fail)
    (line,) = tracked(run, "offline")
    assert "W&B is off" in line
    assert ("import of wandb halted" if failing == "import" else "RuntimeError: the service is gone") in line
    assert_complete(run)


def test_a_run_that_wandb_failed_is_not_the_next_ones(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    with monkeypatch.context() as broken:
        broken.setattr(wandb.Run, "log", lambda *_: 1 / 0)
        assert len(tracked(run, "offline")) == 1
    following = RunFolder.create(tmp_path / "runs", "following")
    assert tracked(following, "offline") == []
    (started,) = [record["run"] for record in offline_records(following) if record["type"] == "run"]
    assert started["display_name"] == "following"


def test_a_network_that_dies_during_the_run_does_not_hold_its_end(run: RunFolder) -> None:
    impatient = "import flashpoint.wandb_service\nflashpoint.wandb_service.FINISH_TIMEOUT_SECONDS = 2\n"
    with WandbServer(dies_after_start=True) as server:
        result = subprocess.run(
            [sys.executable, "-c", impatient + ONLINE, str(run.path), "auto"],
            env={**environment(), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert server.run
    (line,) = (run.path / "told").read_text().splitlines()
    assert "TimeoutError" in line
    assert float((run.path / "seconds").read_text()) < 20
    assert read_metrics(run.metrics)["loss"][1].tolist() == [1.0]


def test_a_whole_run_is_tagged_with_its_hardware(train: Command, tmp_path: Path) -> None:
    result = train("tracking=offline", "tracking.tags=[mine]", "run_name=tagged")
    assert result.returncode == 0, result.stderr
    records = offline_records(RunFolder(tmp_path / "runs/tagged"))
    (started,) = [record["run"] for record in records if record["type"] == "run"]
    hardware = json.loads((tmp_path / "runs/tagged/manifest.json").read_text())["hardware"]
    assert started["tags"] == ["mine", hardware]
    assert any("heat_map/w_q_spectral_norm.path" in record.get("history", {}).get("item", {}) for record in records)
