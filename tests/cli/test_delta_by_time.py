"""``flashpoint delta --by time``: the bias of δ by layer and time, and the attention that injects it."""

from pathlib import Path

import pytest
import yaml

from flashpoint.numerics.variant import AttentionVariant
from tests.conftest import Command
from tests.records import call, refusal, rows, write_run
from tests.verdicts import outcome_of

STEPS = range(0, 1000, 100)


def of_time(folder: Path, name: str, *, seed: int, onset: int | None, first: float, until: int = 1000) -> str:
    """Two layers of two heads; layer 1 has ``first`` until step 499 and twice that from then on, layer 2 minus it."""
    metrics = [
        {"step": step, "delta_error_relative_bias": [[0.5 * bias, 1.5 * bias], [-bias, -bias]]}
        for step in STEPS[: until // 100]
        for bias in [first * (2 if step >= 500 else 1)]
    ]
    return write_run(folder / name, {"name": "flash_bf16"}, seed=seed, onset=onset, metrics=metrics)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    onsets = {1: None, 2: 700, 3: 450}
    return [of_time(tmp_path, f"s{seed}", seed=seed, onset=onset, first=float(seed)) for seed, onset in onsets.items()]


def test_a_mean_is_of_the_runs_without_an_onset(runs: list[str]) -> None:
    first, second = rows(call("delta", *runs, "--by", "time"))
    # 1, 2 and 3: mean 2, t(0.975, 2) = 4.303 over √3; then 2 and 4: mean 3, t(0.975, 1) = 12.706 over √2 times √2.
    assert first == "| 0 | 3 | 2.0e+00 ± 2.5e+00 | -2.0e+00 ± 2.5e+00 |"
    assert second == "| 500 | 2 | 3.0e+00 ± 1.3e+01 | -3.0e+00 ± 1.3e+01 |"


def test_it_ends_where_most_runs_have_their_onset(runs: list[str]) -> None:
    counts = [line.split(" | ")[1] for line in rows(call("delta", *runs, "--by", "time", "--every", "100"))]
    assert counts == ["3"] * 5 + ["2"] * 2  # from 450 and 700 on two and one of three are left


def test_a_run_that_was_trained_for_a_shorter_time_has_no_onset(runs: list[str], tmp_path: Path) -> None:
    shorter = [of_time(tmp_path, f"s{seed}", seed=seed, onset=None, first=1.0, until=300) for seed in (4, 5, 6)]
    counts = [line.split(" | ")[1] for line in rows(call("delta", *runs, *shorter, "--by", "time", "--every", "100"))]
    assert counts == ["6"] * 3 + ["3"] * 2 + ["2"] * 2


def test_the_variant_injects_what_was_measured(runs: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine/attn/measured.yaml"
    path.parent.mkdir(parents=True)
    call("delta", *runs, "--by", "time", "--variant", path)
    variant = AttentionVariant.from_dict(yaml.safe_load(path.read_text()))
    assert (variant.name, variant.exact_row_sum, variant.injected) == ("measured", True, True)
    assert variant.delta_error.trajectory == ((2.0, 3.0), (-2.0, -3.0))
    assert variant.delta_error.interval == 500


def test_a_record_is_not_taken_for_a_variant(runs: list[str]) -> None:
    manifest = Path(runs[0], "manifest.json")
    before = manifest.read_bytes()
    assert f"--variant {manifest}: " in refusal(call("delta", *runs, "--by", "time", "--variant", manifest))
    assert manifest.read_bytes() == before


@pytest.mark.slow
def test_a_run_trains_with_the_variant(runs: list[str], tmp_path: Path, train: Command) -> None:
    (tmp_path / "mine/attn").mkdir(parents=True)
    call("delta", *runs, "--by", "time", "--variant", tmp_path / "mine/attn/measured.yaml")
    result = train("attn=measured", "--config-dir", "mine", "attn.delta_error.size=1e-6", "train.steps=2", cwd=tmp_path)
    assert outcome_of(result)[1] == "stable"


def test_what_cannot_be_told_is_refused(runs: list[str], tmp_path: Path) -> None:
    assert "delta_error_relative_bias of heads was not measured" in refusal(
        call("delta", write_run(tmp_path / "without", {"name": "flash_bf16"}), "--by", "time")
    )
    assert "no observed step from 50 to 100; give a larger --every" in refusal(
        call("delta", *runs, "--by", "time", "--every", "50")
    )
    assert "--by head: takes no --variant" in refusal(call("delta", *runs, "--variant", "x.yaml"))
