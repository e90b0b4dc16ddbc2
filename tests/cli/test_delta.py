"""``flashpoint delta`` on runs whose sums and biases are known by hand."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.records import call, refusal, rows, values, write_run

OF_EIGHT = {"probes": {"sequences": 2}, "model": {"context": 2}}
"""Two sequences of two tokens are observed of a step of four: 4 tokens of N = 8."""


@pytest.fixture
def two_heads(tmp_path: Path) -> str:
    """On 4 tokens: errors of 1 with a variance of 1 at each of 9 steps, and errors that cancel."""
    metrics = []
    for step in [*range(0, 450, 50), 500, 1000]:
        first, second = 2.0 if step < 500 else 1e9, (-1.0) ** (step // 50)
        of_heads: dict[str, Any] = {
            "delta_error_sum": [[first, second]],
            "delta_error_variance": [[1.0, 1.0]],
            "delta_error_relative_bias": [[first, second]],
            "delta_error_relative_noise": [[3.0, 3.0]],
            "row_sum_relative_bias": [[2 * first, 2 * second]],
            "row_sum_relative_noise": [[5.0, 5.0]],
            "w_q_spectral_norm": [[1.0, 1.0]],
        }
        metrics.append({"step": step, **of_heads})
    config = {**OF_EIGHT, "train": {"batch_size": 4}}
    return write_run(tmp_path / "run", {"name": "flash_bf16"}, onset=1500, metrics=metrics, config=config)


def again(run: str) -> str:
    """The same run in another folder."""
    return str(shutil.copytree(run, Path(run).parent / "again" / Path(run).name))


def test_the_bias_of_delta_is_in_units_of_its_own_error(two_heads: str) -> None:
    first, second = rows(call("delta", two_heads))
    # Σ = 9 · 2 over √(4 · 9 · 1) = 3 standard errors; 9 of 9 has a lower end of 0.025^(1/9) = 66 %.
    summed = "+1.80e+01 | +3.00 | 9 of 9 | 66 to 100 %"
    assert first == f"| `run` | L1H1 | {summed} | +2.0e+00 ± 0.0e+00 | 3.0e+00 |"
    # Five +1 and four −1: mean 1/9, t(0.975, 8) = 2.306 times √(10/9) / 3.
    assert second.startswith("| `run` | L1H2 | +1.00e+00 | +0.17 | 5 of 9 |")
    assert second.endswith("| +1.1e-01 ± 8.1e-01 | 3.0e+00 |")
    assert values("delta", two_heads)[1]["bias"] == pytest.approx(
        {"mean": 1 / 9, "half": 2.306 * (10 / 9) ** 0.5 / 3}, rel=1e-4
    )
    left_out = "The last 1,000 steps before an onset do not count"
    assert left_out in call("delta", two_heads).stdout
    assert left_out not in call("delta", two_heads, "--until", "500").stdout
    assert rows(call("delta", two_heads, "--of", "row_sum")) == [
        "| `run` | L1H1 | +4.0e+00 ± 0.0e+00 | 5.0e+00 |",
        "| `run` | L1H2 | +2.2e-01 ± 1.6e+00 | 5.0e+00 |",
    ]
    assert rows(call("delta", two_heads, "--layers", "1")) == [first, second]
    refused = refusal(call("delta", two_heads, "--layers", "2"))
    assert refused == f"error: {two_heads}: --layers 2: it has layers 1 to 1"


def test_a_layer_is_all_its_heads(two_heads: str) -> None:
    # Of both heads: (18 + 1) over √(4 · (9 + 9)) = 2.24.
    # Of 4 tokens that vary by 1 (over 3) the mean square is 3/4 + (2/4)² and 3/4 + (1/4)², of both heads 29/32; N is 8.
    # Sensitivity: 8·√(29/32) / 3. Mean error of a token: 19 / (9·2·4), over 8·29/32; by step (2 ± 1) / 8.
    own = "exploded at 1,500 | **+2.2** | +1.1e+00 ± 4.1e-01 | 3.0e+00 | 0.1"
    assert rows(call("delta", two_heads, "--by", "layer")) == [f"| `run` | {own} | 2.5 | 0.04 ± 0.01 |"]
    (row,) = values("delta", two_heads, "--by", "layer")
    assert row["sensitivity"] == pytest.approx(8 * (29 / 32) ** 0.5 / 3)
    assert row["bias / variance"]["mean"] == pytest.approx(19 / 72 / (8 * 29 / 32))
    # Σz/√n = 2 · 2.24 / √2; bias over noise² = (19 / 18) / 9.
    assert rows(call("delta", two_heads, again(two_heads), "--by", "layer"))[2:] == [
        "| Σz/√n | +3.2 |",
        "| bias / noise² | 0.1 (0.1 to 0.1) |",
        "| sensitivity | 2.5 (2.5 to 2.5) |",
        "| bias / variance | 0.04 (0.04 to 0.04) |",
    ]


def test_a_layer_without_an_error_counts_the_runs_that_have_one(two_heads: str, tmp_path: Path) -> None:
    """Of two runs one has an exact δ: Σz/√n is the z of the other, 2.24, and not that over √2."""
    names = ("delta_error_sum", "delta_error_variance", "delta_error_relative_bias", "delta_error_relative_noise")
    metrics = [{"step": step, **{name: [[0.0, 0.0]] for name in names}} for step in range(0, 450, 50)]
    config = {**OF_EIGHT, "model": {"context": 2, "n_layer": 1}, "train": {"batch_size": 4}}
    exact = write_run(tmp_path / "exact", {"name": "flash_exact_rowsum"}, metrics=metrics, config=config)
    result = call("delta", two_heads, exact, "--by", "layer")
    assert rows(result)[2] == "| Σz/√n | +2.2 |"
    assert result.stdout.splitlines()[-1] == "Of 2 runs δ takes part of O's error in fewer: 1 in layer 1."
    assert "in fewer" not in call("delta", two_heads, again(two_heads), "--by", "layer").stdout


def test_a_metric_by_layer_and_whether_it_is_largest_where_the_run_explodes(two_heads: str, tmp_path: Path) -> None:
    (sensitivity,) = rows(call("delta", two_heads, "--by", "layer", "--metric", "sensitivity"))
    assert sensitivity == "| `run` | exploded at 1,500 | **2.5** |"
    (mean,) = rows(call("delta", two_heads, "--by", "layer", "--metric", "delta_error_sum"))
    assert mean == "| `run` | exploded at 1,500 | **1.06** |"  # (18 + 1) / (9 · 2)
    missing = refusal(call("delta", two_heads, "--by", "layer", "--metric", "score_mean"))
    assert "score_mean of heads was not measured" in missing
    # Two of two: the lower end is 0.025^(1/2) = 16 %.
    options = ("--by", "layer", "--metric", "sensitivity", "--verdicts")
    *_, told = call("delta", two_heads, again(two_heads), *options, tmp_path).stdout.splitlines()
    assert told == "largest in the layer that explodes: 2 of 2 (16 to 100 %); layer 1 in 2"
    assert refusal(call("delta", two_heads, *options, two_heads)).startswith(f"error: {two_heads}/run: no run there")
    deeper = [{"step": 0, "w_q_spectral_norm": [[1.0], [2.0], [3.0]]}]
    write_run(tmp_path / "deeper/run", {"name": "flash_bf16"}, metrics=deeper)
    refused = refusal(call("delta", two_heads, *options, tmp_path / "deeper"))
    assert f"deeper/run: its hottest layer is 3, and {two_heads} has 1; give" in refused


def test_a_metric_by_attention_is_a_mean_over_its_runs(tmp_path: Path) -> None:
    def run(name: str, attention: str, values: list[list[float]]) -> str:
        metrics = [{"step": 0, "row_mass_mean": values}]
        return write_run(tmp_path / name, {"name": attention}, metrics=metrics)

    one, two = run("1", "released", [[1, 3], [5, 5]]), run("2", "released", [[4, 4], [5, 5]])
    other, deeper = run("3", "flash_bf16", [[7, 7], [8, 8]]), run("4", "flash_bf16", [[7, 7], [8, 8], [9, 9]])
    told = rows(call("delta", one, two, other, "--by", "attention", "--metric", "row_mass_mean"))
    # Layer 1: 2 and 4. Student's t of one degree of freedom is 12.7, the standard error 1.
    assert told == ["| `released` | 2 | 3 ± 12.7 | 5 ± 0 |", "| `flash_bf16` | 1 | 7 | 8 |"]
    refused = refusal(call("delta", one, deeper, "--by", "attention", "--metric", "row_mass_mean"))
    assert "runs of 2 and of 3 layers" in refused


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--by", "layer", "--of", "row_sum"], "--by layer: takes no --of"),
        (["--by", "layer", "--layers", "1"], "--by layer: takes no --layers"),
        (["--by", "targets", "--since", "5", "--last", "3"], "--by targets: takes no --since and no --last"),
        (["--by", "layer", "--verdicts", "x"], "--verdicts: needs --metric"),
        (["--by", "attention", "--metric", "x", "--layers", "1"], "--by attention --metric: takes no --of and no"),
        (["--layers", "one"], "give layers from 1 with commas between"),
        (["--until", "0"], "no observed step from 0 to before step 0; give other --since, --last and --until"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(two_heads: str, options: list[str], told: str) -> None:
    assert told in refusal(call("delta", two_heads, *options))


def test_a_run_without_the_error_is_told_and_the_others_are_shown(two_heads: str, tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare", {"name": "flash_bf16"})
    whole, some = call("delta", two_heads), call("delta", bare, two_heads)
    assert some.returncode == 2
    assert some.stderr.startswith(f"error: {bare}: delta_error_sum of heads was not measured")
    assert some.stdout.splitlines()[1:] == whole.stdout.splitlines()[1:]


@pytest.mark.parametrize("name", ["delta_error_variance", "delta_error_relative_bias", "delta_error_relative_noise"])
@pytest.mark.parametrize("by", ["head", "layer"])
def test_metrics_that_are_measured_at_once_are_of_the_same_steps(two_heads: str, name: str, by: str) -> None:
    metrics = Path(two_heads, "metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    del lines[1][name]
    metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    told = refusal(call("delta", two_heads, "--by", by))
    assert f"and {name} are of other steps" in told or f"{name} and " in told


def test_a_bias_is_over_the_variance_that_drawn_targets_have(tmp_path: Path) -> None:
    """Four of N = 8 tokens observed at 4 steps; their errors vary by 1 about means that the targets change."""

    def record(name: str, digest: str, targets: Mapping[str, str], means: Sequence[float]) -> str:
        metrics = [
            {"step": step, "delta_error_sum": [[4.0 * mean]], "delta_error_variance": [[4 / 3]]}
            for step, mean in enumerate(means)
        ]
        config = {**OF_EIGHT, "probes": {"sequences": 2, **targets}, "train": {"batch_size": 4}}
        origin = {"parent": {"run": "runs/first", "from_step": 1000}}
        attn = {"name": "flash_bf16"}
        return write_run(tmp_path / name, attn, metrics=metrics, config=config, manifest=origin, digest=digest)

    runs = [
        record("seen", "a", {}, (4, 4, 4, 4)),
        record("drawn", "a", {"targets": "model"}, (1, -1, 1, -1)),
        record("seen-2", "b", {"targets": "data"}, (4, 4, 4, 4)),
        record("drawn-2", "b", {"targets": "model"}, (1, -1, 1, -1)),
        record("alone", "c", {"targets": "unrounded"}, (4, 4, 4, 4)),
    ]
    # Mean squares 1 + 4² and 1 + 1²: 17 / 2. Bias 8·4 and 8·(±1) over 8²·2; t(0.975, 3) = 3.182 times 0.0722 / 2.
    row = "| `flash_bf16` from step 1,000 of `runs/first` | 1"
    assert rows(call("delta", *runs, "--by", "targets")) == [
        f"{row} | 8.50 |  | 0.25 ± 0.00 |  | 0.00 ± 0.11 |",
        f"{row} | 8.50 |  | 0.25 ± 0.00 |  | 0.00 ± 0.11 |",
        f"{row} |  |  |  | *0.03 ± 0.00* |  |",  # 8·4 over its own 8²·17
        "| variance, data (n = 2) | 8.50 (8.50 to 8.50) |",
        "| bias, data (n = 2) | 0.25 (0.25 to 0.25) |",
        "| bias, model (n = 2) | 0.00 (0.00 to 0.00) |",
    ]
    refused = refusal(call("delta", runs[0], runs[1], other := again(runs[1]), "--by", "targets"))
    assert refused == f"error: {other}: a second run with targets=model of digest a"


def test_targets_and_weights_refuse_or_part_what_has_no_common_measure(tmp_path: Path) -> None:
    """An error of zero is over no variance. Runs of one name in two experiments have weights of their own."""

    def record(folder: str, error: float, text: str = "a") -> str:
        names = ("sum", "variance", "relative_bias", "relative_noise")
        metrics = [{"step": 0, "w_q_spectral_norm": [[1.0]], **{f"delta_error_{name}": [[error]] for name in names}}]
        manifest = {"data": {"fingerprint": text}}
        return write_run(tmp_path / folder / "run", {"name": "flash_bf16"}, metrics=metrics, manifest=manifest)

    one, other, exact = record("one", 1.0), record("other", 2.0, "b"), record("exact", 0.0)
    refused = refusal(call("delta", exact, "--by", "targets"))
    assert refused == f"error: {exact}: layer 1: δ takes no part of the error of O there; leave the run out"
    by_weights = rows(call("delta", one, other, "--by", "weights"))
    assert [row.split(" | ")[1:4:2] for row in by_weights] == [["1", "1.0"], ["1", "0.5"]]
    for kind, told in (("attention", True), ("layer", True), ("time", True), ("weights", False), ("head", False)):
        assert ("corpus a, b" in call("delta", one, other, "--by", kind).stderr) is told


def test_pooled_biases_have_an_interval_over_runs(tmp_path: Path) -> None:
    """Three runs whose biases, means over two layers and two steps, are 1, 2 and 3; the noise is 2 in all."""
    runs = []
    for number in (1, 2, 3):
        metrics = [
            {
                "step": step,
                "delta_error_relative_bias": [[number + sign], [number - sign]],
                "delta_error_relative_noise": [[4.0 if step == 20 else 2.0]] * 2,
            }
            for step, sign in ((0, -1.0), (10, 1.0), (20, 1000.0))
        ]
        runs.append(write_run(tmp_path / str(number), {"name": "flash_bf16"}, seed=number, metrics=metrics))

    def row(*window: str) -> str:
        (line,) = rows(call("delta", *runs, "--by", "attention", *window))
        return line

    # t(0.975, 2) = 4.303 times 1/√3 is 2.48; the ratios are 1/4, 2/4, 3/4.
    own = "| `flash_bf16` | 3 | +2.0e+00 | -4.8e-01 to +4.5e+00 |"
    assert row("--until", "20") == f"{own} 2.0e+00 | 0.50 | -0.12 to 1.12 |"
    assert row("--since", "20") == f"{own} 4.0e+00 | 0.12 | -0.03 to 0.28 |"
    # Layer 2 alone: each bias is 1000 below, as layer 1's is above.
    assert row("--since", "20", "--layers", "2").startswith("| `flash_bf16` | 3 | -1.0e+03 ")
    assert row("--since", "20", "--layers", "1,2") == row("--since", "20")


@pytest.mark.slow
def test_each_set_of_weights_has_its_factor(tmp_path: Path) -> None:
    """Of the second of two layers, whose W_Q is larger; the first has no bias."""

    def record(
        name: str,
        biases: Sequence[float],
        noise: float,
        seed: int = 1,
        delta: str = "out",
        step: int = 1000,
        bits: int | None = None,
    ) -> str:
        metrics = [
            {
                "step": number,
                "w_q_spectral_norm": [[1.0], [2.0]],
                "delta_error_relative_bias": [[0.0], [bias]],
                "delta_error_relative_noise": [[noise], [noise]],
            }
            for number, bias in enumerate(biases)
        ]
        attn = {"name": name, "delta": delta, "out_unnormalized": "stochastic", "out_residual_bits": bits}
        parent = {"parent": {"run": f"runs/first-{seed}", "from_step": step}}
        return write_run(tmp_path / f"{name}-{seed}-{step}", attn, seed=seed, metrics=metrics, manifest=parent)

    runs = [
        record("a", (2.0, 4.0), 1.0),  # 3 × noise²
        record("b", (10.0, 10.0), 2.0),  # 2.5
        record("c", (1.0, 1.0), 0.5),  # 4
        record("d", (1.0, -3.0), 1.0, delta="out_independent"),
        record("e", (-1.0, 0.0), 1.0, delta="out_fp32", bits=2),
        record("a", (8.0, 8.0), 1.0, seed=2),
        record("d", (2.0, 2.0), 2.0, seed=2, delta="out_independent", step=500),
    ]
    # Mean 19/6 ± 4.303 (t(0.975, 2)) · √(((1/6)² + (4/6)² + (5/6)²) / 2 / 3); noise² of 1/4 to 4.
    assert rows(call("delta", *runs, "--by", "weights", "--out", tmp_path / "law.png")) == [
        "| step 1,000 of first-1 | 3 | 16 | 3.2 | 1.3 to 5.1 | +26 %, `c` | -1.0, -0.5 |",
        "| step 1,000 of first-2 | 1 | 1 | 8.0 |  |  |  |",
        "| step 500 of first-2 | 0 |  |  |  |  | 0.5 |",
    ]
    assert (tmp_path / "law.png").read_bytes().startswith(b"\x89PNG")
    until = rows(call("delta", *runs, "--by", "weights", "--until", "1"))
    assert until[0].startswith("| step 1,000 of first-1 | 3 | 16 | 2.8 |")


def test_weights_of_which_delta_has_no_error_and_factors_that_cancel(tmp_path: Path) -> None:
    """Both divided by zero."""

    def record(name: str, bias: float, noise: float) -> str:
        of_heads = {"delta_error_relative_bias": [[bias]], "delta_error_relative_noise": [[noise]]}
        metrics = [{"step": 0, "w_q_spectral_norm": [[1.0]], **of_heads}]
        parent = {"parent": {"run": "runs/first", "from_step": 10}}
        return write_run(tmp_path / name, {"name": name}, metrics=metrics, manifest=parent)

    one, other, exact = record("one", 1.0, 1.0), record("other", -1.0, 1.0), record("exact", 0.0, 0.0)
    (row,) = rows(call("delta", one, other, "--by", "weights"))
    assert row.startswith("| step 10 of first | 2 | 1 | 0.0 |")
    refused = refusal(call("delta", one, exact, "--by", "weights"))
    assert refused == f"error: {exact}: layer 1: δ takes no part of the error of O there; leave the run out"
