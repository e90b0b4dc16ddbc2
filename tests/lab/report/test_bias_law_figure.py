"""The figure of biases of δ on the same weights: where points are drawn."""

from pathlib import Path

import numpy as np
import pytest

from flashpoint.cli.run_words import open_run
from flashpoint.lab.analysis.bias_law import Point
from flashpoint.lab.report.bias_law_figure import draw_law
from tests.records import write_run


def test_a_bias_that_is_not_told_from_zero_is_drawn_at_its_upper_end(tmp_path: Path) -> None:
    def point(name: str, bias: float, half: float, variance: float, delta: str = "out") -> Point:
        run = write_run(tmp_path / name, {"name": name, "delta": delta, "out_unnormalized": "stochastic"})
        return Point(open_run(run), bias, half, variance)

    points = [point("b", 10.0, 0.0, 4.0), point("c", 1.0, 0.0, 0.25), point("d", -1.0, 25.5, 1.0, "out_independent")]
    (panel,) = draw_law({"some weights": points}).axes
    drawn = {
        (str(line.get_marker()), *map(float, np.ravel(line.get_xydata())))
        for line in panel.get_lines()
        if len(line.get_xdata()) == 1
    }
    assert {("o", 4.0, 10.0), ("o", 0.25, 1.0), ("v", 1.0, 24.5)} <= drawn
    (line,) = [line for line in panel.get_lines() if len(line.get_xdata()) == 2]
    assert line.get_xdata() == pytest.approx([0.125, 8.0])
    assert line.get_ydata() == pytest.approx([0.125 * 3.25, 8 * 3.25])
