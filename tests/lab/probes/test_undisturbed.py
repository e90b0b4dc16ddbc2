"""A probe that changes the working directory or forks leaves the run whole, and where it began."""

import json
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.verdicts import outcome_of

PROBE = """
import os
import torch
from pathlib import Path
from flashpoint.lab.probes.attention import Probe

Path("elsewhere").mkdir(exist_ok=True)
os.chdir("elsewhere")


class Own(Probe):
    def measure(self, seen):
        os.chdir("/")
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        return {"mine": torch.zeros(seen.w_q.shape[:2])}


class Forks(Own):
    def measure(self, seen):
        os.fork()
        return super().measure(seen)


class ForksAndFails(Forks):
    def measure(self, seen):
        if not os.fork():
            raise SystemExit(3)
        return super().measure(seen)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "calls"), [("Own", 3), ("Forks", 6), ("ForksAndFails", 6)])
def test_one_process_writes_the_run_where_it_began(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, calls: int
) -> None:
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "own.py").write_text(PROBE)
    options = ("train.steps=3", "probes.attention_interval=1", "checkpoints.interval=1", "probes.weights_interval=0")
    runs = []
    for probe in ("delta_error", f"own.py:{name}"):
        result = train(*options, f"probes.attention=[{probe}]", "run_name=" + probe[:3])
        assert result.stdout.count("outcome=") == 1, result.stderr
        outcome_of(result)
        runs.append(tmp_path / "runs" / probe[:3])
    assert len((tmp_path / "calls").read_text().splitlines()) == calls
    before, after = (sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in runs)
    assert [name for name in before if "report" not in name] == [name for name in after if "report" not in name]
    digests = [json.loads((run / "outcome.json").read_text())["digest"] for run in runs]
    assert digests[0] == digests[1]
    steps = [json.loads(line)["step"] for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
    assert steps == [json.loads(line)["step"] for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    assert not list((tmp_path / "elsewhere").iterdir())
