"""A thinned run keeps its verdict, its chain and what was measured at intervals."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.replay import resumed_values
from flashpoint.run_folder import RunFolder
from tests.conftest import REPOSITORY, environment


def test_only_the_per_step_metrics_are_thinned(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "manifest.json", "outcome.json", "chain.bin"):
        (run / name).write_text(name)
    records: list[dict] = []
    for step in range(25):
        records.append({"step": step, "loss": 1.0, "grad_norm": 0.5})
        if step % 5 == 4:
            records.append({"step": step, "tokens_per_second": 10.0 * step})
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, str(REPOSITORY / "scripts/thin_run.py"), str(run), str(tmp_path / "thin")]
    subprocess.run(command, check=True, env=environment(), timeout=60)
    thin = [
        json.loads(line) for line in gzip.decompress((tmp_path / "thin/metrics.jsonl.gz").read_bytes()).splitlines()
    ]
    assert [record["step"] for record in thin if "loss" in record] == [0, 10, 20, 24]
    assert [record for record in thin if "loss" not in record] == [r for r in records if "loss" not in r]
    for name in ("config.json", "manifest.json", "outcome.json", "chain.bin"):
        assert (tmp_path / "thin" / name).read_text() == name


def test_of_named_metrics_records_a_given_number_of_steps_apart_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.json", "manifest.json", "outcome.json"):
        (run / name).write_text("{}")
    head = "layer/1/head/1"
    records = [{"step": step, f"{head}/w_q": 1000.0625 * step, f"{head}/w_k": 2.0} for step in range(9, 100, 10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, str(REPOSITORY / "scripts/thin_run.py"), str(run), str(tmp_path / "thin")]
    command += ["--only", "w_q", "--spacing", "40", "--digits", "6"]
    subprocess.run(command, check=True, env=environment(), timeout=60)
    thin = [
        json.loads(line) for line in gzip.decompress((tmp_path / "thin/metrics.jsonl.gz").read_bytes()).splitlines()
    ]
    values = {9: 9000.56, 49: 49003.1, 89: 89005.6, 99: 99006.2}  # of 9000.5625, 49003.0625, 89005.5625, 99006.1875
    assert thin == [{"step": step, f"{head}/w_q": value} for step, value in values.items()]
    refused = subprocess.run([*command, "--every", "0"], capture_output=True, text=True, env=environment(), timeout=60)
    told = "error: --every 0 --spacing 40 --digits 6: give 1 or more\n"
    assert (refused.returncode, refused.stderr) == (2, told)


def test_a_thinned_run_is_not_resumed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.config.write_text("{}")
    run.packed_metrics.touch()
    with pytest.raises(UserError, match=r"resume=.*: a thinned run has no checkpoints; replay="):
        resumed_values({"resume": str(tmp_path), "runs_dir": "runs"}, [])
