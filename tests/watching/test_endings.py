"""Numbers that are not finite, and loops that end at once: which tensors are kept, and how long a loop goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flashpoint.diagnosis.verdict import diagnose
from flashpoint.watching.captures import captured_steps, read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, loop, plain

STEPS = 12


class Enough(Exception):
    """What ends a loop by the rule of the documentation."""


def stop_when_told(watched: Watch) -> None:
    if watched.verdict != "stable" and not watched.busy:
        raise Enough


def nan_weights(model: nn.Module, number: int, watched: Watch) -> None:
    """The second block's weights become NaN before step 3. The loop leaves out what follows from it."""
    if number == 3:
        with torch.no_grad():
            model.second.qkv.weight[64:] = float("nan")  # of W_V
    plain(model, number, watched)
    if number >= 3:
        model.zero_grad()
    stop_when_told(watched)


def test_a_loop_that_stops_at_nan_has_a_capture_that_shows_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Enough):
        loop(tmp_path, step=nan_weights, steps=STEPS, interval=500)
    own = tmp_path / "own"
    assert list(captured_steps(own)) == [3, 4]
    assert [(call.layer, call.step) for call in read_calls(own, 3)] == [(1, 0), (2, 0)]
    assert (own / "captures/step-0000003/batch.pt").exists()
    calls = read_calls(own)
    assert [(call.layer, call.step) for call in calls] == [(1, 4), (2, 4)]
    assert calls[0].q.isfinite().all()
    found = [[one.kind for one in diagnose(call).findings] for call in calls]
    assert "nonfinite" in found[1]
    told = capsys.readouterr().err
    assert (
        "the tensors are of step 0, the last one before it that is held, and those of the next step are to come" in told
    )
    assert "step 4: loss nan, gradient norm nan at step 3" in told


def test_a_step_of_nan_that_is_observed_itself_needs_no_other(tmp_path: Path) -> None:
    with pytest.raises(Enough):
        loop(tmp_path, step=nan_weights, steps=STEPS, interval=4)
    assert list(captured_steps(tmp_path / "own")) == [3]


@pytest.mark.slow
@pytest.mark.parametrize("interval", [5, 10, 500])
def test_a_step_of_nan_has_no_tensors_of_a_later_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interval: int
) -> None:
    """The loss of step 8 alone is NaN, as of a bad batch that a GradScaler skips. It is read after step 9, which is
    observed with the intervals 5 and 10. The tensors are those of step 0, which the model itself tells."""

    def step(model: Any, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        if number == 0:
            expected.append(model.first.qkv(x).unflatten(-1, (3, 4, 8))[..., 0, :, :].detach())
        loss = model(x).square().mean()
        loss.backward()
        if number == 8:
            model.zero_grad()
        watched.step(loss * float("nan") if number == 8 else loss, x)

    expected: list[torch.Tensor] = []
    loop(tmp_path, step=step, steps=STEPS + 10, interval=interval, log_interval=10)
    first, second = read_calls(tmp_path / "own", 8)
    assert (first.step, second.step) == (0, 0)
    torch.testing.assert_close(first.q.transpose(1, 2), expected[0])
    assert "the tensors are of step 0, the last one before it that is held" in capsys.readouterr().err


@pytest.mark.parametrize("skips", [False, True])
def test_a_loop_with_batches_of_nan_whose_updates_it_skips_is_stable(tmp_path: Path, skips: bool) -> None:
    """The first forward pass, which is observed, has no backward pass then; the next one is recorded in its place."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean() * (float("nan") if number in (0, 7) else 1)
        if skips and not loss.isfinite():
            return
        loss.backward()
        if not loss.isfinite():
            model.zero_grad()
        watched.step(loss, x)

    run = loop(tmp_path, step=step, steps=STEPS, interval=500)
    assert run.verdict == f"stable to {STEPS - 2 if skips else STEPS}"
    assert run.by_head("row_sum_relative_bias") is not None
    assert bool(captured_steps(tmp_path / "own")) != skips


def test_a_loop_that_trains_no_more_after_nan_is_not_kept_busy(tmp_path: Path) -> None:
    """It skips the backward pass where the loss is no number; what was kept is not written again."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number < 3:
            plain(model, number, watched)
        else:
            watched.step(float("nan"))
        stop_when_told(watched)

    with pytest.raises(Enough):
        loop(tmp_path, step=step, steps=40, interval=500)
    assert list(captured_steps(tmp_path / "own")) == [3]


def test_a_loop_that_ends_at_nan_keeps_the_last_observation_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        nan_weights(model, number, watched)
        if number == 3:
            raise Enough

    with pytest.raises(Enough):
        loop(tmp_path, step=step, interval=500, log_interval=10)  # the loss is read at the end
    assert list(captured_steps(tmp_path / "own")) == [3]
    told = capsys.readouterr().err
    assert "the tensors are of step 0" in told
    assert "to come" not in told


def scaled(model: nn.Module, number: int, watched: Watch, **norms: Any) -> None:
    """A GradScaler's steps: it skips those of an infinite gradient."""
    x = torch.randn(3, 12, 32)
    loss = model(x).square().mean()
    loss.backward()
    watched.step(loss, x, grad_norm=float("inf") if number in (1, 5) else 1.0)


def test_a_step_that_a_gradient_scaler_skips_costs_one_more_observation(tmp_path: Path) -> None:
    busy: list[bool] = []

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        scaled(model, number, watched)
        busy.append(watched.busy)

    run = loop(tmp_path, step=step, steps=STEPS, interval=500)
    assert run.verdict == f"stable to {STEPS}"
    assert busy == [number == 1 for number in range(STEPS)]
    own = tmp_path / "own"
    assert list(captured_steps(own)) == [1, 2]
    assert (own / "captures/step-0000002/batch.pt").exists()
    assert not list(own.glob("captures/*/delta.jsonl"))


@pytest.mark.slow
def test_an_overflow_after_one_that_a_gradient_scaler_skipped_is_captured(tmp_path: Path) -> None:
    """At the start of a run its scale is too large. Later two in a row are no routine; of these there are at most 2."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        loss.backward()
        overflows = number in (0, 1, 6) or (number % 10 in (2, 3, 4) and number > 10)
        watched.step(loss, x, grad_norm=float("inf") if overflows else 1.0)

    loop(tmp_path, step=step, steps=50, interval=500)
    assert list(captured_steps(tmp_path / "own")) == [0, 13, 14, 23, 24]


def test_a_skipped_step_does_not_end_the_measuring_of_delta(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 0:
            watched.capture(sequences=15)
        scaled(model, number, watched)

    loop(tmp_path, step=step, steps=STEPS, interval=500)
    assert "measured on 15 sequences, of steps 1 to 5" in capsys.readouterr().err


def test_a_measure_that_fails_does_not_keep_a_capture_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashpoint.watching.logged_metrics.by_sequence", lambda *_: 1 / 0)
    with pytest.raises(Enough):
        loop(tmp_path, step=nan_weights, steps=STEPS, interval=500)
    assert list(captured_steps(tmp_path / "own")) == [3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("after", [20, 80])
def test_losses_that_end_above_the_margin_are_told_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: int
) -> None:
    """The mean of 100 losses crosses the margin of 0.3 nats with the fourth that is 8 nats higher."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        watched.step(loss * 0 + (1.0 if number < 100 else 9.0))

    run = loop(tmp_path, Pair(), step, steps=100 + after, interval=500, weights_interval=500, margin=0.3)
    told = capsys.readouterr().err
    assert {call.step for call in read_calls(tmp_path / "own")} == {0 if after == 20 else 154}
    assert run.verdict.startswith("stable" if after == 20 else "exploded")
    rule = "the mean of 100 steps has stood more than 0.3 above its minimum for 50 steps"
    assert (f"the loss has exploded, since step 103: {rule}" in told) == (after == 80)
    assert told.count("17 losses of the 50 that make an explosion; 33 more would decide") == (after == 20)
    assert ("the tensors are of step 0, which was observed last" in told) == (after == 20)
    assert ("watch own: the loop ends with the loss" in told) == (after == 20)


@pytest.mark.slow
@pytest.mark.parametrize(("high", "steps"), [(9.0, 30), (9.0, 130), (5.2, 30), (9.0, 12)])
def test_losses_that_rise_at_once_and_stay_are_told_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], high: float, steps: int
) -> None:
    """The first four losses are 5 nats. Ten at the end that are higher by more than the margin are told."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        watched.step(loss * 0 + (5.0 if number < 4 else high))

    run = loop(tmp_path, Pair(), step, steps=steps, interval=500, weights_interval=500, margin=0.3)
    diverged = high == 9.0 and steps > 12
    told = capsys.readouterr().err
    assert run.verdict.startswith("stable")
    assert ("10 losses that lie more than 0.3 above its first, 5: a mean of 100 losses" in told) == diverged
    assert bool(list((tmp_path / "own/captures").glob("*"))) == diverged
