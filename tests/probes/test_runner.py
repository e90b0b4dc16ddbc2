"""Probes beside a run: they change nothing, and a user adds one by naming it."""

import json
from pathlib import Path

import pytest

from flashpoint.errors import UserError
from flashpoint.probes.attention import BUILT_IN
from flashpoint.probes.runner import load_probe
from flashpoint.runs.metrics import read_metrics
from tests.conftest import Command

OWN = """
import torch
from flashpoint.probes.attention import Probe

class Longest(Probe):
    def measure(self, seen):
        return {"longest_query": seen.q.float().norm(dim=-1).amax((1, 3))}

class NoProbe:
    pass

class Unwritten(Probe):
    pass
"""


@pytest.mark.slow
def test_a_run_without_probes_has_the_same_digest(train: Command, tmp_path: Path) -> None:
    without = train("probes.weights_interval=0", "probes.attention_interval=0", "run_name=without")
    (tmp_path / "own.py").write_text(OWN)
    names = ",".join([*BUILT_IN, f"{tmp_path}/own.py:Longest"])
    observed = train("probes.attention_interval=1", f"probes.attention=[{names}]", "run_name=with")
    for result in (without, observed):
        assert result.returncode == 0, result.stderr
    outcomes = [json.loads((tmp_path / f"runs/{name}/outcome.json").read_text()) for name in ("without", "with")]
    assert outcomes[0]["digest"] == outcomes[1]["digest"]
    metrics = [read_metrics(tmp_path / f"runs/{name}/metrics.jsonl") for name in ("without", "with")]
    without_probes, with_probes = metrics
    assert not any(values.ndim == 3 for _, values in without_probes.values())
    steps, longest = with_probes["longest_query"]
    assert steps.tolist() == list(range(12))
    assert longest.shape == (2, 2, 12)
    assert with_probes["w_q_update_mean_key_share"][1][0, 1, -1] > 0
    assert abs(with_probes["delta_error_cumulative"][1][0, 1, -1]) > 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("entropie", "no probe named entropie; choose of delta_error, ties"),
        ("nowhere.py:Longest", "nowhere.py is no file"),
        ("own.py:Shortest", "AttributeError"),
        ("own.py:NoProbe", "no subclass of"),
        ("own.py:Unwritten", "no measure(self, seen)"),
    ],
)
def test_a_probe_that_is_not_there_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        load_probe(name)
    assert told in str(raised.value)


def test_a_run_with_a_probe_that_is_not_there_is_refused_in_one_line(train: Command, tmp_path: Path) -> None:
    result = train("probes.attention=[entropie]")
    assert result.returncode == 2
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "no probe named entropie" in line
    assert not (tmp_path / "runs").exists()
