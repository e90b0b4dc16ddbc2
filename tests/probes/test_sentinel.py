"""The rule on norms made by hand, alone and through the script on recorded runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flashpoint.probes.sentinel import HeadGrowth, Sentinel
from tests.conftest import REPOSITORY, environment


def norms(hot: float) -> np.ndarray:
    """2 layers, 3 heads; the second layer's third head is hot."""
    return np.array([[1.0, 1.0, 1.0], [1.0, 1.0, hot]])


def warned_at(hot: dict[int, float]) -> int | None:
    sentinel = Sentinel()
    told = [sentinel.update(step, norms(value)) for step, value in hot.items()]
    warnings = [warning for warning in told if warning]
    assert len(warnings) <= 1
    return warnings[0].step if warnings else None


@pytest.mark.parametrize(
    ("hot", "step"),
    [
        ({0: 1.0, 250: 2.1, 500: 2.1, 750: 9.0}, 500),  # doubled within 500 steps
        ({0: 1.0, 250: 2.1, 499: 2.1}, None),  # no value yet that is 500 steps old
        ({0: 2.0, 500: 3.9, 1000: 7.7}, None),  # not quite doubled, twice
        ({0: 0.5, 500: 1.9}, None),  # doubled, but below twice the median head
        ({0: 2.0, 500: 4.0}, 500),
        ({0: 1.0, 500: 1.0, 700: 1.0, 1300: 2.0}, 1300),  # the newest value that is old enough: of step 700
    ],
)
def test_the_rule(hot: dict[int, float], step: int | None) -> None:
    assert warned_at(hot) == step


def test_growth_while_the_learning_rate_rises_is_none() -> None:
    sentinel = Sentinel(warmup_steps=200)
    told = [sentinel.update(step, norms(hot)) for step, hot in ((150, 0.1), (200, 1.5), (650, 2.5), (700, 3.1))]
    assert [warning and warning.step for warning in told] == [None, None, None, 700]


def test_the_hottest_come_first_and_survive_a_resumption() -> None:
    sentinel = Sentinel()
    for step, factor in ((0, 1.0), (500, 3.0)):
        sentinel.update(step, [[1.0, factor], [0.5, 0.25 * (1 + factor)]])
    assert sentinel.hottest(2) == [HeadGrowth(500, 1, 2, 3.0, 3.0), HeadGrowth(500, 2, 2, 1.0, 2.0)]
    assert str(sentinel.hottest(1)[0]) == "L1H2 3.0 (×3.00)"
    resumed = Sentinel()
    resumed.load_state(json.loads(json.dumps(sentinel.state())))
    assert resumed.hottest(4) == sentinel.hottest(4)
    assert resumed.warning == sentinel.warning == HeadGrowth(500, 1, 2, 3.0, 3.0)


def test_the_script_counts_leads_and_false_alarms(tmp_path: Path) -> None:
    def record(name: str, onset: int | None, final: float) -> str:
        run = tmp_path / name
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"train": {"warmup_steps": 0}}))
        verdict = "stable" if onset is None else "exploded"
        (run / "outcome.json").write_text(json.dumps({"outcome": verdict, "step": 1501, "onset_step": onset}))
        with (run / "metrics.jsonl").open("w") as file:
            for step, hot in ((0, 1.0), (500, 1.0), (1000, final), (1500, final)):
                table = norms(hot)
                line = {
                    f"layer/{i + 1}/head/{j + 1}/w_q_spectral_norm": table[i, j] for i in range(2) for j in range(3)
                }
                file.write(json.dumps({"step": step, **line}) + "\n")
        return str(run)

    runs = [record("a", 1400, 3.0), record("b", 900, 3.0), record("c", None, 3.0), record("d", None, 1.0)]
    command = [sys.executable, str(REPOSITORY / "scripts/sentinel.py"), *runs]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split(None, 1) == ["a", "exploded at 1,400    warned at 1,000 of L2H3 3.0 (×3.00)"]
    assert lines[3].split(None, 1) == ["d", "stable to 1,501      no warning"]
    assert lines[4] == (
        "foretold 1 of 2 explosions, 400 to 400 steps before (median 400); warned of 1 of 2 stable runs"
    )
