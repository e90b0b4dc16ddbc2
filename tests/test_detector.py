"""The detector's verdict and onset on losses whose onset is known by construction."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from flashpoint.detector import DetectorConfig, ExplosionDetector, Wander

CONFIG = DetectorConfig(window=10, margin=0.3, hold_steps=5, tail_steps=20)


def judged(losses: list[float], grad_norms: list[float] | None = None) -> ExplosionDetector:
    detector = ExplosionDetector(CONFIG)
    for step, loss in enumerate(losses):
        detector.update(step, loss, grad_norms[step] if grad_norms else 1.0)
    return detector


def test_a_falling_loss_is_stable() -> None:
    detector = judged([5 - 0.01 * step for step in range(300)])
    assert (detector.verdict, detector.onset_step, detector.last_step) == ("stable", None, None)


def test_onset_is_the_first_step_whose_window_mean_passes_the_margin() -> None:
    # From step 100 on the loss is 1 nat higher: after k such steps the mean of 10 is k/10 higher, and
    # 4/10 is the first above 0.3: step 103. Five steps of it decide at step 107.
    detector = judged([2.0] * 100 + [3.0] * 100)
    assert detector.verdict == "exploded"
    assert detector.onset_step == 103
    assert detector.last_step == 107 + CONFIG.tail_steps


def test_a_spike_shorter_than_the_hold_is_no_explosion() -> None:
    # One loss 3.5 nats high lifts the mean by 0.35 for ten steps unless the hold is longer.
    config = DetectorConfig(window=10, margin=0.3, hold_steps=11, tail_steps=0)
    detector = ExplosionDetector(config)
    for step, loss in enumerate([2.0] * 50 + [5.5] + [2.0] * 50):
        detector.update(step, loss, 1.0)
    assert detector.verdict == "stable"


def test_nothing_is_decided_before_the_first_whole_window() -> None:
    assert judged([1.0] * 3 + [9.0] * 6).verdict == "stable"


def test_the_first_verdict_stands() -> None:
    detector = judged([2.0] * 100 + [9.0] * 10 + [1.0] * 50 + [9.0] * 30)
    assert detector.onset_step == 100


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_value_ends_the_run_at_its_step(value: float) -> None:
    by_loss = judged([2.0] * 30 + [value, 2.0])
    by_norm = judged([2.0] * 32, [1.0] * 30 + [value, 1.0])
    for detector in (by_loss, by_norm):
        assert (detector.verdict, detector.onset_step, detector.last_step) == ("nonfinite", 30, 30)


def test_an_explosion_that_turns_nonfinite_keeps_its_onset_and_ends_there() -> None:
    detector = judged([2.0] * 100 + [3.0] * 15 + [math.nan])
    assert (detector.verdict, detector.onset_step, detector.last_step) == ("exploded", 103, 115)


def test_a_branch_with_a_shorter_hold_explodes_though_more_steps_are_out_of_bounds_already() -> None:
    """It counted on from the four of the run that it branched off, and so never came by its own two."""
    original = judged([2.0] * 100 + [3.0] * 7)  # out of bounds since step 103
    assert (original.verdict, original.steps_above) == ("stable", 4)
    branch = ExplosionDetector(DetectorConfig(window=10, margin=0.3, hold_steps=2, tail_steps=20))
    branch.load_state(original.state())
    branch.update(107, 3.0, 1.0)
    assert (branch.verdict, branch.onset_step, branch.last_step) == ("exploded", 103, 127)


def test_an_onset_is_the_first_step_out_of_bounds_also_where_steps_are_left_out() -> None:
    """As above the fourth higher loss is the first out of bounds; here it is that of step 106."""
    detector = ExplosionDetector(CONFIG)
    for number, loss in enumerate([2.0] * 100 + [3.0] * 100):
        detector.update(number if number < 100 else 2 * number - 100, loss, 1.0)
    assert detector.onset_step == 106


def test_the_wander_of_first_order_noise_bounds_its_largest_allan_deviation() -> None:
    """It is at least what neighbouring means differ by, and at most the standard deviation of the noise, 1."""
    random = np.random.default_rng(0)
    drawn = list(lfilter([np.sqrt(1 - 0.97**2)], [1, -0.97], random.standard_normal(6400)))
    wander = Wander(100)
    for loss in drawn:
        wander.add(loss, judge=True)
    means = np.array(drawn).reshape(-1, 100).mean(1)
    assert np.sqrt(np.square(np.diff(means)).mean() / 2) < wander.deviation < 1


def test_a_rise_is_not_its_own_measure_for_a_window() -> None:
    wander, deviations = Wander(8), list[float]()
    for step in range(64):
        wander.add(float(step >= 48), judge=True)
        deviations.append(wander.deviation)
    assert set(deviations[:56]) == {0.0}
    assert deviations[-1] > 0
