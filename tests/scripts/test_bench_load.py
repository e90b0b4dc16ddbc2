"""``scripts/benchmarks/bench_load.py``: that it runs each load, and fits exponents; its seconds say nothing here."""

import sys

import pytest

from tests.conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

from benchmarks.bench_load import LOADS, Load, cost, exponent


@pytest.mark.slow
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_each_load_runs(load: Load) -> None:
    seconds, megabytes = cost(load, 1, REPOSITORY)
    assert seconds > 0
    assert megabytes > 1


def test_the_exponent_is_that_of_a_power_law() -> None:
    assert exponent({size: 0.2 * size**1.5 for size in (1, 2, 4, 8)}) == pytest.approx(1.5)
    assert exponent({1: 0.0, 2: 0.05, 4: 4.0, 8: 8.0}) == pytest.approx(1.0)  # what is too short says nothing
    assert exponent({1: 0.0, 2: 0.01, 4: -0.01}) is None
