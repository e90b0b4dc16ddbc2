"""The error of δ in recorded runs: its sum over tokens and steps, and its bias in the unit of injected errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flashpoint.errors import UserError
from flashpoint.lab.stored_config import trained_config
from flashpoint.runs.metric_table import DELTA_ERROR_SUM, DELTA_ERROR_VARIANCE, DeltaErrorMetrics
from flashpoint.runs.run import Run

BEFORE_ONSET = 1000
"""Steps left out before the onset: there the growth is its own cause."""


@dataclass(frozen=True)
class Window:
    """The observed steps that count: ``since`` ≤ step < ``until``, and with ``last`` only the last so many of these."""

    since: int = 0
    until: int | None = None
    """None is ``BEFORE_ONSET`` before the onset, or the end of a run without an onset."""
    last: int | None = None

    def of(self, run: Run, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of a run's observed steps [n] lie in the window, as booleans.

        Raises:
            UserError: none lies in it.
        """
        until = self.until
        if until is None:
            until = int(steps[-1]) + 1 if run.onset is None else run.onset - BEFORE_ONSET
        since = self.since if self.last is None else max(self.since, until - self.last)
        chosen: NDArray[np.bool_] = (steps >= since) & (steps < until)
        if not chosen.any():
            raise UserError(
                f"{run.where}: no observed step from {since} to before step {until}; "
                "give other --since, --last and --until"
            )
        return chosen


@dataclass(frozen=True)
class Sums:
    """Σ (δ_lp − δ_hp) over the tokens of each observed step, and the variance of a token's error there."""

    by_step: NDArray[np.float64]  # [L, H, n]
    variances: NDArray[np.float64]  # [L, H, n]
    tokens: int  # of an observed step
    all_tokens: int  # of a step, N, over which the loss is a mean

    @classmethod
    def of(cls, run: Run, window: Window) -> Sums:
        """Read the sums of a run. Raises UserError if the run has not measured them."""
        steps, sums = run.measured_by_head(DELTA_ERROR_SUM.name)
        _, variances = run.measured_by_head(DELTA_ERROR_VARIANCE.name)
        run.check_together(DELTA_ERROR_SUM.name, DELTA_ERROR_VARIANCE.name)
        chosen = window.of(run, steps)
        all_sequences, context = run.batch_size, run.shape.context
        observed = trained_config(run).probes.sequences
        return cls(sums[..., chosen], variances[..., chosen], observed * context, all_sequences * context)

    def expected(self, layer: int, heads: slice = slice(None)) -> float:
        """Return the standard error of Σ over steps and heads of a layer (from 1), were the errors of all tokens
        independent with mean zero."""
        return float(np.sqrt(self.tokens * self.variances[layer - 1, heads].sum()))

    def bias_in_nats(self, layer: int) -> NDArray[np.float64]:
        """Return, for each of n steps, the mean over the tokens and heads of a layer (from 1) of N·error. These are the
        nats by which a token's rounding error changes the summed loss."""
        means: NDArray[np.float64] = self.all_tokens * self.by_step[layer - 1].mean(0) / self.tokens
        return means

    def variance_in_nats(self, layer: int) -> float:
        """Return the mean of (N·error)² over the tokens, heads and steps of a layer (from 1)."""
        return float(self.all_tokens**2 * self.mean_squares[layer - 1].mean())

    def bias_over_variance(self, layer: int) -> NDArray[np.float64]:
        """Return the bias of N·error over its variance, [n] by step; both are of this run's own targets."""
        return self.bias_in_nats(layer) / self.variance_in_nats(layer)

    @property
    def mean_squares(self) -> NDArray[np.float64]:
        """The mean square of a token's error, [L, H, n]."""
        means = self.by_step / self.tokens
        spread: NDArray[np.float64] = self.variances * (1 - 1 / self.tokens)
        return spread + means**2

    def sensitivity(self, relative: Relative, layer: int) -> float:
        """Return N·|dO_i|·|O_i|, root mean square over the tokens, heads and steps of a layer (from 1), in nats. To
        first order so much does the summed loss depend on one row of O.

        Where all rows of a head attend to one key each, O is exact and no error tells it. Then the step counts without
        that head; nan where there is no error at all."""
        noises = np.square(relative.noises[layer - 1])
        told = noises > 0
        squares = self.mean_squares[layer - 1][told] / noises[told]
        return float(self.all_tokens * np.sqrt(squares.mean())) if told.any() else np.nan

    def total(self, layer: int, heads: slice = slice(None)) -> float:
        """Return the sum over steps and heads of a layer; layers count from 1."""
        return float(self.by_step[layer - 1, heads].sum())


@dataclass(frozen=True)
class Relative:
    """Bias and root mean square of the error of each observed step, in the unit of ``attn.delta_error.size``."""

    biases: NDArray[np.float64]  # [L, H, n]
    noises: NDArray[np.float64]  # [L, H, n]

    @classmethod
    def of(cls, run: Run, error: DeltaErrorMetrics, window: Window) -> Relative:
        """Read the bias and noise of an error of a run. Raises UserError where the run has not measured it."""
        steps, biases = run.measured_by_head(error.bias.name)
        _, noises = run.measured_by_head(error.noise.name)
        run.check_together(error.bias.name, error.noise.name)
        chosen = window.of(run, steps)
        return cls(biases[..., chosen], noises[..., chosen])

    def layers(self, chosen: Sequence[int]) -> Relative:
        """Return the errors of these layers alone; layers count from 1."""
        places = np.array(chosen) - 1
        return Relative(self.biases[places], self.noises[places])

    @property
    def bias(self) -> float:
        return float(self.biases.mean())

    @property
    def variance(self) -> float:
        """The square of the noise."""
        return float(np.square(self.noises).mean())
