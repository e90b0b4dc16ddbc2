"""``metrics.jsonl``: one line a step, readable whatever ends the run."""

import json
import lzma
import math
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from flashpoint.errors import UserError
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metrics import MetricsFile, read_metrics, steps_logged
from tests.conftest import environment


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_has_no_number_for_come_back(run: RunFolder, value: float) -> None:
    file = MetricsFile(run.metrics)
    file.log(7, {"loss": value, "norm": np.array([[1.0, value]])})
    file.close()
    record = json.loads(run.metrics.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record["step"] == 7
    columns = read_metrics(run.metrics)
    assert columns["loss"][1].tolist() == pytest.approx([value], nan_ok=True)
    assert columns["norm"][1].ravel().tolist() == pytest.approx([1.0, value], nan_ok=True)


def test_metrics_of_heads_are_layers_of_heads_whatever_wrote_them(run: RunFolder) -> None:
    norms = np.arange(12.0).reshape(2, 2, 3)  # of 2 steps, 2 layers and 3 heads
    old = [
        {"step": step, **{f"layer/{i + 1}/head/{j + 1}/norm": norms[step, i, j] for i in range(2) for j in range(3)}}
        for step in range(2)
    ]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in old))
    file = MetricsFile(run.metrics, first_step=1)  # goes on with an older file
    file.log(1, {"loss": 0.5, "norm": norms[1].astype(np.float32)})
    file.close()
    *_, last = run.metrics.read_text().splitlines()
    assert json.loads(last) == {"step": 1, "loss": 0.5, "norm": [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]}
    steps, values = read_metrics(run.metrics)["norm"]
    assert steps.tolist() == [0, 1]
    np.testing.assert_array_equal(values, np.moveaxis(norms, 0, -1))
    assert values.flags.c_contiguous


@pytest.mark.parametrize(("first_step", "losses"), [(3, [0.0, 1.0, 2.0, -1.0]), (0, [-1.0]), (9, [0, 1, 2, 3, 4, -1])])
def test_a_file_that_goes_on_keeps_the_steps_before(run: RunFolder, first_step: int, losses: list[float]) -> None:
    for first, metrics in ((0, {step: float(step) for step in range(5)}), (first_step, {first_step: -1.0})):
        file = MetricsFile(run.metrics, first)
        for step, loss in metrics.items():
            file.log(step, {"loss": loss})
        file.sync()
        file.close()
    assert read_metrics(run.metrics)["loss"][1].tolist() == losses


def test_a_file_that_goes_on_is_not_read_whole(run: RunFolder) -> None:
    names = "x" * 100_000
    lines = [json.dumps({"step": step, "loss": 1.0, names: 0.0}).encode() + b"\n" for step in range(50)]
    run.metrics.write_bytes(b"".join([*lines[:20], b"garbled \xff\n", *lines[20:], lines[0][:-1]]))
    tracemalloc.start()
    MetricsFile(run.metrics, first_step=40).close()
    logged = steps_logged(run.metrics, until=30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * len(lines[0])
    assert run.metrics.read_bytes() == b"".join(lines[:40])
    assert logged == 30


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
        b'{"step": 1, "norm": [1.0, 2.0]}',
        b'{"step": 1, "norm": [[1.0, 2.0], [3.0]]}',
        b'{"step": 1, "norm": [[1.0, null]]}',
        b'{"step": 1, "norm": []}',
        b'{"step": 1, "loss": [[1.0]]}',
        b'{"step": 1, "layer/1/head/2/norm": 1.0}',
        b'{"step": 1, "layer/one/head/2/norm": 1.0}',
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
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metrics import MetricsFile
file = MetricsFile(RunFolder(Path(sys.argv[1])).metrics)
for step in range(int(sys.argv[2])):
    file.log(step, {"loss": 1.0})
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


@pytest.mark.slow
def test_a_process_killed_while_it_logs_leaves_a_readable_file(run: RunFolder) -> None:
    command = [sys.executable, "-c", LOGGING, str(run.path), str(10**9)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not (run.metrics.exists() and run.metrics.stat().st_size > 100_000):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    steps = read_metrics(run.metrics)["loss"][0]
    assert steps.tolist() == list(range(len(steps)))
    assert len(steps) > 1000


@pytest.mark.slow
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
    packed = lzma.compress(lines)
    run.packed_metrics.write_bytes(packed)
    assert run.metrics == run.packed_metrics
    assert read_metrics(run.metrics)["loss"][1].tolist() == [1.0, 2.0]
    broken = bytearray(packed)
    broken[len(packed) // 2] ^= 1
    for damaged in (
        packed[:-9],
        b"{" + packed[1:],
        bytes(broken),
        packed + b"{",
        packed[:12] + b"\xff" * 8 + packed[20:],
    ):
        run.packed_metrics.write_bytes(damaged)
        with pytest.raises(UserError, match=r"metrics\.jsonl\.xz: damaged .*; restore the file"):
            read_metrics(run.metrics)
