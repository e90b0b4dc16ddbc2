"""What a recorded run says of itself."""

import math
from pathlib import Path

import numpy as np
import pytest

from flashpoint.cli.run_words import open_run
from flashpoint.errors import UserError
from tests.records import write_run


@pytest.mark.parametrize(
    ("onset", "measured", "head"),
    [
        (140, (100, 200, 300), (2, 1)),  # where first measured since the onset
        (200, (100, 200, 300), (2, 1)),
        (250, (100, 200, 300), (3, 1)),
        (250, (100, 200), (2, 1)),  # not measured since
        (None, (100, 200, 300), (3, 1)),
    ],
)
def test_the_layer_that_explodes_is_the_hottest_at_the_onset(
    tmp_path: Path, onset: int | None, measured: tuple[int, ...], head: tuple[int, int]
) -> None:
    norms = {100: (9.0, 1.0, 1.0), 200: (9.0, 50.0, 20.0), 300: (9.0, 60.0, 70.0)}
    metrics = [
        {"step": step, **{f"layer/{n}/head/1/w_q_spectral_norm": norm for n, norm in enumerate(norms[step], 1)}}
        for step in measured
    ]
    run = open_run(write_run(tmp_path / "run", {"name": "flash_bf16"}, onset=onset, metrics=metrics))
    assert run.hottest_head == head
    assert run.hottest_layer == head[0]


@pytest.mark.parametrize(("onset", "head"), [(140, (2, 1)), (250, (3, 1)), (50, (2, 1))])
def test_of_a_run_that_turned_nan_the_last_norms_that_are_numbers_tell_the_hottest_head(
    tmp_path: Path, onset: int, head: tuple[int, int]
) -> None:
    """Its weights are NaN from the onset on, and the norms of all heads with them: the largest of these is none."""
    norms = {100: [[1.0], [9.0], [2.0]], 200: [[1.0], [9.0], [20.0]], 299: [["nan"], ["inf"], ["nan"]]}
    last = 200 if onset > 200 else 100
    metrics = [{"step": step, "w_q_spectral_norm": norms[step]} for step in (100, 200) if step <= last]
    metrics.append({"step": 299, "w_q_spectral_norm": norms[299]})
    path = write_run(tmp_path / "run", {"name": "flash_bf16"}, onset=onset, outcome="nonfinite", metrics=metrics)
    run = open_run(path)
    assert run.hottest_head == head
    assert run.hottest_layer == head[0]


def test_a_mean_of_losses_is_of_those_that_are_numbers(tmp_path: Path) -> None:
    losses = {step: math.nan if step % 50 == 49 else float(step) for step in range(300)}
    metrics = [{"step": step, "loss": loss} for step, loss in losses.items()]
    smoothed = open_run(write_run(tmp_path / "run", {"name": "flash_bf16"}, metrics=metrics)).smoothed("loss")
    assert smoothed is not None
    steps, means = smoothed.series
    known = [loss for loss in losses.values() if math.isfinite(loss)]
    assert means[-1] == pytest.approx(np.mean(known[-smoothed.steps :]))
    assert (steps[-1], np.isfinite(means).all()) == (298, True)


def test_a_run_whose_norms_never_were_numbers_has_the_papers_layer_and_no_hottest_head(tmp_path: Path) -> None:
    metrics = [{"step": 30, "w_q_spectral_norm": [["nan"], ["nan"], ["nan"]]}]
    path = write_run(tmp_path / "run", {"name": "flash_bf16"}, onset=20, outcome="nonfinite", metrics=metrics)
    assert open_run(path).hottest_layer == 2
    with pytest.raises(UserError, match="w_q_spectral_norm of heads was never a number"):
        _ = open_run(path).hottest_head


@pytest.mark.parametrize(
    ("steps", "onset", "outcome", "failed_at"),
    [
        (400, 389, "exploded", 389),
        (390, 389, "nonfinite", 389),
        (390, None, "nonfinite", 389),  # 390 steps, from 0 on
        (390, None, "stable", None),
        (1, 0, "nonfinite", 0),
    ],
)
def test_a_run_fails_at_a_step_that_counts_from_0(
    tmp_path: Path, steps: int, onset: int | None, outcome: str, failed_at: int | None
) -> None:
    run = write_run(tmp_path / "run", {"name": "flash_bf16"}, steps=steps, onset=onset, outcome=outcome)
    assert open_run(run).failed_at == failed_at
    assert open_run(run).verdict == (f"stable to {steps}" if failed_at is None else f"{outcome} at {failed_at}")
