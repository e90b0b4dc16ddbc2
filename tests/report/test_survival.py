"""Survival statistics against a textbook: remission times of Freireich et al. (1963), as in Kleinbaum & Klein."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import matplotlib.image
import numpy as np
import pytest

from flashpoint.report.provenance import ranges
from flashpoint.report.series import RecordedRun
from flashpoint.report.survival import OPTIMISATION, VERDICT, Lifetimes, control_of, logrank_p, settings_of
from tests.report.records import call, refusal, write_run

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
    """As R's survfit has it; in the fourth case half are left from 2 to 8, though one of them is lost at 3."""
    runs = Lifetimes("some", "some", np.array(onsets), np.array(censored, np.int64))
    assert runs.median_onset == median


def test_the_test_is_the_textbooks() -> None:
    assert logrank_p(TREATED, PLACEBO) == pytest.approx(4.17e-5, rel=1e-2)  # χ² = 16.79


def test_without_an_explosion_nothing_is_claimed() -> None:
    held = Lifetimes("held", "held", np.array([], np.int64), np.array([100, 100, 100, 100]))
    assert held.median_onset is None
    assert held.exploded_interval() == pytest.approx((0, 1 - 0.025 ** (1 / 4)))  # Clopper–Pearson at 0 of 4
    assert logrank_p(held, held) is None
    steps, share, *_ = held.curve()
    assert steps.tolist() == [0, 100]
    assert share.tolist() == [1, 1]


def test_the_script_groups_runs_and_says_where_they_were_made(tmp_path: Path) -> None:
    manifest = {"hardware": "a GPU", "environment": {"torch": "2.99"}, "started": "2026-11-21T"}

    def record(name: str, attn: dict, steps: int, onset: int | None, outcome: str = "", **train: float) -> str:
        run, seed = tmp_path / name, len(list(tmp_path.iterdir()))
        return write_run(
            run, attn, seed=seed, steps=steps, onset=onset, outcome=outcome, train=train, manifest=manifest
        )

    control, bf16 = {"name": "flash_fp32", "beta": 7}, {"name": "flash_bf16", "beta": 7}
    fixed = {"name": "flash_fixed", "shift": "dynamic_max"}
    runs = [record(f"c{i}", control, 2000, None) for i in range(3)]
    runs += [record(f"b{i}", bf16, 900, 500 + 100 * i) for i in range(3)]
    # A younger record of the same choices has more fields.
    runs.append(record("b3", {**bf16, "out_unnormalized_bits": 7}, 900, 550))
    runs += [record("n", bf16, 450, None, "nonfinite"), record("s", bf16, 1000, None)]
    runs += [record("f2", {**fixed, "beta": 2}, 1000, None)]
    runs += [record("f7", {**fixed, "beta": 7}, 1000, 700)]
    for kind, size, onset in (("bias", 3e-4, 300), ("noise", 3e-4, None)):
        error = {"kind": kind, "size": size, "layers": None}
        runs.append(record(kind, {**control, "delta_error": error}, 1000, onset))
    result = call("survival.py", *runs, "--out", str(tmp_path / "curves.png"))
    assert result.returncode == 0, result.stderr
    first, _, _, _, *rows = result.stdout.splitlines()
    assert first == "a GPU, torch 2.99; corpus unknown; seeds 0 to 12; 2026-11-21"
    assert rows[0].startswith("| `flash_fp32 injected delta_error.kind=bias` | 1 of 1 | 3 to 100 % | 300 |")
    assert rows[1].startswith("| `flash_fixed beta=7` | 1 of 1 | 3 to 100 % | 700 | none |")
    assert rows[2].startswith("| `flash_bf16` | 5 of 6 | 36 to 100 % | 575 | 1,000 | 0.0")
    assert rows[3] == "| `flash_fp32` | 0 of 3 | 0 to 71 % | not reached | 2,000 |  |"
    assert rows[4].startswith("| `flash_fixed beta=2` | 0 of 1 |")
    assert rows[5].startswith("| `flash_fp32 injected delta_error.kind=noise` | 0 of 1 |")

    runs += [record("c9", control, 2000, None, lr=0.1), record("b9", bf16, 900, 400, lr=0.1)]
    again = call("survival.py", *runs)
    assert again.stdout.splitlines()[1] == "unless a row says otherwise: train.lr=0.5"
    rows_again = again.stdout.splitlines()[5:]
    assert rows_again == [
        *rows,
        "| *train.lr=0.1* | | | | | |",
        "| `flash_bf16` | 1 of 1 | 3 to 100 % | 400 | none |  |",
        "| `flash_fp32` | 0 of 1 | 0 to 98 % | not reached | 2,000 |  |",
    ]
    image = matplotlib.image.imread(tmp_path / "curves.png")[..., :3]
    assert (np.ptp(image, axis=-1) > 0.3).mean() > 1e-3


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
    def run(**train: float) -> RecordedRun:
        settings = {**dict.fromkeys(OPTIMISATION, 0.5), **train}
        config = {"model": {"n_layer": 2}, "train": settings, "detector": dict.fromkeys(VERDICT, 1)}
        return cast(RecordedRun, SimpleNamespace(config=config))

    assert settings_of(run(min_lr_ratio=1.0, decay_steps=9)) == settings_of(run(min_lr_ratio=1.0, decay_steps=7))
    assert settings_of(run(min_lr_ratio=0.1, decay_steps=9)) != settings_of(run(min_lr_ratio=0.1, decay_steps=7))


def test_runs_that_are_no_lives_of_their_own_are_refused(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", {"name": "flash_bf16"}, onset=50)
    replay = write_run(tmp_path / "replay", {"name": "flash_bf16"}, onset=50)
    origin = {"parent": {"run": "runs/one", "from_step": 40}}
    branch = write_run(tmp_path / "branch", {"name": "flash_fp32"}, manifest=origin)
    told = f"error: {replay} and {one} are one experiment; leave one of them out\n"
    assert call("survival.py", one, replay).stderr == told
    assert call("onset.py", "train.lr", one, replay).stderr == told
    assert "a branch could not explode before it began" in refusal(call("survival.py", one, branch))
    other = write_run(tmp_path / "other", {"name": "flash_bf16"}, onset=50, manifest={"data": {"fingerprint": "b"}})
    assert "| 2 of 2 |" in call("survival.py", one, other).stdout


def test_choices_without_an_effect_split_no_group(tmp_path: Path) -> None:
    unrounded = {"name": "flash_fp32", "out_unnormalized": "none", "shift": "rowmax"}
    runs = [
        write_run(tmp_path / str(seed), {**unrounded, "out_unnormalized_bits": bits, "beta": beta}, seed=seed)
        for seed, (bits, beta) in enumerate(((1, 7), (3, 2)))
    ]
    assert "| `flash_fp32` | 0 of 2 |" in call("survival.py", *runs).stdout


def test_other_definitions_of_the_onset_are_another_experiment(tmp_path: Path) -> None:
    attn = {"name": "flash_bf16"}
    runs = [write_run(tmp_path / str(m), attn, seed=m, onset=50, detector={"margin": m}) for m in (1, 2)]
    rows = call("survival.py", *runs).stdout.splitlines()
    assert rows[1] == "unless a row says otherwise: detector.margin=1"
    assert [row for row in rows if row.startswith("| *")] == ["| *detector.margin=2* | | | | | |"]


def test_a_control_that_several_rows_are_is_to_be_named(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{out}-{seed}", {"name": "flash_fp32", "out": out}, seed=seed)
        for out in ("nearest", "none")
        for seed in range(3)
    ]
    runs += [write_run(tmp_path / str(seed), {"name": "flash_bf16"}, seed=seed, onset=50) for seed in range(3)]
    told = refusal(call("survival.py", *runs))
    assert "fits several rows: give one of flash_fp32 out=nearest; flash_fp32 out=none" in told
    named = call("survival.py", *runs, "--control", "flash_fp32 out=none").stdout
    assert "| `flash_bf16` | 3 of 3 | 29 to 100 % | 50 | none | 0.025 |" in named  # χ² = 5, as by hand


def test_onsets_are_compared_seed_by_seed(tmp_path: Path) -> None:
    def record(name: str, seed: int, steps: int, onset: int | None = None, **train: float) -> str:
        return write_run(tmp_path / name, {"name": "flash_bf16"}, seed=seed, steps=steps, onset=onset, train=train)

    controls = [record("control-1", 1, 500, 400), record("control-2", 2, 900, 800)]
    runs = [record("half-1", 1, 700, 600, lr=1.0), record("half-2", 2, 2000, lr=1.0), record("same-2", 2, 600, 500)]
    result = call("onset_ratios.py", *runs, "--control", *controls)
    assert result.stdout.splitlines()[4:] == [
        "| `flash_bf16` | 1.50 | >2.50 |",
        "| `flash_bf16 train.lr=0.5` |  | 0.62 |",
    ]
    alone = refusal(call("onset_ratios.py", runs[0], "--control", controls[1]))
    assert alone == f"error: {runs[0]}: no control of seed 1; add one, or leave the run out"
    stable = refusal(call("onset_ratios.py", runs[0], "--control", runs[1]))
    assert stable == f"error: {runs[1]}: stable to 2,000, no onset to compare with; leave it out"
    twice = refusal(call("onset_ratios.py", runs[0], "--control", controls[0], controls[0]))
    assert twice == f"error: {controls[0]}: a second control of seed 1; name one of each"
    again = record("again-1", 1, 800, 700, lr=1.0)
    twice = refusal(call("onset_ratios.py", runs[0], again, "--control", controls[0]))
    assert twice == f"error: {again}: a second run of seed 1 in its row; leave one of them out"
