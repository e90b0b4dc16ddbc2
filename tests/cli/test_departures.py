"""What leaves the stable twin first, on runs where it is known by hand."""

import math
from pathlib import Path

import pytest

from tests.records import call, refusal, rows, write_run

STEPS = range(0, 100, 10)


def record(folder: Path, seed: int, onset: int | None, heads: dict[str, list[list[float]]]) -> str:
    """A run with two heads' values of each metric every 10 steps, in layer 2 of 2, after a warm-up of 20."""
    metrics = [
        {"step": step} | {name: [[0.0, 0.0], [series[at] for series in both]] for name, both in heads.items()}
        for at, step in enumerate(STEPS)
    ]
    return write_run(
        folder / f"{'exploding' if onset else 'stable'}-{seed}-{len(list(folder.iterdir()))}",
        {"name": "flash_bf16" if onset else "flash_fp32"},
        seed=seed,
        onset=onset,
        train={"warmup_steps": 20},
        metrics=metrics,
    )


FLAT = [1.0] * 10


def test_a_departure_is_for_good_and_outside_all_the_twin_had_after_the_warm_up(tmp_path: Path) -> None:
    twin = {
        "rises": [[9, 9, 1, 1, 1, 1, 1, 1, 1, 2], FLAT],  # 9 in the warm-up does not count, 2 at its end does
        "falls": [[5, 5, 5, 4, 5, 5, 5, 5, 5, 5], FLAT],
        "comes_back": [[3.0] * 10, FLAT],
        "ends": [FLAT, FLAT],
    }
    exploding = {
        "rises": [FLAT, [1, 1, 1, 3, 2, 2.5, 4, 5, 6, 7]],  # 2 at step 40 is inside: for good from step 50 on
        "falls": [[5, 5, 5, 5, 5, 5, 5, 3, 3, 3], FLAT],
        "comes_back": [[3, 3, 3, 9, 9, 9, 9, 9, 9, 3], FLAT],
        "ends": [FLAT, [1, 1, 1, 1, 1, 1, 2, math.nan, math.nan, math.nan]],  # what is no number has left, too
    }
    runs = [record(tmp_path, 1, None, twin), record(tmp_path, 1, 65, exploding)]
    runs += [record(tmp_path, 2, None, twin), record(tmp_path, 2, 85, {**exploding, "falls": [FLAT, FLAT]})]
    metrics = [word for name in ("falls", "comes_back", "rises", "ends") for word in ("--departures", name)]
    assert rows(call("series", *runs, *metrics)) == [
        "| `falls` | 2 of 2 | 30 | -5 to 65 |",  # 65 − 70; of the second run the first step after the warm-up, 85 − 20
        "| `rises` | 2 of 2 | 25 | 15 to 35 |",
        "| `ends` | 2 of 2 | 15 | 5 to 25 |",
        "| `comes_back` | 0 of 2 |  |  |",
    ]


def test_the_hottest_head_is_compared_with_the_same_head_of_the_twin(tmp_path: Path) -> None:
    hotter = [*FLAT[:-1], 9.0]
    twin = {"w_q_spectral_norm": [[99.0] * 10, FLAT], "rises": [[8.0] * 10, FLAT]}
    exploding = {"w_q_spectral_norm": [FLAT, hotter], "rises": [[8.0] * 10, [1, 1, 1, 1, 1, 5, 5, 5, 5, 5]]}
    runs = [record(tmp_path, 1, None, twin), record(tmp_path, 1, 85, exploding)]
    largest, hottest = (
        rows(call("series", *runs, "--departures", "rises", *flag))[-1] for flag in ([], ["--hottest-head"])
    )
    assert largest == "| `rises` | 0 of 1 |  |  |"  # head 1 has 8 in both
    assert hottest == "| `rises` | 1 of 1 | 35 | 35 to 35 |"


@pytest.mark.parametrize(
    ("count", "metric", "told"),
    [
        (0, "rises", "needs one stable run of its seed and data beside it; given: none"),
        (2, "rises", "needs one stable run of its seed and data beside it; given: stable-"),
        (1, "nothing", "nothing of heads was not measured, or not kept; it has rises"),
    ],
)
def test_runs_that_do_not_pair_are_one_line(tmp_path: Path, count: int, metric: str, told: str) -> None:
    runs = [record(tmp_path, 1, None, {"rises": [FLAT, FLAT]}) for _ in range(count)]
    runs += [record(tmp_path, 1, 50, {"rises": [FLAT, FLAT]})]
    runs += [record(tmp_path, 2, None, {"rises": [FLAT, FLAT]})]  # another seed's does not count
    assert told in refusal(call("series", *runs, "--departures", metric))


def test_a_twin_that_was_not_measured_after_its_warm_up_is_one_line(tmp_path: Path) -> None:
    metrics = [{"step": 10, "rises": [[1.0]]}]
    for name, onset in (("flash_bf16", 80), ("flash_fp32", None)):
        write_run(tmp_path / name, {"name": name}, onset=onset, train={"warmup_steps": 20}, metrics=metrics)
    told = refusal(call("series", tmp_path, "--departures", "rises"))
    assert told == f"error: {tmp_path}/flash_fp32: rises was not measured after the warm-up; give a longer run"


def test_a_twin_without_a_range_is_one_line(tmp_path: Path) -> None:
    """No value lies within a range up to NaN: the run would have left it at its first step after the warm-up."""
    runs = [record(tmp_path, 1, None, {"ties": [[*FLAT[:-1], math.nan], FLAT]})]
    runs.append(record(tmp_path, 1, 85, {"ties": [FLAT, FLAT]}))
    told = refusal(call("series", *runs, "--departures", "ties"))
    assert f"{runs[0]}: ties is NaN in 1 of 8 observations after the warm-up" in told
