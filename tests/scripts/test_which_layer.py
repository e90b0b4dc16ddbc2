"""Which layer grows first: what a measure may look at, what is one setting, and what the two halves decide."""

from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from flashpoint.cli.run_words import open_run
from flashpoint.runs.run import Run
from tests.records import write_run
from tests.scripts.loaded import script

SCRIPT = script("evidence/which_layer")

FLAT, GROWN = [[1.0, 1.0], [1.0, 4.0], [2.0, 3.0]], [[1.0, 1.0], [1.0, 4.0], [2.0, 30.0]]
"""W_Q [layers, heads] of a run in which head 2 of layer 3 grows; before, layer 2 has the largest head."""


def made(path: Path, attn: dict[str, Any] | None = None, **more: Any) -> Run:
    """A run whose W_Q is FLAT until step 1,900, so that the warning comes at 2,000."""
    metrics = [
        {
            "step": step,
            "w_q_spectral_norm": GROWN if step >= 2000 else FLAT,
            "entropy": [[1.0, 1.0], [3.0, 3.0], [2.0, 2.0] if step <= 1000 else [0.0, 0.0]],
            "row_sum_relative_bias": [[1e-6, 1e-6], [0.0, 0.0], [-3e-6, -1e-6]],
        }
        for step in range(0, 2600, 100)
    ]
    made_of: dict[str, Any] = {"config": {"model": {"n_layer": 3}}, "metrics": metrics, "steps": 2600, **more}
    return open_run(write_run(path, attn or {"name": "flash_bf16"}, **made_of))


def test_a_measure_sees_nothing_after_half_of_the_way(tmp_path: Path) -> None:
    right = SCRIPT.example(made(tmp_path / "run")).right
    assert right[SCRIPT.LAYER_2] == 0
    assert right[SCRIPT.CHANCE] == pytest.approx(1 / 3)
    # Until step 1,000 layer 2 has the largest head, later layer 3.
    assert right["W_Q, largest head"] == 0
    # Of trouble is the smallest entropy: until step 1,000 that of layer 1, with what came later that of layer 3.
    assert right["entropy"] == 0
    # Bias of either sign: layer 3.
    assert right["bias against the exact row sum"] == 1
    assert "sensitivity" not in right


@pytest.mark.parametrize(("onset", "told"), [(None, True), (2100, True), (2099, False), (1500, False)])
def test_a_warning_after_the_onset_or_just_before_tells_no_layer(tmp_path: Path, onset: int | None, told: bool) -> None:
    assert (SCRIPT.example(made(tmp_path / "run", onset=onset)) is not None) is told


@pytest.mark.parametrize(
    "attn",
    [
        {"name": "flash_exact_rowsum"},
        {"name": "flash_bf16", "layers": [2], "elsewhere": {"name": "flash_exact_rowsum"}},
        {"name": "flash_bf16", "delta_error": {"kind": "bias", "size": 1e-5, "layers": [2]}},
    ],
)
def test_what_treats_layers_unlike_or_leaves_the_rounding_out_is_not_counted(
    tmp_path: Path, attn: dict[str, Any]
) -> None:
    assert SCRIPT.counted(made(tmp_path / "plain"))
    assert not SCRIPT.counted(made(tmp_path / "treated", attn))


def test_runs_of_one_setting_are_never_in_two_halves(tmp_path: Path) -> None:
    """Length, seed, attention, log interval and the machine's files of a text change no setting."""
    constant = {"min_lr_ratio": 1.0}
    first = made(tmp_path / "first", train=constant)
    same = made(
        tmp_path / "same",
        {"name": "sdpa"},
        seed=7,
        train={**constant, "decay_steps": 77, "log_interval": 3},
        manifest={"data": {"fingerprint": "another"}},
    )
    other = made(tmp_path / "other", train={**constant, "lr": 0.25})
    decayed = made(tmp_path / "decayed", train={"min_lr_ratio": 0.1, "decay_steps": 77})
    again = made(tmp_path / "again", train={"min_lr_ratio": 0.1, "decay_steps": 78})
    settings = [SCRIPT.setting_of(run) for run in (first, other, decayed, again)]
    assert SCRIPT.setting_of(same) == settings[0]
    assert len(set(settings)) == 4
    assert sha256(settings[0].encode()).hexdigest()[:8] == "fba02f78"  # a new key of a config draws no other halves


def drawn(chooses: bool, number: int) -> list[str]:
    """So many names of settings of one half."""
    return list(islice((str(at) for at in count() if SCRIPT.Example(str(at), {}).chooses is chooses), number))


def test_the_choice_is_by_settings_of_the_first_half_that_both_halves_measured_often() -> None:
    by_runs, by_settings, rare = "W_Q, largest head", "W_Q, mean head", "sensitivity"

    def half(chooses: bool) -> list[Any]:
        found = []
        for at, setting in enumerate(drawn(chooses, 6)):
            right = {by_runs: float(at == 0), by_settings: float(at != 0), SCRIPT.LAYER_2: 0.0, SCRIPT.CHANCE: 0.5}
            if at != 0:
                right[rare] = 1.0  # five settings are too few
            found += (20 if at == 0 else 1) * [SCRIPT.Example(setting, right)]
        return found

    rows, chosen = SCRIPT.choosing(half(True), half(False))
    assert chosen == by_settings
    assert rows[0] == (by_runs, "6, 6", "25, 25", "17%", "80%")
    reversed_outcomes = [
        SCRIPT.Example(one.setting, {rule: 1 - right for rule, right in one.right.items()}) for one in half(False)
    ]
    assert SCRIPT.choosing(half(True), reversed_outcomes) == (rows, chosen)
    assert SCRIPT.choosing(half(True)[:20], half(False))[1] is None


def test_the_test_counts_settings_and_draws_them() -> None:
    """Four settings of one run: the measure is right in three, layer 2 in one. Of 1,000 drawn means of four that are
    0 or 1 the 2.5 % quantile is 1 in 4 for a share of 3 in 4 (binomial: below it 0.4 %, up to it 5 %)."""
    examples = [
        SCRIPT.Example(setting, {"W_Q, mean head": float(at < 3), SCRIPT.LAYER_2: float(at == 3), SCRIPT.CHANCE: 0.25})
        for at, setting in enumerate(drawn(False, 4))
    ]
    measure, layer_2, chance = SCRIPT.testing(examples, "W_Q, mean head")
    assert measure[:7] == ("W_Q, mean head", "4", "4", "75%", "75%", "25% to 100%", "+50%")
    assert measure[8:] == ("+50%", "0% to 75%")
    assert layer_2[3:7] == ("25%", "25%", "0% to 75%", "")
    assert chance[3:] == ("25%", "25%", "25% to 25%", "", "", "", "")
