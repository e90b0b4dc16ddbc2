"""Losses in any unit: what is called an explosion, and how the watch tells its margin.

The losses are drawn here. What they should be called follows from how they were drawn.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import flashpoint
from tests.watching.loops import Pair

Losses = NDArray[np.float64]
RANDOM = np.random.default_rng(0)


def noisy(mean: Losses, share: float) -> Losses:
    return mean * (1 + share * RANDOM.standard_normal(len(mean)))


def judged(folder: Path, losses: Losses, **options: float) -> str:
    with flashpoint.watch(Pair(), runs_dir=folder, name="own", **options) as watched:
        for loss in losses:
            watched.step(float(loss), grad_norm=1.0)
    return watched.verdict


def jump(before: Losses, factor: float) -> Losses:
    """Return losses whose last 200 steps are higher by a factor."""
    return np.concatenate([before, factor * before[-200:]])


def slow(factor: float) -> Losses:
    """Return first-order noise of standard deviation 1."""
    drawn = RANDOM.standard_normal(2000) * np.sqrt(1 - factor**2)
    for step in range(1, 2000):
        drawn[step] += factor * drawn[step - 1]
    return drawn


DECAY = 1e-4 + np.exp(-np.arange(2000) / 150)
HEALTHY: dict[str, Callable[[], Losses]] = {
    "a mean square error near 8": lambda: noisy(np.full(2000, 8.0), 0.4),
    "losses of heavy tails": lambda: np.exp(RANDOM.standard_normal(2000)),
    "a decay by 10⁴": lambda: noisy(DECAY, 0.2),
    "a decay with single bad batches": lambda: noisy(DECAY, 0.2) + np.where(np.arange(2000) % 300 == 299, 5.0, 0.0),
    "nats below zero": lambda: np.linspace(2, -3, 2000) + 0.3 * RANDOM.standard_normal(2000),
    "exactly 0": lambda: np.zeros(300),
    "exactly 0 for a while": lambda: np.concatenate([noisy(np.full(800, 3.0), 0.02), np.zeros(150), np.full(300, 3.0)]),
    "a slow wander about a line": lambda: np.linspace(5, 4.5, 2000) + slow(0.97),
}
EXPLODED: dict[str, Callable[[], Losses]] = {
    "a mean square error of 0.01 that rises 20-fold": lambda: jump(noisy(np.full(800, 0.01), 0.2), 20),
    "a decay by 10⁴ that rises 5-fold": lambda: jump(noisy(DECAY, 0.2), 5),
    "losses near 800 that double": lambda: jump(noisy(np.full(800, 800.0), 0.1), 2),
    "nats of a token": lambda: np.concatenate([noisy(np.full(800, 3.0), 0.02), noisy(np.full(200, 4.0), 0.02)]),
    "a rise by two standard deviations of a loss": lambda: np.concatenate([
        noisy(np.full(1500, 1.0), 1.0), noisy(np.full(300, 3.0), 1 / 3)
    ]),
    "a rise with batches of NaN and 0 in it": lambda: np.where(
        np.arange(1000) % 20 == 9, math.nan, np.where(np.arange(1000) % 20 == 3, 0.0, np.repeat([3.0, 5.0], [800, 200]))
    ),
    "nats below zero that rise": lambda: np.concatenate([
        -3 + 0.1 * RANDOM.standard_normal(800), -2 + 0.1 * RANDOM.standard_normal(200)
    ]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("losses", HEALTHY.values(), ids=HEALTHY)
def test_healthy_losses_are_stable(tmp_path: Path, losses: Callable[[], Losses]) -> None:
    assert judged(tmp_path, losses()) == "stable"


@pytest.mark.slow
@pytest.mark.parametrize("losses", EXPLODED.values(), ids=EXPLODED)
def test_losses_that_rise_and_stay_have_exploded(tmp_path: Path, losses: Callable[[], Losses]) -> None:
    assert judged(tmp_path, losses()) == "exploded"


@pytest.mark.parametrize(("margin", "verdict"), [(0.15, "exploded"), (0.3, "stable")])
def test_a_margin_that_is_given_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], margin: float, verdict: str
) -> None:
    losses = np.concatenate([np.full(300, 0.01), np.full(200, 0.21)])
    assert judged(tmp_path, losses, margin=margin) == verdict
    assert f"step 99: an explosion is called once the mean of 100 steps stands more than {margin} above" in (
        capsys.readouterr().err
    )


def test_how_the_margin_was_set_is_told_once_after_100_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The noise is known: losses of 7 and 9 in turn lie 1 from their line. A mean of 100 independent ones then has a
    standard deviation of 0.1, whose 95 % interval ends at 0.113; and 6 / 0.617 of these are 1.1."""
    from scipy.stats import chi2

    margin = 6 / 0.617 * 0.1 * np.sqrt(98 / chi2.ppf(0.05, 98))
    judged(tmp_path, np.tile([7.0, 9.0], 150))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "step 99: an explosion is called once" in line]
    told = f"the mean of 100 steps stands more than {margin:.3g} above its minimum (8 now) for 50 steps"
    assert told in line
