"""Losses that are no finite number, or exactly 0: what a loop is told of them, and when they end it.

The loops know which step is bad, and whether its update is skipped.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from flashpoint.cli.main import main
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.metric_table import LOSS
from flashpoint.watching.captures import captured_steps
from flashpoint.watching.loop import Watch
from tests.watching.loops import Step, loop

NAN = float("nan")
BAD = 4


def with_losses(of: Callable[[int], float], skips: bool = True) -> Step:
    """Return a step whose loss is scaled; the update of a loss that is no finite number is skipped or made."""

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        x = torch.randn(3, 12, 32)
        loss = model(x).square().mean() * of(number)
        loss.backward()
        watched.step(loss, x)
        if skips and not loss.isfinite():
            model.zero_grad()

    return step


def test_a_loop_that_ends_with_nan_is_told_of_that_one_and_not_of_one_that_is_left_out(tmp_path: Path) -> None:
    run = loop(tmp_path, step=with_losses(lambda n: NAN if n in (BAD, 19) else 1.0), steps=20, interval=500)
    assert (run.verdict, run.outcome.onset_step) == ("nonfinite at 19", 19)
    first, last = RunFolder(tmp_path / "own").read_nonfinite()
    assert (first.step, last.step) == (BAD, 19)
    assert run.outcome.nonfinite == last.text


@pytest.mark.slow
@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("log_interval", [1, 10])
def test_a_batch_of_nan_is_told_with_its_step_and_does_not_end_a_healthy_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log_interval: int, value: float
) -> None:
    bad = with_losses(lambda number: value if number == BAD else 1.0)
    run = loop(tmp_path, step=bad, steps=20, interval=500, log_interval=log_interval)
    assert run.verdict == "stable to 20"
    told = capsys.readouterr().err
    assert told.count(f"step {BAD}: the loss is {value}, and the parameters are finite") == (log_interval == 1)
    assert told.count(f"step {BAD + 1}: the loss is a finite number again: the verdict leaves out that of step 4") == 1
    steps, losses = run.columns[LOSS.name]
    assert list(steps[~torch.tensor(losses).isfinite().numpy()]) == [BAD]
    assert (tmp_path / f"own/captures/step-{BAD:07}/batch.pt").exists()


def test_diagnose_says_of_a_batch_of_nan_that_the_attention_after_it_is_finite(tmp_path: Path) -> None:
    loop(tmp_path, step=with_losses(lambda number: NAN if number == BAD else 1.0), steps=20, interval=500)
    result = CliRunner().invoke(main, ["diagnose", str(tmp_path / "own")])
    assert result.exit_code == 0, result.output
    first = next(line for line in result.output.splitlines() if line.startswith("Nothing found"))
    assert f"the loss of step {BAD} was no finite number, and the attention of step {BAD + 2} is finite" in first
    assert f"captures/step-{BAD:07}/batch.pt" in first
    assert "train twice" not in result.output


def test_nan_that_reaches_the_parameters_ends_the_run_at_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = list[str]()
    bad = with_losses(lambda number: NAN if number == BAD else 1.0, skips=False)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        bad(model, number, watched)
        verdicts.append(watched.verdict)

    run = loop(tmp_path, step=step, steps=8, interval=500, log_interval=1)
    assert run.verdict == f"nonfinite at {BAD}"
    assert verdicts.index("nonfinite") == BAD + 1
    told = capsys.readouterr().err
    assert f"step {BAD}: the loss is no finite number, nor are parameters of the model: the verdict is nonf" in told


@pytest.mark.slow
def test_nan_that_stays_is_judged_after_ten_losses_and_keeps_the_first_step_of_its_stretch(tmp_path: Path) -> None:
    """Step 4 alone is NaN, too; it is not the first of those that stay."""
    verdicts = list[str]()
    bad = with_losses(lambda number: NAN if number == BAD or number >= 7 else 1.0)

    def step(model: nn.Module, number: int, watched: Watch) -> None:
        bad(model, number, watched)
        verdicts.append(watched.verdict)

    run = loop(tmp_path, step=step, steps=20, interval=500, log_interval=1)
    assert run.verdict == "nonfinite at 7"
    assert verdicts.index("nonfinite") == 16


@pytest.mark.parametrize("log_interval", [1, 10])
def test_a_loop_that_ends_with_nan_is_nonfinite(tmp_path: Path, log_interval: int) -> None:
    bad = with_losses(lambda number: NAN if number == 7 else 1.0)
    run = loop(tmp_path, step=bad, steps=8, interval=500, log_interval=log_interval)
    assert run.verdict == "nonfinite at 7"


def test_batches_of_nan_all_along_are_told_and_captured_three_times_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = loop(tmp_path, step=with_losses(lambda number: NAN if number % 4 == 2 else 1.0), steps=40, interval=500)
    assert run.verdict == "stable to 40"
    told = capsys.readouterr().err
    assert told.count("the loss is a finite number again") == 3
    assert "10 losses were no finite numbers: the verdict leaves them out" in told
    assert set(captured_steps(tmp_path / "own")) >= {2, 6, 10}
    assert max(captured_steps(tmp_path / "own")) < 18


@pytest.mark.slow
def test_nan_that_stays_after_many_batches_of_it_is_captured(tmp_path: Path) -> None:
    bad = with_losses(lambda number: NAN if (number % 4 == 2 or number > 30) else 1.0)
    run = loop(tmp_path, step=bad, steps=60, interval=500, log_interval=1)
    assert run.verdict == "nonfinite at 30"
    assert max(captured_steps(tmp_path / "own")) >= 30


@pytest.mark.parametrize("zeros", [9, 10])
def test_ten_losses_of_exactly_0_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], zeros: int) -> None:
    few = with_losses(lambda number: 0.0 if 2 <= number < 2 + zeros else 1.0)
    assert loop(tmp_path, step=few, steps=20, interval=500).verdict == "stable to 20"
    assert capsys.readouterr().err.count("in a row are exactly 0") == (zeros == 10)


@pytest.mark.slow
@pytest.mark.parametrize(("advantages", "told"), [([1.0, -1.0, 0.0], "policy gradient"), ([0.0] * 3, "labels")])
@pytest.mark.parametrize("log_interval", [1, 4])
def test_losses_of_0_with_gradients_lack_no_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], advantages: list[float], told: str, log_interval: int
) -> None:
    """As those of GRPO: at the policy that drew the samples the loss is the mean of their advantages."""

    def step(model: nn.Module, _number: int, watched: Watch) -> None:
        scores = model(torch.randn(3, 12, 32)).mean((1, 2))
        loss = -((scores - scores.detach()).exp() * torch.tensor(advantages)).mean()
        loss.backward()
        watched.step(loss)

    loop(tmp_path, step=step, steps=16, interval=500, log_interval=log_interval)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "exactly 0" in one]
    assert told in line
