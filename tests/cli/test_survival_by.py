"""The response of the onset to a setting, on runs whose medians are known by hand."""

import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.records import call, refusal, rows, write_run

BITS = "attn.out_unnormalized.bits"


def record(folder: Path, bits: int, seed: int, onset: int | None, lr: float = 0.5, **settings: float) -> str:
    attn = {"name": "flash_bf16", "out_unnormalized": "nearest", "out_unnormalized_bits": bits}
    train = {"min_lr_ratio": 0.25, "lr": lr, **settings}
    return write_run(folder / f"{bits}-{seed}-{lr}-{len(settings)}", attn, seed=seed, onset=onset, train=train)


@pytest.mark.slow
def test_each_value_is_a_row_with_its_median(tmp_path: Path) -> None:
    runs = [record(tmp_path, 1, seed, 100 + seed) for seed in range(5)]
    runs += [record(tmp_path, 2, seed, 300 if seed < 3 else None) for seed in range(5)]
    runs += [record(tmp_path, 3, seed, None) for seed in range(2)]
    first, second, third = rows(call("survival", *runs, "--by", BITS, "--out", tmp_path / "response.png"))
    assert first.startswith("| `flash_bf16` | 1 | 5 of 5 | 102 | 100 to ")
    assert first.endswith(" | none |")
    assert second.startswith("| `flash_bf16` | 2 | 3 of 5 | 300 | 300 to not reached | 1,000 |")
    assert third == "| `flash_bf16` | 3 | 0 of 2 | not reached |  | 1,000 |"
    image = matplotlib.image.imread(tmp_path / "response.png")[..., :3]
    assert (np.ptp(image, axis=-1) > 0.3).mean() > 1e-4


def test_runs_that_differ_in_more_stand_in_rows_of_their_own(tmp_path: Path) -> None:
    runs = [record(tmp_path, bits, 0, onset, lr) for bits, onset, lr in ((1, 100, 0.5), (1, 50, 0.1), (2, 70, 0.1))]
    assert [row.split("|")[1:5] for row in rows(call("survival", *runs, "--by", BITS))] == [
        [" `flash_bf16 train.lr=0.1` ", " 1 ", " 1 of 1 ", " 50 "],
        [" `flash_bf16 train.lr=0.1` ", " 2 ", " 1 of 1 ", " 70 "],
        [" `flash_bf16 train.lr=0.5` ", " 1 ", " 1 of 1 ", " 100 "],
    ]


def test_the_exponent_is_that_of_each_seed(tmp_path: Path) -> None:
    # Seed 0 takes 800, 400, 200 steps, p = -1; seed 1 takes 900, 900, 900, p = 0: mean -0.5, and Student's t for one
    # degree of freedom, 12.706, times 0.5 for half of the interval.
    onsets = {0: (800, 400, 200), 1: (900, 900, 900)}
    runs = [
        record(tmp_path, 1, seed, onset, lr)
        for seed in onsets
        for onset, lr in zip(onsets[seed], (0.1, 0.2, 0.4), strict=True)
    ]
    result = call("survival", *runs, "--by", "train.lr")
    assert rows(result)[-1] == "| `flash_bf16, Ō of 1 mantissa bit` | -0.50 | -6.85 to +5.85 | 2 |"
    assert "p of onset ∝ train.lr^p" in result.stdout


@pytest.mark.parametrize("missing", ["held", "absent"])
def test_no_exponent_where_a_seed_has_no_onset(tmp_path: Path, missing: str) -> None:
    runs = [record(tmp_path, 1, seed, 100 + seed, lr) for seed, lr in ((0, 0.1), (0, 0.2), (1, 0.1))]
    if missing == "held":
        runs.append(record(tmp_path, 1, 1, None, 0.2))
    assert "∝" not in call("survival", *runs, "--by", "train.lr").stdout


def test_formats_other_than_bf16_are_named_unless_the_setting_is_their_bits(tmp_path: Path) -> None:
    runs = [record(tmp_path, bits, 0, 100) for bits in (1, 7)]
    names = {
        key: [row.split("`")[1] for row in rows(call("survival", *runs, "--by", key))] for key in ("train.lr", BITS)
    }
    assert names == {"train.lr": ["flash_bf16", "flash_bf16, Ō of 1 mantissa bit"], BITS: ["flash_bf16", "flash_bf16"]}


def test_bits_have_no_exponent(tmp_path: Path) -> None:
    runs = [record(tmp_path, bits, 0, 100 * bits) for bits in (1, 2)]
    assert "∝" not in call("survival", *runs, "--by", BITS).stdout


def test_a_run_without_decay_stands_beside_one_with_it(tmp_path: Path) -> None:
    runs = [record(tmp_path, 1, 0, 100), record(tmp_path, 1, 1, 50, min_lr_ratio=1.0)]
    assert [row.split("|")[1].strip() for row in rows(call("survival", *runs, "--by", "train.lr"))] == [
        "`flash_bf16 train.min_lr_ratio=0.25, Ō of 1 mantissa bit`",
        "`flash_bf16 train.min_lr_ratio=1.0, Ō of 1 mantissa bit`",
    ]


@pytest.mark.parametrize("key", ["attn.bits", "attn.exact_row_sum"])
def test_what_is_no_number_is_one_line(tmp_path: Path, key: str) -> None:
    result = call("survival", record(tmp_path, 1, 0, 100), "--by", key)
    assert f"{key} is no number there" in refusal(result)


def test_a_misspelt_setting_is_told_which_was_meant_and_a_seed_is_none(tmp_path: Path) -> None:
    run = record(tmp_path, 1, 0, 100)
    told = refusal(call("survival", run, "--by", "trian.lr"))
    assert "trian.lr is no number there that experiments differ in; did you mean train.lr? give one that is" in told
    assert "--by seed: each row counts its runs over seeds" in refusal(call("survival", run, "--by", "seed"))


@pytest.mark.slow
def test_long_names_stay_within_the_figure(tmp_path: Path) -> None:
    several = {"weight_decay": 0.125, "beta1": 0.875, "beta2": 0.9375, "eps": 0.25, "grad_clip": 2.0, "warmup_steps": 7}
    runs = [record(tmp_path, 1, 0, 100), record(tmp_path, 1, 1, 100, **several)]
    call("survival", *runs, "--by", "train.lr", "--out", tmp_path / "response.png")
    image = matplotlib.image.imread(tmp_path / "response.png")[..., :3]
    assert (image[:, [0, -1]] == 1).all()  # no letter is cut off


def test_hardware_is_a_row_each_and_tested_against_the_first(tmp_path: Path) -> None:
    onsets = {"NVIDIA A100": (100, 110, 120, 130), "NVIDIA H200": (500, 510, None, None)}
    runs = [
        write_run(
            tmp_path / f"{hardware}-{seed}",
            {"name": "flash_bf16"},
            seed=seed,
            onset=onset,
            manifest={"hardware": hardware},
        )
        for hardware, of_seeds in onsets.items()
        for seed, onset in enumerate(of_seeds)
    ]
    refused = call("survival", *runs)
    assert "one experiment with seed 0; leave one of them out, or tell them apart with --by hardware" in refusal(
        refused
    )
    first, second = rows(call("survival", *runs, "--by", "hardware", "--out", tmp_path / "by.png"))
    assert first == "| `flash_bf16` | NVIDIA A100 | 4 of 4 | 115 |  | none |  |"
    assert second.startswith("| `flash_bf16` | NVIDIA H200 | 2 of 4 | 510 |  | 1,000 | ")
    # Observed less expected explosions of the A100s: at 100 to 130 one each of 4 of 8, 3 of 7, 2 of 6 and 1 of 5.
    expected = [4 / 8, 3 / 7, 2 / 6, 1 / 5]
    z = (4 - sum(expected)) / math.sqrt(sum(share * (1 - share) for share in expected))
    assert second.endswith(f"{math.erfc(z / math.sqrt(2)):.2g} |")
    assert (tmp_path / "by.png").stat().st_size > 0
