"""Treatment against control: what counts as a pair, and what the pairs decide."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashpoint.cli.run_words import select_runs
from flashpoint.runs.run import Run
from tests.records import write_run
from tests.scripts.loaded import script

SCRIPT = script("evidence/contrasts")

CONTRAST = SCRIPT.Contrast(setting="D", treatment="exact row sums", control="flash_bf16", runs=("a",), against=("b",))


def made(folder: Path, name: str, ends: list[tuple[int, int | None]]) -> list[Run]:
    """A run for each ``(steps, onset)``, with the seeds 0, 1, …"""
    attention = {"name": name}
    return select_runs(
        [
            write_run(folder / f"{name}-{seed}", attention, seed=seed, steps=steps, onset=onset)
            for seed, (steps, onset) in enumerate(ends)
        ]
    )


def cells_of(runs: list[Run], controls: list[Run]) -> dict[str, Any]:
    return dict(zip(SCRIPT.COLUMNS, SCRIPT.row(CONTRAST, runs, controls, "no"), strict=True))


def test_a_treatment_that_outlives_each_control_holds(tmp_path: Path) -> None:
    controls = made(tmp_path, "flash_bf16", 6 * [(700, 500)])
    cells = cells_of(made(tmp_path, "flash_fixed", 6 * [(1000, None)]), controls)
    assert (cells["pairs"], cells["crossed"], cells["alone"]) == (6, "0 / 6", "6 / 0")
    assert (cells["verdict"], cells["held to"], cells["expected"]) == ("holds", "1,000", "no")


def test_a_run_that_ended_before_its_control_exploded_says_nothing(tmp_path: Path) -> None:
    controls = made(tmp_path, "flash_bf16", [*5 * [(700, 500)], (1200, 1100)])
    cells = cells_of(made(tmp_path, "flash_fixed", 6 * [(1000, None)]), controls)
    assert (cells["alone"], cells["later"], cells["verdict"]) == ("5 / 0", "5 of 5", "undecided")


def test_where_the_control_holds_too_nothing_is_decided(tmp_path: Path) -> None:
    held = 8 * [(1000, None)]
    cells = cells_of(made(tmp_path, "flash_fixed", held), made(tmp_path, "x", held))
    assert (cells["alone"], cells["95 % interval"], cells["verdict"]) == ("0 / 0", "", "undecided")


@pytest.mark.parametrize(
    ("alone", "later", "expected"),
    [
        ((6, 6), (6, 6), "holds"),
        ((0, 6), (0, 6), "explodes"),
        ((1, 1), (14, 16), "later"),
        ((0, 0), (0, 9), "earlier"),
        ((5, 5), (5, 5), "undecided"),
    ],
)
def test_six_of_six_decide_and_five_of_five_do_not(
    alone: tuple[int, int], later: tuple[int, int], expected: str
) -> None:
    assert SCRIPT.verdict(alone, later) == expected


def test_the_norms_are_compared_at_the_last_step_of_both() -> None:
    class Measured:
        def __init__(self, steps: list[int], largest: list[float]) -> None:
            norms = np.zeros((2, 2, len(steps)))
            norms[1, 0] = largest
            self.w_q_norms = np.array(steps), norms

    pairs = [(Measured([9, 19, 29], [1, 2, 50]), Measured([9, 19], [1, 8])), (Measured([9], [3]), Measured([9], [12]))]
    cell = SCRIPT.growth(pairs, 2)
    assert cell.value["mean"] == pytest.approx(4)
