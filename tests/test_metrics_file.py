"""``metrics.jsonl``: one line a step, readable whatever ends the run."""

import json
import math
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashpoint.config import TrackingConfig
from flashpoint.errors import UserError
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import Tracker, read_metrics
from tests.conftest import environment


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


def test_packed_metrics_are_read_like_others_and_their_damage_is_told(tmp_path: Path) -> None:
    lines = b'{"step": 0, "loss": 1.0}\n{"step": 5, "loss": 2.0}\n'
    run = RunFolder(tmp_path)
    packed = subprocess.run(["gzip", "-c"], input=lines, capture_output=True, check=True).stdout
    run.packed_metrics.write_bytes(packed)
    assert run.metrics == run.packed_metrics
    assert read_metrics(run.metrics)["loss"][1].tolist() == [1.0, 2.0]
    broken = bytearray(packed)
    broken[-6] ^= 1  # of the checksum
    for damaged in (packed[:-9], b"{" + packed[1:], bytes(broken), packed[:12] + b"\xff" * 8 + packed[20:]):
        run.packed_metrics.write_bytes(damaged)
        with pytest.raises(UserError, match=r"metrics\.jsonl\.gz: damaged .*; restore the file"):
            read_metrics(run.metrics)
