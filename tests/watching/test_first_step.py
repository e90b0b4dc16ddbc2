"""A loop that goes on from a checkpoint says with which step: everything counts from there."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import flashpoint
from flashpoint.errors import UserError
from flashpoint.runs.comparison import batches_of
from flashpoint.runs.folder import RunFolder
from flashpoint.watching.captures import read_calls
from flashpoint.watching.loop import Watch
from tests.records import call, refusal
from tests.watching.loops import Pair, capturing, loop, plain

BEGIN = 40_000
"""A multiple of the intervals below: the same steps of a loop are due."""


def test_all_that_is_recorded_is_that_of_a_new_loop_with_later_steps(tmp_path: Path) -> None:
    options = {"interval": 5, "weights_interval": 4, "log_interval": 2, "step": capturing(7, 6), "steps": 12}
    new = loop(tmp_path / "new", **options)
    on = loop(tmp_path / "on", first_step=BEGIN, **options)
    assert on.columns.keys() == new.columns.keys()
    assert "w_q_spectral_norm" in on.columns
    for name, (steps, values) in new.columns.items():
        later, same = on.columns[name]
        assert (later - BEGIN).tolist() == steps.tolist(), name
        np.testing.assert_array_equal(values, same, err_msg=name)
    assert {call.step for call in read_calls(tmp_path / "new/own")} == {7}
    assert {call.step for call in read_calls(tmp_path / "on/own")} == {BEGIN + 7}
    batches = batches_of(RunFolder(tmp_path / "on/own"))
    assert batches == {BEGIN + step: one for step, one in batches_of(RunFolder(tmp_path / "new/own")).items()}
    assert (new.verdict, on.verdict) == ("stable to 12", f"stable to {BEGIN + 12:,}")
    assert on.outcome.step == BEGIN + 12


@pytest.mark.slow
def test_an_explosion_has_the_step_of_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        loss = model(torch.randn(3, 12, 32)).square().mean()
        loss.backward()
        watched.step(loss * 0 + (1.0 if number < 100 else 9.0))

    run = loop(tmp_path, step=step, steps=160, first_step=BEGIN, interval=500, weights_interval=500, margin=0.3)
    assert run.onset == BEGIN + 103  # the fourth loss that is 8 nats higher moves the mean of 100 by more than 0.3
    assert "since step 40,103" in capsys.readouterr().err


@pytest.mark.parametrize(("first_step", "high", "told"), [(300, 16.0, True), (300, 2.9, False), (0, 16.0, False)])
def test_a_jump_after_the_first_step_of_a_loop_that_goes_on_is_told_while_it_happens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first_step: int, high: float, told: bool
) -> None:
    """The losses of 12 steps at 2.8 nats, then higher ones. A loop that begins anew has no optimiser state to lose."""
    with flashpoint.watch(Pair(), runs_dir=tmp_path, name="own", first_step=first_step) as watched:
        for number in range(40):
            watched.step(2.8 if number < 12 else high, grad_norm=1.0)
        line = "the loss rose from 2.8 to 16 in the first 30 steps after step 300: look at optimiser state"
        assert (line in capsys.readouterr().err) == told


def test_attention_that_comes_late_is_looked_for_at_growing_distances_from_the_first_step(tmp_path: Path) -> None:
    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        loss = (model(x) if number >= 4 else model.first.out(x)).square().mean()
        loss.backward()
        watched.step(loss, x)

    run = loop(tmp_path, step=step, steps=12, first_step=BEGIN + 1, interval=500, weights_interval=500)
    assert run.columns["score_max"][0].tolist() == [BEGIN + 1 + 4]  # looked for 0, 2, 4 steps after the first


def test_a_loop_whose_steps_are_never_handed_over_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with flashpoint.watch(Pair(), runs_dir=tmp_path, name="own", first_step=BEGIN) as watched:
        pass
    assert "watched.step was never called" in capsys.readouterr().err
    loop(tmp_path / "run", first_step=BEGIN, steps=2)
    with pytest.raises(UserError, match="a run is entered once"), watched, watched:
        pass


def test_it_is_no_life_that_a_survival_table_could_count(tmp_path: Path) -> None:
    loop(tmp_path, first_step=BEGIN, steps=2)
    told = f"error: {tmp_path / 'own'}: begins at step 40,000, and could not explode before; leave it out"
    assert refusal(call("survival", str(tmp_path / "own"))) == told


def test_with_a_run_of_the_same_steps_it_is_compared(tmp_path: Path) -> None:
    """The loop after four steps, and the same four steps made before a checkpoint: one model, one order of batches."""

    def seeded(model: nn.Module, number: int, watched: Watch) -> None:
        torch.manual_seed(number + skipped)
        plain(model, number, watched)

    skipped = 0
    model = Pair()
    start = copy.deepcopy(model)
    loop(tmp_path / "whole", model, seeded, steps=8)
    optimizer = torch.optim.SGD(start.parameters(), lr=0.01)
    for number in range(4):
        torch.manual_seed(number)
        start(torch.randn(3, 12, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    skipped = 4
    loop(tmp_path / "rest", start, seeded, steps=4, first_step=4)
    compared = call("compare", str(tmp_path / "whole/own"), str(tmp_path / "rest/own"))
    told = "4 steps of both: the same batches in 4 steps; equal losses; one has 8, the other 4\n"
    assert (compared.returncode, compared.stdout) == (0, told)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"first_step": -1}, ValueError, "first_step=-1: give a whole number, 0 or more"),
        ({"first_step": 1.5}, TypeError, "first_step=1.5: give a whole number, 0 or more"),
        (
            {"first_step": 10, "steps": 10},
            ValueError,
            "steps=10: counts from 0, as first_step=10 does; give more than that",
        ),
    ],
)
def test_a_first_step_that_cannot_be_is_refused(
    tmp_path: Path, options: dict[str, float], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        flashpoint.watch(Pair(), runs_dir=tmp_path / "runs", **options)  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())
