"""Biases of δ on the same weights: their factors, and where they are drawn."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from flashpoint.report.bias import Window
from flashpoint.report.bias_law import by_weights, draw_law
from flashpoint.report.series import RecordedRun
from tests.report.records import call, write_run


def record(
    folder: Path, name: str, biases: Sequence[float], noise: float, seed: int = 1, delta: str = "out", step: int = 1000
) -> str:
    """Two layers; the second, whose W_Q is larger, has these biases, the first none."""
    attn = {"name": name, "delta": delta, "out_unnormalized": "stochastic"}
    metrics = [
        {"step": number}
        | {f"layer/{layer}/head/1/w_q_spectral_norm": float(layer) for layer in (1, 2)}
        | {f"layer/{layer}/head/1/delta_error_relative_bias": (0.0, bias)[layer - 1] for layer in (1, 2)}
        | {f"layer/{layer}/head/1/delta_error_relative_noise": noise for layer in (1, 2)}
        for number, bias in enumerate(biases)
    ]
    parent = {"parent": {"run": f"runs/first-{seed}", "from_step": step}}
    return write_run(folder / f"{name}-{seed}-{step}", attn, seed=seed, metrics=metrics, manifest=parent)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    return [
        record(tmp_path, "a", (2.0, 4.0), 1.0),  # 3 × noise²
        record(tmp_path, "b", (10.0, 10.0), 2.0),  # 2.5
        record(tmp_path, "c", (1.0, 1.0), 0.5),  # 4
        record(tmp_path, "d", (1.0, -3.0), 1.0, delta="out_independent"),
        record(tmp_path, "a", (8.0, 8.0), 1.0, seed=2),
        record(tmp_path, "d", (2.0, 2.0), 2.0, seed=2, delta="out_independent", step=500),
    ]


def test_each_set_of_weights_has_its_factor(runs: list[str]) -> None:
    # Mean 19/6 ± 4.303 (t(0.975, 2)) · √(((1/6)² + (4/6)² + (5/6)²) / 2 / 3); noise² of 1/4 to 4.
    assert call("bias_law.py", *runs).stdout.splitlines()[4:] == [
        "| step 1,000 of first-1 | 3 | 16 | 3.2 | 1.3 to 5.1 | +26 %, `c` | -1.0 |",
        "| step 1,000 of first-2 | 1 | 1 | 8.0 |  |  |  |",
        "| step 500 of first-2 | 0 |  |  |  |  | 0.5 |",
    ]
    assert "| step 1,000 of first-1 | 3 | 16 | 2.8 |" in call("bias_law.py", *runs, "--until", "1").stdout


def test_a_bias_that_is_not_told_from_zero_is_drawn_at_its_upper_end(runs: list[str]) -> None:
    groups = by_weights([RecordedRun.open(run) for run in runs[1:4]], Window())
    (panel,) = draw_law(groups).axes
    drawn = {
        (str(line.get_marker()), *map(float, np.ravel(line.get_xydata())))
        for line in panel.get_lines()
        if len(line.get_xdata()) == 1
    }
    # Bias −1 with a spread of √8 over two steps: ± 12.7062 · √8 / √2 (Student's t, one degree of freedom); noise² 1.
    (upper,) = [point for point in drawn if point[0] == "v"]
    assert upper == ("v", 1.0, pytest.approx(-1 + 12.7062 * 2, rel=1e-4))
    assert {("o", 4.0, 10.0), ("o", 0.25, 1.0)} <= drawn
    (line,) = [line for line in panel.get_lines() if len(line.get_xdata()) == 2]
    assert line.get_xdata() == pytest.approx([0.125, 8.0])
    assert line.get_ydata() == pytest.approx([0.125 * 3.25, 8 * 3.25])
