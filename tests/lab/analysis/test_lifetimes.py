"""Survival statistics against a textbook: remission times of Freireich et al. (1963), as in Kleinbaum & Klein."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from flashpoint.cli.selection import ranges
from flashpoint.lab.analysis.lifetimes import Lifetimes, choices_of, control_of, grouped, logrank_p, settings_of
from flashpoint.lab.config import Config, TrainConfig
from flashpoint.numerics.variant import AttentionVariant
from flashpoint.quantiles import clopper_pearson
from flashpoint.runs.folder import RunFolder
from flashpoint.runs.run import Run
from tests.records import write_run

TREATED = Lifetimes(
    "treated",
    "treated",
    np.array([6, 6, 6, 7, 10, 13, 16, 22, 23]),
    np.array([6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]),
)
PLACEBO = Lifetimes(
    "placebo",
    "placebo",
    np.array([1, 1, 2, 2, 3, 4, 4, 5, 5, 8, 8, 8, 8, 11, 11, 12, 12, 15, 17, 22, 23]),
    np.array([]),
)


def test_the_curve_is_the_textbooks() -> None:
    steps, share, low, high = TREATED.curve()
    found = dict(zip(steps.tolist(), share.tolist(), strict=True))
    expected = {0: 1, 6: 0.8571, 7: 0.8067, 10: 0.7529, 13: 0.6902, 16: 0.6275, 22: 0.5378, 23: 0.4482}
    assert {step: found[step] for step in expected} == pytest.approx(expected, abs=5e-5)
    assert (low <= share).all()
    assert (share <= high).all()
    assert TREATED.median_onset == 23
    assert PLACEBO.median_onset == 8
    _, share, low, high = PLACEBO.curve()  # nobody is left at the end
    assert (share[-1], low[-1], high[-1]) == (0, 0, high[-2])


@pytest.mark.parametrize(
    ("onsets", "censored", "median"),
    [([1, 2, 5, 9], [], 3.5), ([1, 2, 5], [], 2), ([1, 2], [10, 10], 2), ([1, 2, 8], [3], 5), ([1], [10, 10], None)],
)
def test_a_median_between_two_onsets_is_their_middle(onsets: list[int], censored: list[int], median: float) -> None:
    """As R's survfit has it; in the fourth case half are left from 2 to 8, though one of them is lost at 3. In the
    third R has 6, the middle up to the last length, which is no onset."""
    runs = Lifetimes("some", "some", np.array(onsets), np.array(censored, np.int64))
    assert runs.median_onset == median


def test_the_test_is_the_textbooks() -> None:
    assert logrank_p(TREATED, PLACEBO) == pytest.approx(4.17e-5, rel=1e-2)  # χ² = 16.79


def test_without_an_explosion_nothing_is_claimed() -> None:
    held = Lifetimes("held", "held", np.array([], np.int64), np.array([100, 100, 100, 100]))
    assert held.median_onset is None
    assert clopper_pearson(0, 4) == pytest.approx((0, 1 - 0.025 ** (1 / 4)))
    assert logrank_p(held, held) is None
    steps, share, *_ = held.curve()
    assert steps.tolist() == [0, 100]
    assert share.tolist() == [1, 1]


def test_seeds_are_told_in_ranges() -> None:
    assert [ranges(seeds) for seeds in ([7], [4, 0, 2, 3, 2], range(3))] == ["7", "0, 2 to 4", "0 to 2"]


def test_groups_that_never_ran_side_by_side_are_not_compared() -> None:
    late = Lifetimes("late", "late", np.array([100, 110, 120]), np.array([], np.int64))
    short = Lifetimes("short", "short", np.array([], np.int64), np.array([50, 60, 70]))
    few = Lifetimes("few", "few", np.array([100, 200]), np.array([], np.int64))
    assert logrank_p(late, short) is None
    assert logrank_p(few, TREATED) is None
    assert logrank_p(PLACEBO, TREATED) == logrank_p(TREATED, PLACEBO)


def test_a_control_is_found_by_its_label_or_else_by_its_name() -> None:
    def group(label: str, variant: str, setting: str = "") -> Lifetimes:
        return Lifetimes(label, variant, np.array([1]), np.array([2]), setting)

    coarse, other, elsewhere = group("a, coarse", "a"), group("b", "b"), group("a", "a", "lr=1")
    groups = [coarse, other, elsewhere]
    assert control_of(other, groups, "a") is coarse
    assert control_of(other, groups, "a, coarse") is coarse
    assert control_of(elsewhere, groups, "b") is None


def test_the_length_of_a_decay_that_there_is_not_is_no_setting() -> None:
    def run(min_lr_ratio: float, decay_steps: int) -> Run:
        config = Config(train=TrainConfig(lr=0.5, min_lr_ratio=min_lr_ratio, decay_steps=decay_steps))
        return cast(Run, SimpleNamespace(watched=False, config=config))

    assert settings_of(run(min_lr_ratio=1.0, decay_steps=9)) == settings_of(run(min_lr_ratio=1.0, decay_steps=7))
    assert settings_of(run(min_lr_ratio=0.1, decay_steps=9)) != settings_of(run(min_lr_ratio=0.1, decay_steps=7))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.1, 0.2]), st.sampled_from([0, 9]), st.sampled_from([1.0, 2.0]), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_a_group_is_named_by_what_differs_between_any_two_runs(drawn: list[tuple[float, int, float, bool]]) -> None:
    def run(lr: float, warmup_steps: int, beta: float, exact: bool) -> Run:
        attention = AttentionVariant(name="own", shift="dynamic_max", beta=beta, exact_row_sum=exact)
        config = Config(train=TrainConfig(lr=lr, warmup_steps=warmup_steps))
        return cast(Run, SimpleNamespace(watched=False, config=config, attention=attention, title="own"))

    runs = [run(*one) for one in drawn]
    settings_, choices = [settings_of(one) for one in runs], [choices_of(one) for one in runs]
    expected: dict[tuple[str, str], list[Run]] = {}
    for one, own, chosen in zip(runs, settings_, choices, strict=True):
        unusual = [name for name in own if own[name] != Counter(s[name] for s in settings_).most_common(1)[0][0]]
        differ = [name for name in chosen if any(other.get(name, chosen[name]) != chosen[name] for other in choices)]
        setting = " ".join(f"{name}={own[name]}" for name in unusual)
        label = " ".join(["own", *(f"{name}={chosen[name]}" for name in differ)])
        expected.setdefault((setting, label), []).append(one)
    assert list(grouped(runs).items()) == list(expected.items())


def test_a_run_older_than_a_setting_has_its_default(tmp_path: Path) -> None:
    def run(name: str, **train: str) -> Run:
        write_run(tmp_path / name, {"name": "flash_bf16"}, train=train)
        return Run.of_folder(RunFolder(tmp_path / name))

    old, half = run("old"), run("half", precision="fp16")
    config = json.loads((tmp_path / "old/config.json").read_text())
    del config["train"]["precision"]
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    assert settings_of(old) == settings_of(run("new", precision="bf16"))
    assert settings_of(old) != settings_of(half)


def test_the_medians_interval_is_the_textbooks() -> None:
    # R's survfit with conf.type="log-log" on the same data: median 23, 95 % interval 13 to none.
    assert TREATED.median_onset == 23
    assert TREATED.median_interval() == (13, None)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_a_median_has_an_interval_only_from_runs_that_can_miss_it_rarely(count: int) -> None:
    """The lower end of few runs is their first onset. It is above the median where all are: none of ``count`` fair
    coins shows heads."""
    runs = Lifetimes("some", "some", 100 * np.arange(1, count + 1), np.array([], np.int64))
    low, high = runs.median_interval()
    if binom.cdf(0, count, 0.5) > 0.05:
        assert (low, high) == (None, None)
    else:  # R's survfit with conf.type="log-log": 100 to NA of five onsets, 100 to 700 of eight
        assert (low, high) == (100, None if count == 5 else 700)
