"""The rule on norms made by hand."""

import json

import numpy as np
import pytest

from flashpoint.early_warning import HeadGrowth, Sentinel, SentinelState


def norms(hot: float) -> np.ndarray:
    """2 layers, 3 heads; the second layer's third head is hot."""
    return np.array([[1.0, 1.0, 1.0], [1.0, 1.0, hot]])


def warned_at(hot: dict[int, float], scale: float = 1.0) -> int | None:
    sentinel = Sentinel()
    told = [sentinel.update(step, scale * norms(value)) for step, value in hot.items()]
    warnings = [warning for warning in told if warning]
    assert len(warnings) <= 1
    return warnings[0].step if warnings else None


@pytest.mark.parametrize(
    ("hot", "step"),
    [
        ({0: 1.0, 250: 2.1, 500: 2.1, 750: 9.0}, 500),  # doubled within 500 steps
        ({0: 1.0, 250: 2.1, 499: 2.1}, None),  # no value yet that is 500 steps old
        ({0: 2.0, 500: 3.9, 1000: 7.7}, None),  # not quite doubled, twice
        ({0: 0.5, 500: 1.9}, None),  # doubled, but below twice the median head
        ({0: 2.0, 500: 4.0}, 500),
        ({0: 1.0, 500: 1.0, 700: 1.0, 1300: 2.0}, 1300),  # the newest value that is old enough: of step 700
    ],
)
def test_the_rule(hot: dict[int, float], step: int | None) -> None:
    assert warned_at(hot) == step
    assert warned_at(hot, scale=4.0) == step  # of the median, whatever that is


def test_growth_while_the_learning_rate_rises_is_none() -> None:
    sentinel = Sentinel(warmup_steps=200)
    told = [sentinel.update(step, norms(hot)) for step, hot in ((150, 0.1), (200, 1.5), (650, 2.5), (700, 3.1))]
    assert [warning and warning.step for warning in told] == [None, None, None, 700]


def test_where_a_layer_has_fewer_heads_no_head_is_warned_of() -> None:
    sentinel = Sentinel()
    for step, hot in ((0, 1.0), (500, 3.0)):
        sentinel.update(step, [[hot, 1.0, 1.0], [1.0, 1.0, np.nan]])
    assert sentinel.warning == HeadGrowth(500, 1, 1, 3.0, 3.0)
    assert len(sentinel.hottest()) == 5


def test_the_hottest_come_first_and_survive_a_resumption() -> None:
    sentinel = Sentinel()
    for step, factor in ((0, 1.0), (500, 3.0)):
        sentinel.update(step, [[1.0, factor], [0.5, 0.25 * (1 + factor)]])
    assert sentinel.hottest(2) == [HeadGrowth(500, 1, 2, 3.0, 3.0), HeadGrowth(500, 2, 2, 1.0, 2.0)]
    assert str(sentinel.hottest(1)[0]) == "L1H2 3.0 (×3.00)"
    resumed = Sentinel()
    resumed.load_state(SentinelState.model_validate_json(json.dumps(sentinel.state().model_dump())))
    assert resumed.hottest(4) == sentinel.hottest(4)
    assert resumed.warning == sentinel.warning == HeadGrowth(500, 1, 2, 3.0, 3.0)
