"""Metrics survive everything that W&B, the network and the disk can do to a run."""

import json
import math
import os
import pty
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

KEY = "a" * 40
RUN_CONFIG = {"seed": 3, "train": {"lr": 0.5}}
SUMMARY = {"outcome": "stable", "onset_step": None}


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


# A W&B server on this machine that answers as long as a run starts, and then no more.
SILENT_SERVER = """
import json, os, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if b"mutation UpsertBucket" in body and not started.is_set():
            started.set()
            project = {"id": "p", "name": "flashpoint", "entity": {"id": "e", "name": "someone"}}
            bucket = {"id": "b", "name": "n", "displayName": "n", "config": "{}", "project": project}
            data = {"upsertBucket": {"bucket": bucket, "inserted": True}}
        elif b"Server" in body or b"Viewer" in body:
            data = {"serverInfo": {"features": []}, "viewer": {"id": "v", "entity": "someone"}}
        else:
            time.sleep(1000)
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass

started = threading.Event()
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
import flashpoint.tracking
flashpoint.tracking._FINISH_TIMEOUT_SECONDS = 2
"""


def test_a_network_that_dies_during_the_run_does_not_hold_its_end(run: RunFolder) -> None:
    script = SILENT_SERVER + ONLINE + "assert started.is_set()\nsys.stdout.flush()\nos._exit(0)\n"
    result = subprocess.run(
        [sys.executable, "-c", script, str(run.path), "auto"],
        env={**environment(), "WANDB_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    (line,) = (run.path / "told").read_text().splitlines()
    assert "TimeoutError" in line
    assert float((run.path / "seconds").read_text()) < 20
    assert read_metrics(run.metrics)["loss"][1].tolist() == [1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_has_no_number_for_come_back(run: RunFolder, value: float) -> None:
    tracker = Tracker(run, TrackingConfig(wandb="disabled"), run_config={}, notify=print)
    tracker.log(7, {"loss": value})
    tracker.close({})
    record = json.loads(run.metrics.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record["step"] == 7
    assert read_metrics(run.metrics)["loss"][1].tolist() == pytest.approx([value], nan_ok=True)


def test_columns_have_one_type_each(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "loss": 1}\n{"step": 10, "val_loss": 2, "loss": "nan"}\n')
    columns = read_metrics(path)
    assert {name: steps.tolist() for name, (steps, _) in columns.items()} == {"loss": [0, 10], "val_loss": [10]}
    assert {(steps.dtype.name, values.dtype.name) for steps, values in columns.values()} == {("int64", "float64")}
    path.write_text("")
    assert read_metrics(path) == {}


@pytest.mark.parametrize("tail", [b'{"step": 1, "lo', b'{"step": 1, "lo\xce', b'{"step": 1, "loss": 2.0}'])
def test_a_last_line_cut_short_is_left_out(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "loss": 1.0}\n' + tail)
    assert read_metrics(path)["loss"][1].tolist() == [1.0]


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"step": 1, "lo',
        b"",
        b"\xff\xfe",
        b"\0\0\0\0",
        b"3",
        b'{"loss": 1.0}',
        b'{"step": 1.5, "loss": 1.0}',
        b'{"step": Infinity, "loss": 1.0}',
        b'{"step": 99999999999999999999, "loss": 1.0}',
        b'{"step": 1, "loss": "low"}',
        b'{"step": 1, "loss": null}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "loss": 1.0}\n' + damaged + b'\n{"step": 2, "loss": 1.0}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: damaged line"):
        read_metrics(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none: No such file"):
        read_metrics(tmp_path / "none")


LOGGING = """
import signal, sys
from pathlib import Path
from flashpoint.config import TrackingConfig
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import Tracker
tracker = Tracker(RunFolder(Path(sys.argv[1])), TrackingConfig(wandb="disabled"), run_config={}, notify=print)
for step in range(int(sys.argv[2])):
    tracker.log(step, {"loss": 1.0})
print("logged", flush=True)
signal.pause()
"""


def test_a_killed_process_leaves_every_line_it_logged(run: RunFolder) -> None:
    command = [sys.executable, "-c", LOGGING, str(run.path), "7"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.kill()
    assert read_metrics(run.metrics)["loss"][0].tolist() == list(range(7))


def test_a_process_killed_while_it_logs_leaves_a_readable_file(run: RunFolder) -> None:
    command = [sys.executable, "-c", LOGGING, str(run.path), str(10**9)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while not (run.metrics.exists() and run.metrics.stat().st_size > 100_000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    steps = read_metrics(run.metrics)["loss"][0]
    assert steps.tolist() == list(range(len(steps)))
    assert len(steps) > 1000


def test_a_full_disk_is_raised_to_the_run(run: RunFolder) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    result = subprocess.run(
        [sys.executable, "-c", LOGGING, str(run.path), str(10**6)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=limit,
    )
    assert "OSError: [Errno 27]" in result.stderr
    assert len(read_metrics(run.metrics)["loss"][0]) > 100
