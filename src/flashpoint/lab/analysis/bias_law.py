"""Several roundings on the same weights: is the bias of δ one factor times the square of its noise?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashpoint.errors import UserError
from flashpoint.lab.analysis.bias import Relative, Window
from flashpoint.lab.analysis.intervals import mean_interval
from flashpoint.runs.metric_table import DELTA_ERROR
from flashpoint.runs.run import Run


@dataclass(frozen=True)
class Point:
    """One run's hottest layer, in the unit of injected errors."""

    run: Run
    bias: float
    half: float
    """Half of the bias' 95 % interval over the observed steps, Student's t; 0 for one step."""
    variance: float
    """Square of the noise."""

    @classmethod
    def of(cls, run: Run, window: Window) -> Point:
        """Measure a run.

        Raises:
            UserError: the run has not measured the error of δ, or its δ has none.
        """
        layer = run.hottest_layer
        one = Relative.of(run, DELTA_ERROR, window).layers([layer])
        if not one.variance:
            raise UserError(f"{run.where}: layer {layer}: δ takes no part of the error of O there; leave the run out")
        bias, half = mean_interval(one.biases.mean((0, 1)))
        return cls(run, bias, half or 0.0, one.variance)

    @property
    def independent(self) -> bool:
        """Whether δ has another error than the O that the loss sees: one drawn anew, or what a residual leaves.

        Curvature expects another factor of it, 0 where the two errors are independent.
        """
        attention = self.run.attention
        return attention.saved_out == "redrawn" or attention.out_residual is not None

    @property
    def factor(self) -> float:
        """The bias over the square of the noise."""
        return self.bias / self.variance


def by_weights(runs: Sequence[Run], window: Window) -> dict[str, list[Point]]:
    """Group points by the run and step that their runs branched off. A run that is no branch has a group of its own, as
    its name tells only in its experiment."""
    groups: dict[str, list[Point]] = {}
    for run in runs:
        name = f"step {run.origin[1]:,} of {Path(run.origin[0]).name}" if run.origin else run.where
        groups.setdefault(name, []).append(Point.of(run, window))
    return groups
