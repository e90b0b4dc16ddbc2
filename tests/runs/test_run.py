"""What a recorded run says of itself."""

from pathlib import Path

import pytest

from flashpoint.runs.select import open_run
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
