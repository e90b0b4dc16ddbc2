"""What a log shows of an explosion, on losses and norms whose onset is known."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from flashpoint.detector import DetectorConfig, NoiseScaledDetector
from flashpoint.logs.judgement import Judgement
from flashpoint.logs.log import Log, Resume

RNG = np.random.default_rng(0)
NOISE = RNG.normal(0, 0.05, 4000)


def judged(
    losses: Sequence[float], norms: Sequence[float] = (), every: int = 1, resumes: tuple[Resume, ...] = ()
) -> Judgement:
    columns = {"loss": (np.arange(len(losses)) * every, np.asarray(losses, float))}
    if len(norms):
        columns["grad_norm"] = (np.arange(len(norms)) * every, np.asarray(norms, float))
    return Judgement(Log("log", "text", columns, {name: name for name in columns}, resumes, 0, ()))


def exploding(count: int, at: int) -> np.ndarray:
    return np.where(np.arange(count) < at, 3.0, 5.0) + NOISE[:count]


def test_losses_of_every_step_are_judged_as_a_watch_judges_them() -> None:
    losses = exploding(1000, 600)
    watch = NoiseScaledDetector(DetectorConfig())
    for step, loss in enumerate(losses):
        watch.update(step, loss, 0.0)
    found = judged(losses)
    assert (found.verdict, found.onset) == (watch.verdict, watch.onset_step)
    assert found.verdict == "exploded"


@pytest.mark.parametrize("every", [5, 10, 50, 500])
def test_the_onset_is_found_within_ten_entries_however_far_they_are_apart(every: int) -> None:
    found = judged(exploding(100, 60), every=every)
    assert found.verdict == "exploded"
    assert found.onset is not None
    assert 60 * every <= found.onset < 70 * every


def test_a_factor_of_all_losses_changes_no_verdict_and_no_onset() -> None:
    """Transformers' Trainer logs (T − 1)/T of GPT-2's loss over T tokens."""
    losses = exploding(1000, 600)
    expected = judged(losses)
    for tokens in (2, 8, 1024):
        found = judged(losses * (tokens - 1) / tokens)
        assert (found.verdict, found.onset) == (expected.verdict, expected.onset)
    assert judged(exploding(500, 600) / 2).verdict == "stable"


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_noise_about_a_falling_line_does_not_explode(every: int) -> None:
    """Ten losses lie near a line now and then: their noise alone set margins by which 1 of 5 such logs exploded."""
    falling = 3 + np.exp(-np.arange(1000) / 200)
    for noise in np.random.default_rng(1).normal(0, 0.5, (20, 1000)):
        assert judged(falling + noise, every=every).verdict == "stable"


def test_losses_that_are_no_numbers_and_last_are_the_onset() -> None:
    losses = exploding(300, 250)
    losses[[120, 130]] = math.nan, math.inf
    losses[140:150] = math.nan
    found = judged(losses)
    assert (found.verdict, found.onset) == ("nonfinite", 140)
    assert found.not_finite("loss").tolist() == [120, 130, *range(140, 150)]
    assert not len(found.not_finite("grad_norm"))
    losses[-1] = math.nan
    assert judged(losses[-20:]).onset == 19


def test_single_losses_that_are_no_numbers_or_0_are_left_out_as_by_a_watch() -> None:
    losses = exploding(1000, 600)
    expected = judged(np.delete(losses, np.arange(49, 1000, 50)))
    losses[49:999:100], losses[99:999:100] = math.nan, 0.0
    losses = losses[:999]
    found = judged(losses)
    assert found.verdict == expected.verdict == "exploded"
    assert found.onset is not None
    assert 600 <= found.onset < 700
    assert judged(losses[:590]).verdict == "stable"


def test_a_norm_that_doubles_before_the_loss_rises_is_told_by_its_step() -> None:
    norms = np.where(np.arange(1000) < 500, 1.0, 4.0) * (1 + NOISE[:1000])
    found = judged(exploding(1000, 600), norms)
    assert found.norm_rose is not None
    assert 500 <= found.norm_rose < 510
    assert judged(exploding(1000, 400), norms).norm_rose is None  # it rose after the loss
    assert judged(np.full(1000, 3.0), norms).norm_rose is None  # no onset
    drifting = np.linspace(1, 4, 1000) * (1 + NOISE[:1000])  # doubles in 600 steps
    assert judged(exploding(1000, 900), drifting).norm_rose is None
    single = np.where(np.arange(1000) == 590, 100.0, 1.0)
    assert judged(exploding(1000, 600), single).norm_rose is None


def test_a_norm_that_is_no_number_has_risen() -> None:
    norms = np.where(np.arange(1000) < 500, 1.0, math.nan)
    found = judged(exploding(1000, 600), norms)
    assert found.norm_rose is not None
    assert 500 <= found.norm_rose < 510


def test_a_jump_after_a_resume_is_above_all_that_was_before() -> None:
    losses = np.where(np.arange(400) < 200, 2.0, 2.6) + NOISE[:400]
    (jump,) = judged(losses, resumes=(Resume(200, 220),)).jumps
    assert jump.jumped
    assert jump.before == pytest.approx(2.0, abs=0.1)
    assert jump.after == pytest.approx(2.6, abs=0.1)
    (still,) = judged(2.0 + NOISE[:400], resumes=(Resume(200, 220),)).jumps
    assert not still.jumped
    assert not judged(losses, resumes=(Resume(5, 9), Resume(395, 396))).jumps  # too near an end


def test_a_jump_after_a_resume_is_no_explosion_and_hides_none() -> None:
    losses = np.where(np.arange(1000) < 200, 2.0, 2.6) + NOISE[:1000]
    assert judged(losses).verdict == "exploded"
    assert judged(losses, resumes=(Resume(200, 220),)).verdict == "stable"
    losses[700:] += 3
    later = judged(losses, resumes=(Resume(200, 220),))
    assert later.verdict == "exploded"
    assert later.onset is not None
    assert 700 <= later.onset < 750
