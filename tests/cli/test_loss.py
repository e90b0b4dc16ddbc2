"""Losses at equal steps, on runs whose differences are known by hand."""

import json
from pathlib import Path

import pytest

from tests.records import call, refusal, rows, values, write_run


def record(
    folder: Path, name: str, seed: int, losses: dict[int, float], onset: int | None = None, data: str = "a"
) -> str:
    """A run with validation losses by steps done, the last of them its length."""
    validations = [{"step": done - 1, "val_loss": loss} for done, loss in losses.items()]
    return write_run(
        folder / f"{name}-{seed}-{data}",
        {"name": name},
        seed=seed,
        steps=max(losses),
        onset=onset,
        val_loss=losses[max(losses)],
        manifest={"data": {"fingerprint": data}},
        metrics=validations[:-1],
    )


def test_differences_are_of_the_same_seed_and_data(tmp_path: Path) -> None:
    runs = [record(tmp_path, "flash_fp32", seed, {100: 9.0, 200: float(seed)}) for seed in (1, 2, 3)]
    runs += [record(tmp_path, "flash_exact_rowsum", seed, {100: 0.0, 200: 1.1 * seed}) for seed in (1, 2, 3)]
    runs += [
        record(tmp_path, "flash_exact_rowsum", 4, {100: 0.0, 200: 4.4}),
        record(tmp_path, "sdpa", 1, {200: 7.0}, data="b"),
    ]
    # Differences 0.1, 0.2, 0.3: t(0.975, 2) = 4.303 times 0.1 / √3 is 0.248. The spread is that of 1.1, 2.2, 3.3, 4.4.
    assert rows(call("loss", *runs)) == [
        "| `flash_fp32` | 3 | 0 | 2.0000 | 1.0000 |  |  |  |",
        "| `flash_exact_rowsum` | 4 | 0 | 2.7500 | 1.4201 | 3 | +0.2000 | -0.0484 to +0.4484 |",
        "| `sdpa` | 1 | 0 | 7.0000 |  |  |  |  |",
    ]
    fixed = values("loss", *runs)[1]
    assert fixed["minus flash_fp32"] == pytest.approx(0.2)
    assert fixed["95 % interval"] == pytest.approx({"low": 0.2 - 0.24841, "high": 0.2 + 0.24841}, abs=1e-5)
    assert rows(call("loss", *runs[:-1], "--at", "100"))[1].startswith("| `flash_exact_rowsum` | 4 | 0 | 0.0000 |")


def test_named_runs_of_another_setting_are_compared_by_seed(tmp_path: Path) -> None:
    controls = [record(tmp_path, "sdpa", seed, {100: 9.0, 200: float(seed)}) for seed in (1, 2, 3)]
    controls.append(record(tmp_path, "sdpa", 4, {100: 9.0, 150: 9.0}, onset=120))
    decayed = [
        write_run(
            tmp_path / f"decay-{seed}",
            {"name": "sdpa"},
            seed=seed,
            steps=200,
            onset=None,
            val_loss=1.1 * seed,
            train={"weight_decay": 0.1},
        )
        for seed in (1, 2, 3, 4)
    ]
    paired = [word for control in controls for word in ("--paired", control)]
    assert rows(call("loss", *decayed, *paired)) == [
        "| `sdpa` | 4 | 0 | 2.7500 | 1.4201 | 3 | +0.2000 | -0.0484 to +0.4484 |"
    ]
    told = refusal(call("loss", *decayed, *paired, "--control", "sdpa"))
    assert "--paired: takes no --control" in told


def test_a_run_that_had_exploded_is_counted_and_has_no_loss(tmp_path: Path) -> None:
    runs = [record(tmp_path, "flash_fp32", seed, {100: 2.0, 200: 1.0}) for seed in (1, 2)]
    runs += [record(tmp_path, "flash_bf16", seed, {100: 3.0, 150: 8.0}, onset=50 * seed) for seed in (1, 2)]
    assert "| `flash_bf16` | 0 | 2 |  |  |  |  |  |" in rows(call("loss", *runs))
    at_100 = rows(call("loss", *runs, "--at", "100"))  # the second one's onset is no earlier
    assert "| `flash_bf16` | 1 | 1 | 3.0000 |  | 1 | +1.0000 |  |" in at_100


def test_a_control_that_had_exploded_is_told(tmp_path: Path) -> None:
    runs = [record(tmp_path, "flash_bf16", 1, {100: 3.0, 150: 8.0}, onset=120)]
    runs += [record(tmp_path, "flash_exact_rowsum", 1, {100: 2.0, 200: 1.0})]
    assert call("loss", *runs, "--control", "flash_bf16").stderr == (
        "all runs of flash_bf16 had exploded before step 200; give an earlier step with --at, or choose another "
        "--control\n"
    )
    assert not call("loss", *runs, "--control", "flash_bf16", "--at", "100").stderr


def test_attentions_without_the_control_are_told_to_name_another_one(tmp_path: Path) -> None:
    runs = [record(tmp_path, name, 1, {200: 1.0}) for name in ("flash_bf16", "flash_exact_rowsum")]
    assert "no flash_fp32 of the same seed" in call("loss", *runs).stderr
    assert not call("loss", *runs, "--control", "flash_bf16").stderr
    assert not call("loss", runs[0]).stderr


def test_a_control_that_no_run_has_is_refused(tmp_path: Path) -> None:
    runs = [record(tmp_path, name, 1, {200: 1.0}) for name in ("flash_bf16", "flash_fp32")]
    told = "error: --control flash_fp23: did you mean flash_fp32? these runs have flash_bf16, flash_fp32"
    assert refusal(call("loss", *runs, "--control", "flash_fp23")) == told


def test_means_over_several_texts_are_told(tmp_path: Path) -> None:
    """One attention on an easy text beside another on a hard one: 1.0 and 3.0, though both have the same loss on one
    text."""
    easy, hard = record(tmp_path, "flash_fp32", 1, {200: 1.0}, data="a" * 8), {"losses": {200: 3.0}, "data": "b" * 8}
    runs = [easy, record(tmp_path, "flash_exact_rowsum", 1, **hard)]
    told = "rows are counted or compared over 2 texts (corpus aaaaaaaa, bbbbbbbb), and the loss depends on the text; "
    assert call("loss", *runs).stderr.startswith(told)
    same = [record(tmp_path, name, 2, **hard) for name in ("flash_fp32", "flash_exact_rowsum")]
    assert call("loss", *same).stderr == ""


def test_without_a_stable_run_the_step_is_to_be_named(tmp_path: Path) -> None:
    run = record(tmp_path, "flash_fp32", 1, {100: 2.0, 200: 8.0}, onset=150)
    assert refusal(call("loss", run)) == "error: all of these runs exploded; name a step before their onsets with --at"
    assert rows(call("loss", run, "--at", "100")) == ["| `flash_fp32` | 1 | 0 | 2.0000 |  |  |  |  |"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--at", "150"], "not validated after step 150 but 100, 200"), ([], "no step at which all runs")],
)
def test_runs_without_a_common_step_are_one_line(tmp_path: Path, arguments: list[str], told: str) -> None:
    runs = [record(tmp_path, "flash_fp32", 1, {100: 2.0, 200: 1.0}), record(tmp_path, "sdpa", 1, {300: 1.0})]
    assert told in refusal(call("loss", *runs, *arguments))


@pytest.mark.parametrize("recorded", [{"interrupted": "SIGINT"}, {"interrupted": "SIGINT", "val_step": 100}])
def test_the_last_validation_of_a_stopped_run_is_not_of_its_end(tmp_path: Path, recorded: dict[str, object]) -> None:
    run = record(tmp_path, "flash_fp32", 1, {100: 2.0, 200: 2.0})
    outcome = Path(run) / "outcome.json"
    whole = json.loads(outcome.read_text())
    del whole["val_step"]  # which earlier versions did not store
    outcome.write_text(json.dumps({**whole, **recorded}))
    assert "not validated after step 200 but 100;" in refusal(call("loss", run, "--at", "200"))
