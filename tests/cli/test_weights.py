"""``flashpoint weights`` on distances that are known by hand."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from tests.records import call, rows, values, write_run


def record(folder: Path, differs_in: str, seed: int, distance: float, spread: float = 1.0, text: str = "a") -> str:
    at = {"weights_largest/all": 1.0, "weights_wasserstein/all": distance, "weights_spread/all": spread}
    manifest = {"twin": {"run": "twin", "differs_in": differs_in}, "data": {"fingerprint": text}}
    return write_run(
        folder / f"{differs_in}-{seed}", {"name": "sdpa"}, seed=seed, manifest=manifest, metrics=[{"step": 99, **at}]
    )


def test_ratios_of_fewer_seeds_than_the_row_has_say_how_many(tmp_path: Path) -> None:
    """The row has three pairs, the control two of their seeds: ratios 2 and 8, of which SciPy has the interval."""
    runs = [record(tmp_path, "order", seed, distance) for seed, distance in ((1, 2.0), (2, 8.0), (3, 100.0))]
    runs += [record(tmp_path, "precision", seed, 1.0) for seed in (1, 2)]
    low, high = np.exp(ttest_1samp(np.log([2.0, 8.0]), 0).confidence_interval(0.95))
    order, _ = rows(call("weights", *runs, "--control", "precision"))
    assert order.startswith("| order | 3 |")
    assert order.endswith(f"| 4 ({low:.3g} to {high:.3g}), n = 2 |")
    told = values("weights", *runs, "--control", "precision")[0]["W₁ over that of precision"]
    assert told == {"mean": pytest.approx(4), "low": pytest.approx(low), "high": pytest.approx(high), "n": 2}
    assert "n = " not in call("weights", *runs[:2], *runs[3:], "--control", "precision").stdout


def test_a_ratio_is_of_runs_of_one_text(tmp_path: Path) -> None:
    """Of seeds 1 and 2 the control has another text, of seed 3 the same: ratio 6 over 2."""
    runs = [record(tmp_path, "order", seed, 6.0) for seed in (1, 2, 3)]
    runs += [record(tmp_path, "precision", seed, 2.0, text=text) for seed, text in ((1, "b"), (2, "b"), (3, "a"))]
    told = values("weights", *runs, "--control", "precision")[0]["W₁ over that of precision"]
    assert told == {"mean": pytest.approx(3), "low": None, "high": None, "n": 1}
    assert "corpus a, b" in call("weights", *runs).stderr
    assert "corpus" not in call("weights", *runs[:3]).stderr


def test_both_distances_are_shown_and_the_rest_on_request(tmp_path: Path) -> None:
    run = record(tmp_path, "order", 1, 2.0)
    (row,) = rows(call("weights", run))
    assert row == "| order | 1 | 1.00e+00 | 2.00e+00 |"
    (row,) = rows(call("weights", run, "--columns", "all"))
    assert row == "| order | 1 | 1.00e+00 | 1 | 2.00e+00 | 2.00e+00 |  |"


def test_equal_weights_have_no_ratio_and_equal_values_no_spread(tmp_path: Path) -> None:
    runs = [record(tmp_path, "order", seed, distance) for seed, distance in ((1, 2.0), (2, 0.0), (3, 2.0))]
    runs += [record(tmp_path, "precision", seed, distance, 0.0) for seed, distance in ((1, 0.5), (2, 1.0), (3, 0.0))]
    order, precision = values("weights", *runs, "--control", "precision")
    assert order["W₁ over that of precision"] == {"mean": pytest.approx(4), "low": None, "high": None, "n": 1}
    assert order["W₁ over the spread"]["mean"] == pytest.approx(4 / 3)
    assert precision["W₁ over the spread"] is None
    assert precision["over the spread"] is None
    same = [record(tmp_path / "same", "order", 1, 0.0), record(tmp_path / "same", "precision", 1, 0.0)]
    assert values("weights", *same, "--control", "precision")[0]["W₁ over that of precision"] is None
