"""``flashpoint survival`` on runs whose counts, medians and ratios are known by hand."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from tests.records import call, refusal, rows, values, write_run


@pytest.mark.slow
def test_runs_are_grouped_and_says_where_they_were_made(tmp_path: Path) -> None:
    manifest = {"hardware": "a GPU"}

    def record(name: str, attn: dict, steps: int, onset: int | None, outcome: str = "", **train: float) -> str:
        run, seed = tmp_path / name, len(list(tmp_path.iterdir()))
        return write_run(
            run, attn, seed=seed, steps=steps, onset=onset, outcome=outcome, train=train, manifest=manifest
        )

    control, bf16 = {"name": "flash_fp32", "beta": 7}, {"name": "flash_bf16", "beta": 7}
    fixed = {"name": "flash_fixed_paper", "shift": "dynamic_max"}
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
    result = call("survival", *runs, "--out", tmp_path / "curves.png")
    assert result.stdout.splitlines()[0] == "a GPU, torch 2.99; corpus unknown; seeds 0 to 12; 2026-11-21"
    found = rows(result)
    assert found[0].startswith(
        "| `flash_fp32 injected delta_error.kind=bias` | 1 of 1 | 3 to 100 % | 1 unknown | 300 |"
    )
    assert found[1].startswith("| `flash_fixed_paper beta=7` | 1 of 1 | 3 to 100 % | 1 unknown | 700 | none |")
    assert found[2].startswith(
        "| `flash_bf16` | 5 of 6, 1 by NaN | 36 to 100 % | 1 of 1; 4 unknown | 575 | 1,000 | 0.0"
    )
    assert found[3] == "| `flash_fp32` | 0 of 3 | 0 to 71 % |  | not reached | 2,000 |  |"
    assert found[4].startswith("| `flash_fixed_paper beta=2` | 0 of 1 |")
    assert found[5].startswith("| `flash_fp32 injected delta_error.kind=noise` | 0 of 1 |")

    runs += [record("c9", control, 2000, None, lr=0.1), record("b9", bf16, 900, 400, lr=0.1)]
    again = call("survival", *runs)
    assert again.stdout.splitlines()[1] == "unless a row says otherwise: train.lr=0.5"
    assert rows(again) == [
        *(f"|  {row}" for row in found),
        "| train.lr=0.1 | `flash_bf16` | 1 of 1 | 3 to 100 % | 1 unknown | 400 | none |  |",
        "| train.lr=0.1 | `flash_fp32` | 0 of 1 | 0 to 98 % |  | not reached | 2,000 |  |",
    ]
    image = matplotlib.image.imread(tmp_path / "curves.png")[..., :3]
    assert (np.ptp(image, axis=-1) > 0.3).mean() > 1e-3


def test_runs_that_are_no_lives_of_their_own_are_refused(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", {"name": "flash_bf16"}, onset=50)
    replay = write_run(tmp_path / "replay", {"name": "flash_bf16"}, onset=50)
    origin = {"parent": {"run": "runs/one", "from_step": 40}}
    branch = write_run(tmp_path / "branch", {"name": "flash_fp32"}, manifest=origin)
    told = f"error: {replay} and {one} are one experiment with seed 1; name the runs one by one, without one of these\n"
    assert call("survival", one, replay).stderr == told
    assert call("survival", one, replay, "--by", "train.lr").stderr == told
    told = f"error: {branch}: begins at step 40, and could not explode before; leave it out"
    for words in ([one, branch], [one, "--paired", branch], [branch, "--paired", one]):
        assert refusal(call("survival", *words)) == told
    other = write_run(tmp_path / "other", {"name": "flash_bf16"}, onset=50, manifest={"data": {"fingerprint": "b"}})
    assert values("survival", one, other)[0]["exploded"] == {"count": 2, "of": 2}


def test_choices_without_an_effect_split_no_group(tmp_path: Path) -> None:
    unrounded = {"name": "flash_fp32", "out_unnormalized": "none", "shift": "rowmax"}
    runs = [
        write_run(tmp_path / str(seed), {**unrounded, "out_unnormalized_bits": bits, "beta": beta}, seed=seed)
        for seed, (bits, beta) in enumerate(((1, 7), (3, 2)))
    ]
    (row,) = values("survival", *runs)
    assert (row["attention"], row["exploded"]) == ("flash_fp32", {"count": 0, "of": 2})


def test_other_definitions_of_the_onset_are_another_experiment(tmp_path: Path) -> None:
    attn = {"name": "flash_bf16"}
    runs = [write_run(tmp_path / str(m), attn, seed=int(m), onset=50, detector={"margin": m}) for m in (1.5, 2.5)]
    assert call("survival", *runs).stdout.splitlines()[1] == "unless a row says otherwise: detector.margin=1.5"
    assert [row["setting"] for row in values("survival", *runs)] == ["", "detector.margin=2.5"]


def test_a_control_that_several_rows_are_is_to_be_named(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{out}-{seed}", {"name": "flash_fp32", "out": out}, seed=seed)
        for out in ("nearest", "none")
        for seed in range(3)
    ]
    runs += [write_run(tmp_path / str(seed), {"name": "flash_bf16"}, seed=seed, onset=50) for seed in range(3)]
    told = refusal(call("survival", *runs))
    assert "fits several rows: give one of flash_fp32 out=nearest; flash_fp32 out=none" in told
    named = rows(call("survival", *runs, "--control", "flash_fp32 out=none"))
    assert "| `flash_bf16` | 3 of 3 | 29 to 100 % | 3 unknown | 50 | none | 0.025 |" in named  # χ² = 5, as by hand


def test_a_control_is_called_by_the_word_with_which_one_attention_begins(tmp_path: Path) -> None:
    changed = "flash_bf16 scores=none"
    runs = [write_run(tmp_path / f"b{seed}", {"name": changed}, seed=seed, onset=50) for seed in range(3)]
    runs += [write_run(tmp_path / f"f{seed}", {"name": "flash_fixed"}, seed=seed) for seed in range(3)]
    assert f"log-rank p against {changed}" in call("survival", *runs, "--control", "flash_bf16").stdout
    other = write_run(tmp_path / "other", {"name": "flash_bf16 beta=2"}, seed=3)
    assert f"these runs have {changed}, " in refusal(call("survival", *runs, other, "--control", "flash_bf16"))


def test_onsets_are_compared_seed_by_seed(tmp_path: Path) -> None:
    def record(name: str, seed: int, steps: int, onset: int | None = None, **train: float) -> str:
        return write_run(tmp_path / name, {"name": "flash_bf16"}, seed=seed, steps=steps, onset=onset, train=train)

    controls = [record("control-1", 1, 500, 400), record("control-2", 2, 900, 800)]
    runs = [record("half-1", 1, 700, 600, lr=1.0), record("half-2", 2, 2000, lr=1.0), record("same-2", 2, 600, 500)]
    printed = call("survival", *runs, "--paired", controls[0], "--paired", controls[1])
    assert rows(printed) == [
        "| `flash_bf16` | 1.50 | >2.50 | 2 of 2 | 16 to 100 % |",  # 0.025^½
        "| `flash_bf16 train.lr=0.5` |  | 0.62 | 0 of 1 | 0 to 98 % |",
        "| `flash_bf16` | 1 of 1 | 1 of 2 | 2 of 3 |",
    ]
    alone = refusal(call("survival", runs[0], "--paired", controls[1]))
    assert alone == f"error: {runs[0]}: no control of seed 1; add one, or leave the run out"
    at_once = write_run(tmp_path / "at-once", {"name": "flash_bf16"}, steps=1, onset=0, outcome="nonfinite")
    failed = refusal(call("survival", runs[0], "--paired", at_once))
    assert failed == f"error: {at_once}: nonfinite at 0, no time to compare with; leave it out"
    never = write_run(tmp_path / "never", {"name": "flash_bf16"}, steps=0)
    assert "no time to compare with" in refusal(call("survival", runs[0], "--paired", never))
    again = record("again-1", 1, 800, 700, lr=1.0)
    twice = refusal(call("survival", runs[0], again, "--paired", controls[0]))
    assert twice == f"error: {again}: a second run of seed 1 in its row; leave one of them out"


def test_onsets_are_compared_within_a_setting_where_a_seed_has_several_controls(tmp_path: Path) -> None:
    def record(attention: str, lr: float, seed: int, onset: int | None, text: str = "a") -> str:
        return write_run(
            tmp_path / f"{attention}-{lr}-{seed}-{text}", {"name": attention}, seed=seed, steps=1000, onset=onset,
            train={"lr": lr}, manifest={"data": {"fingerprint": text}},
        )  # fmt: skip

    onsets = {(1.0, 1): (400, 500), (1.0, 2): (800, None), (2.0, 1): (None, 250), (2.0, 2): (None, None)}
    paired = []
    for (lr, seed), (control, _) in onsets.items():
        paired += ["--paired", record("flash_bf16", lr, seed, control)]
    runs = [record("flash_fp32", lr, seed, onset) for (lr, seed), (_, onset) in onsets.items()]
    assert rows(call("survival", *runs, *paired)) == [
        "| `flash_fp32` | 1.25 | >1.25 | 2 of 2 | 16 to 100 % |",
        "| `flash_fp32 train.lr=2.0` | <0.25 | both hold | 0 of 1 | 0 to 98 % |",
        "| `flash_fp32` | 1 of 2 | 1 of 1 | 2 of 3 |",
    ]
    of_another_text = record("flash_fp32", 1.0, 1, 300, "b")
    assert refusal(call("survival", of_another_text, *paired)) == (
        f"error: {of_another_text}: no control of seed 1 with its settings and text, and one seed has "
        "several controls; add one, or leave the run out"
    )
    second = record("flash_fp16", 1.0, 1, 300)
    told = refusal(call("survival", runs[0], *paired, "--paired", second))
    assert told == f"error: {second}: a second control of seed 1 in its setting; name one"


def test_how_bad_it_was_stands_beside_the_verdict(tmp_path: Path) -> None:
    def run(name: str, attention: str, onset: int | None, losses: dict[int, float], norms: list[float]) -> str:
        metrics = [{"step": step - 1, "val_loss": loss} for step, loss in losses.items()]
        metrics += [{"step": 100 * (1 + i), "w_q_spectral_norm": [[norm, 1]]} for i, norm in enumerate(norms)]
        outcome = "nonfinite" if np.isnan(norms).any() else ""
        return write_run(
            tmp_path / name, {"name": attention}, seed=int(name), steps=600, onset=onset, outcome=outcome,
            metrics=metrics,
        )  # fmt: skip

    runs = [
        run("1", "flash_bf16", 450, {200: 2.5, 400: 2.0, 600: 5.0}, [90, 30]),
        run("2", "flash_bf16", 450, {400: 2.0, 600: 1.5}, [2, 40]),
        run("3", "flash_bf16", 100, {400: 2.0, 600: 1.5}, []),  # no validation before the onset
        run("4", "flash_fp32", None, {600: 2.0}, [5]),
        run("5", "flash_bf16", 450, {400: 2.0, 600: np.nan}, [2, np.nan]),  # has neither
    ]
    exploded, stable = rows(call("survival", *runs, "--severity"))
    assert exploded.endswith("| +1.25 (-0.50 to +3.00) | 35 (30 to 40) |")
    assert stable.endswith("|  | 5 |")
    (tmp_path / "2/metrics.jsonl").write_text("damaged\n")
    result = call("survival", *runs, "--severity")
    assert result.returncode == 2
    assert f"{runs[1]}/metrics.jsonl:1: damaged line" in result.stderr
    assert "3 of 3" in result.stdout


@pytest.mark.slow
def test_a_measure_that_ranks_as_the_onset_does_has_a_correlation_of_one(tmp_path: Path) -> None:
    """Seed 1: the noisier δ, the sooner. Seed 2: the other way round; and one run that did not explode is last."""
    runs = []
    for seed, sign in ((1, 1), (2, -1)):
        for number, bits in enumerate((3, 4, 5, 6, 7)):
            noise = [[[sign * (10 - number) + 20]]]
            metrics = [{"step": 1000, "row_sum_relative_noise": noise[0], "row_sum_relative_bias": [[0.5]]}]
            attn = {"name": "flash_bf16", "out_unnormalized": {"mode": "nearest", "bits": bits}}
            onset = None if number == 4 else 2000 + 100 * number
            folder = tmp_path / f"{seed}-{number}"
            runs.append(write_run(folder, attn, seed=seed, steps=9000, onset=onset, metrics=metrics))
    found = {row.split(" | ")[0].strip("| "): row for row in rows(call("survival", *runs, "--measures"))}
    assert "| 2 | 5 (5 to 5) | +0.00 |" in found["δ in training, noise"]
    assert "δ in training" not in str([name for name in found if "bias" in name])  # the same of all: no ranks
    # Coarser formats have the larger error, and here the earlier onset.
    assert "| 2 | 5 (5 to 5) | -1.00 |" in found["O on random inputs, RMS error"]
    assert "no seed has 5 attentions" in refusal(call("survival", *runs[:3], "--measures"))


@pytest.mark.slow
def test_a_measure_that_is_nan_ranks_nowhere(tmp_path: Path) -> None:
    runs = []
    for bits, noise in enumerate((9.0, 8.0, 7.0, 6.0, 5.0, "nan"), 2):
        metrics = [{"step": 1000, "row_sum_relative_noise": [[noise]], "row_sum_relative_bias": [[0.5]]}]
        attn = {"name": "flash_bf16", "out_unnormalized": {"mode": "nearest", "bits": bits}}
        runs.append(write_run(tmp_path / str(bits), attn, steps=9000, onset=2000 + 100 * bits, metrics=metrics))
    found = {row.split(" | ")[0].strip("| "): row for row in rows(call("survival", *runs, "--measures"))}
    assert "| 1 | 5 | -1.00 |" in found["δ in training, noise"]
    assert "| 1 | 6 | -1.00 |" in found["O on random inputs, RMS error"]


@pytest.mark.slow
def test_a_seed_on_two_texts_or_in_two_settings_is_not_one_ranking(tmp_path: Path) -> None:
    """Within each the finer format explodes first; over all, the onsets of one setting lie beyond those of another."""
    others = [{}, {"train": {"lr": 0.25}}, {"manifest": {"data": {"fingerprint": "another"}}}]
    runs = []
    for place, other in enumerate(others):
        for number, bits in enumerate((3, 4, 5, 6, 7)):
            attn = {"name": "flash_bf16", "out_unnormalized": {"mode": "nearest", "bits": bits}}
            onset = 3000 - 100 * number + 1000 * place
            runs.append(write_run(tmp_path / f"{place}-{number}", attn, steps=9000, onset=onset, **other))
    found = {row.split(" | ")[0].strip("| "): row for row in rows(call("survival", *runs, "--measures"))}
    assert "| 3 | 5 (5 to 5) | +1.00 |" in found["O on random inputs, RMS error"]


@pytest.mark.slow
def test_shorter_runs_lend_the_distances_of_their_weights(tmp_path: Path) -> None:
    """Onsets rank 1, 2, 3, 4.5, 4.5: two runs hold. Distances rank 5, 4, 3, 2, 1 with seed 1, so that
    ρ = -9.5 / √(9.5 * 10), and 5, 4, 1, 3, 2 with seed 2, so that ρ = -6.5 / √(9.5 * 10)."""
    runs = []

    def record(name: str, attn: dict, seed: int, differs_in: str, distance: int) -> str:
        metrics = {f"weights_{of}/all": distance for of in ("largest", "wasserstein", "spread")}
        manifest = {"twin": {"run": "twin", "differs_in": differs_in}}
        return write_run(
            tmp_path / name, attn, seed=seed, steps=600, metrics=[{"step": 599, **metrics}], manifest=manifest
        )

    for seed, distances in ((1, (5, 4, 3, 2, 1)), (2, (5, 4, 1, 3, 2))):
        for number, (onset, distance) in enumerate(zip((900, 1000, 1100, None, None), distances, strict=True)):
            attn = {"name": "flash_bf16", "out_unnormalized": {"mode": "nearest", "bits": 3 + number}}
            name = f"{seed}-{number}"
            runs.append(record(f"short-{name}", attn, seed, "attention flash_bf16 for standard", distance))
            runs.append(record(f"moved-{name}", attn, seed, "initial weights", number))  # no measure of an attention
            runs.append(write_run(tmp_path / name, attn, seed=seed, steps=3000, onset=onset))
    found = {row.split(" | ")[0].strip("| "): row for row in rows(call("survival", *runs, "--measures"))}
    assert "| 2 | 5 (5 to 5) | -0.82 |" in found["W₁ of weights from those of standard after 600 steps"]
    assert [name for name in found if "W₁" in name] == ["W₁ of weights from those of standard after 600 steps"]


def test_a_control_that_is_not_there_is_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), {"name": "flash_bf16"}, seed=seed) for seed in range(2)]
    told = "no flash_fp32 among these runs to test against; choose one with --control\n"
    assert call("survival", *runs).stderr == told
    assert call("survival", *runs, "--control", "flash_bf16").stderr == ""
    meant = "error: --control flash_bf: did you mean flash_bf16? these runs have flash_bf16\n"
    assert call("survival", *runs, "--control", "flash_bf").stderr == meant


def test_people_see_no_column_of_p_without_a_p_in_it_and_programs_always_do(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), {"name": "flash_bf16"}, seed=seed, onset=500 + seed) for seed in range(3)]
    runs += [write_run(tmp_path / f"s{seed}", {"name": "sdpa"}, seed=seed) for seed in range(3)]
    alone, against = call("survival", *runs), call("survival", *runs, "--control", "sdpa")
    assert "log-rank" not in alone.stdout
    assert rows(alone)[0] == "| `flash_bf16` | 3 of 3 | 29 to 100 % | 3 unknown | 501 | none |"
    assert (
        rows(against)[0] == "| `flash_bf16` | 3 of 3 | 29 to 100 % | 3 unknown | 501 | none | 0.025 |"
    )  # χ² = 5, as by hand
    assert rows(call("survival", *runs, "--columns", "attention,log-rank")) == ["| `flash_bf16` |  |", "| `sdpa` |  |"]
    assert [row["log-rank p against flash_fp32"] for row in values("survival", *runs)] == [None, None]


def test_a_row_without_a_p_says_why(tmp_path: Path) -> None:
    def record(name: str, attention: str, seed: int, steps: int, onset: int | None = None, lr: float = 0.5) -> str:
        return write_run(tmp_path / name, {"name": attention}, seed=seed, steps=steps, onset=onset, train={"lr": lr})

    control = [record(f"c{seed}", "flash_fp32", seed, 900, 800) for seed in range(3)]
    bf16 = [record(f"b{seed}", "flash_bf16", seed, 600, 500) for seed in range(3)]
    few = [record(f"f{seed}", "flash_fixed_paper", seed, 900) for seed in range(2)]
    short = [record(f"s{seed}", "sdpa", seed, 300) for seed in range(3)]
    elsewhere = [record(f"e{seed}", "sdpa", seed, 900, 400, lr=0.1) for seed in range(3)]

    assert call("survival", *control, *bf16).stderr == ""
    runs = [*control, *bf16, *few, *short, *elsewhere]
    result = call("survival", *runs)
    assert result.stderr.splitlines() == [
        "1 of 5 rows have no p: no flash_fp32 of their setting among these runs; add one, or choose another --control",
        "1 of 5 rows have no p: a log-rank test needs 3 runs of each of the two",
        "1 of 5 rows have no p: no run exploded while both it and flash_fp32 were under way",
    ]
    assert sum(row.endswith("|  |") for row in rows(result)) == 4  # these three and the control
    assert call("survival", *runs, "--columns", "attention,exploded").stderr == ""
    assert call("survival", *bf16, "--columns", "attention,exploded").stderr == ""


def test_rows_over_several_texts_are_told(tmp_path: Path) -> None:
    def record(name: str, data: str, vocabulary: int = 100) -> str:
        config = {"model": {"vocab_size": vocabulary}}
        manifest = {"data": {"fingerprint": data}}
        return write_run(tmp_path / name, {"name": "flash_bf16"}, manifest=manifest, config=config)

    one, other = record("one", "a" * 16), record("other", "b" * 16)
    told = (
        "rows are counted or compared over 2 texts (corpus aaaaaaaa, bbbbbbbb), and the onset depends on the text; "
        "name runs of one text\n"
    )
    assert call("survival", one, other, "--control", "flash_bf16").stderr == told
    assert call("survival", one, other, "--by", "train.lr").stderr == told
    assert call("survival", one, "--paired", other).stderr == told
    assert call("survival", one, "--paired", one).stderr == ""
    pairs_of_texts = [
        write_run(tmp_path / f"{seed}-{name}", {"name": name}, seed=seed, onset=onset, manifest=manifest)
        for seed, manifest in ((5, {"data": {"fingerprint": "a" * 16}}), (6, {"data": {"fingerprint": "b" * 16}}))
        for name, onset in (("flash_fp32", 60), ("flash_bf16", 50))
    ]
    runs, controls = pairs_of_texts[::2], pairs_of_texts[1::2]
    assert call("survival", *runs, "--paired", controls[0], "--paired", controls[1]).stderr == told
    assert call("survival", one, "--control", "flash_bf16").stderr == ""
    tokenised_otherwise = record("third", "c" * 16, 200)
    assert call("survival", one, tokenised_otherwise, "--control", "flash_bf16").stderr == ""
    assert call("survival", one, tokenised_otherwise, "--by", "model.vocab_size").stderr == ""
    assert call("survival", one, "--paired", tokenised_otherwise).stderr == ""


def test_a_run_that_has_not_ended_is_told_and_the_others_are_counted(tmp_path: Path) -> None:
    whole, killed = (write_run(tmp_path / name, {"name": "flash_bf16"}) for name in ("whole", "killed"))
    (tmp_path / "killed/outcome.json").unlink()
    result = call("survival", whole, killed, "--control", "flash_bf16")
    assert result.returncode == 2
    assert "| 0 of 1 |" in " ".join(result.stdout.split())
    assert result.stderr == (
        f"error: {killed}/outcome.json: missing; the run has not ended, resume={killed} goes on with it if it was cut "
        f"short; flashpoint watch {killed} shows it\n"
    )
    refusal(call("survival", killed))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--by", "train.lr", "--control", "flash_fp32"], "--control and --by: give one of them"),
        (["--severity", "--by", "train.lr"], "--severity: takes no --by"),
        (["--paired", "one", "--out", "x.png"], "--paired: takes no --out"),
        (["--out", "curves.foo"], "curves.foo: give a name that ends in one of .png, .pdf, .svg"),
    ],
)
def test_options_that_cannot_be_taken_are_one_line(tmp_path: Path, options: list[str], told: str) -> None:
    run = write_run(tmp_path / "one", {"name": "flash_bf16"})
    assert told in refusal(call("survival", run, *options, cwd=tmp_path))
