"""A listener hears of a run, and what it does wrong costs the listener, not the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashpoint.listeners import Listeners, Metrics
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.outcome import Outcome


class Hears:
    name = "hearing"

    def __init__(self, *, fails: bool = False) -> None:
        self.heard: list[str] = []
        self._fails = fails

    def begun(self, folder: RunFolder, first_step: int) -> None:
        self.heard.append(f"begun at {first_step}")

    def logged(self, step: int, metrics: Metrics) -> None:
        if self._fails:
            raise ValueError("no\nidea")
        self.heard.append(f"{step}: {', '.join(metrics)}")

    def ended(self, folder: RunFolder, outcome: Outcome) -> None:
        self.heard.append("ended")

    def failed(self, folder: RunFolder) -> None:
        self.heard.append("failed")


def test_one_that_fails_is_told_of_once_and_the_others_hear_on(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, broken = Hears(), Hears(fails=True)
    listeners = Listeners([broken, sound])
    listeners.begun(run, 3)
    listeners.logged(3, {"loss": 1.0, "w_q_spectral_norm": np.ones((1, 2))})
    listeners.logged(4, {"loss": 1.0})
    assert sound.heard == ["begun at 3", "3: loss, w_q_spectral_norm", "4: loss"]
    assert broken.heard == ["begun at 3"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hearing is off for this run (ValueError: no idea)")


def test_training_knows_neither_drawings_nor_wandb() -> None:
    sources = (Path(__file__).parents[1] / "src/flashpoint/lab/training").glob("*.py")
    known = [line for path in sources for line in path.read_text().splitlines() if "import" in line]
    assert not [line for line in known if "flashpoint.lab.report" in line or "wandb" in line or "analysis" in line]
