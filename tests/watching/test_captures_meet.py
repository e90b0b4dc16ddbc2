"""Captures that are asked for at the same time, by the loop and by what the watch finds, or by two watched models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flashpoint
from flashpoint.cli.run_words import open_run
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.watching.loops import Pair, loop, plain


def steps_of(capture: Path) -> list[int]:
    return list(dict.fromkeys(json.loads(line)["step"] for line in (capture / "delta.jsonl").open()))


def captures(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "captures").iterdir())


@pytest.mark.slow
def test_a_loop_that_captures_at_every_step_loses_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], warned_soon: int
) -> None:
    def step(model: Any, number: int, watched: Watch) -> None:
        with torch.no_grad():
            model.second.qkv.weight[8:16] *= 1.01
        if number > warned_soon:
            watched.capture("mine", sequences=0)
        plain(model, number, watched)

    loop(tmp_path, step=step, steps=warned_soon + 30, interval=500, weights_interval=10, log_interval=500)
    told = [line for line in capsys.readouterr().err.splitlines() if "an explosion may follow" in line]
    assert len(told) == 1
    assert "an explosion may follow; mine; wrote" in told[0]
    at = int(told[0].split(":")[1].removeprefix(" step "))
    folder = tmp_path / f"own/captures/step-{at:07}"
    assert [call.layer for call in read_calls(folder)] == [1, 2]
    assert steps_of(folder) == [at + 1]


@pytest.mark.slow
def test_two_watched_models_take_turns(tmp_path: Path) -> None:
    """The first collects without end; the second is observed and captured all the same."""
    models = Pair(), Pair()
    with (
        flashpoint.watch(models[0], runs_dir=tmp_path, name="first", interval=10) as first,
        flashpoint.watch(models[1], runs_dir=tmp_path, name="second", interval=10) as second,
    ):
        for number in range(30):
            if number == 3:
                first.capture(sequences=10**6)
            if number == 5:
                second.capture(sequences=6)
            for model, watched in zip(models, (first, second), strict=True):
                plain(model, number, watched)
                model.zero_grad()
    assert captures(tmp_path / "second") == ["step-0000006"]
    assert steps_of(tmp_path / "second/captures/step-0000006") == [7, 8]
    assert len(steps_of(tmp_path / "first/captures/step-0000003")) > 15


@pytest.mark.slow
def test_a_watched_model_that_is_trained_no_more_does_not_hold_up_another(tmp_path: Path) -> None:
    models = Pair(), Pair()
    with (
        flashpoint.watch(models[0], runs_dir=tmp_path, name="first", interval=1000) as first,
        flashpoint.watch(models[1], runs_dir=tmp_path, name="second", interval=1000) as second,
    ):
        first.capture(sequences=10**6)
        for number in range(130):
            plain(models[0], number, first)
            if number == 5:
                second.capture(sequences=0)
                plain(models[1], number, second)
    assert steps_of(tmp_path / "first/captures/step-0000000")[-1] == 129


def test_an_observation_of_a_model_that_is_trained_no_more_ends_for_another(tmp_path: Path) -> None:
    """Compiled models run uncompiled while one is recorded."""
    models = Pair(), Pair()
    with (
        flashpoint.watch(models[0], runs_dir=tmp_path, name="first", interval=1) as first,
        flashpoint.watch(models[1], runs_dir=tmp_path, name="second", interval=1000) as second,
    ):
        plain(models[0], 0, first)
        for number in range(105):
            plain(models[1], number, second)
        assert not second.busy
        plain(models[0], 1, first)
        plain(models[0], 2, first)
    seen = [open_run(name, tmp_path).columns["row_sum_relative_bias"][0].tolist() for name in ("first", "second")]
    assert seen[0] == [0, 2]
    assert seen[1] == [100]


def test_the_tensors_of_a_step_are_not_replaced_by_those_of_a_later_one(tmp_path: Path) -> None:
    """The loss of the captured step is read steps later, and is no number."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 3:
            watched.capture(sequences=6)
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        loss.backward()
        watched.step(loss * float("nan") if number >= 3 else loss, x)

    loop(tmp_path, step=step, steps=12, interval=2, log_interval=10)
    assert captures(tmp_path / "own") == ["step-0000003"]
    assert {call.step for call in read_calls(tmp_path / "own")} == {3}
    assert steps_of(tmp_path / "own/captures/step-0000003") == [4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("skipped", "captured"), [(3, 6), (20, 2)])
def test_a_capture_waits_for_a_step_with_a_backward_pass(tmp_path: Path, skipped: int, captured: int) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 3:
            watched.capture(sequences=0)
        if 3 <= number < 3 + skipped:
            watched.step(1.0)
        else:
            plain(model, number, watched)

    loop(tmp_path, step=step, steps=30, interval=1)
    assert captures(tmp_path / "own") == [f"step-{captured:07}"]


@pytest.mark.parametrize("sequences", [-1, 2.5, "many", None, True])
def test_a_wrong_number_of_sequences_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sequences: Any
) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            watched.capture(sequences=sequences)
        plain(model, number, watched)

    loop(tmp_path, step=step, interval=500)
    assert f"capture(sequences={sequences!r}): give 0 or more" in capsys.readouterr().err
    assert captures(tmp_path / "own") == ["step-0000001"]
    assert not (tmp_path / "own/captures/step-0000001/delta.jsonl").exists()


def test_losses_are_logged_where_a_capture_cannot_be_written(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        if number == 1:
            (tmp_path / "own/captures").write_text("in its place")
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean()
        loss.backward()
        watched.step(loss * float("inf") if number > 3 else loss, x)

    run = loop(tmp_path, step=step, steps=20, interval=5, log_interval=10)
    assert run.columns["loss"][0].tolist() == list(range(20))
    assert run.ending == "nonfinite"
