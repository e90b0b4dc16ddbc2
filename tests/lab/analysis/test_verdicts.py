"""Verdicts on counts and intervals that are known by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest, ttest_1samp

from flashpoint.cli.run_words import select_runs
from flashpoint.errors import UserError
from flashpoint.lab.analysis import isolated
from flashpoint.lab.analysis.claims_file import Claim
from flashpoint.lab.analysis.quantities import QUANTITIES
from flashpoint.lab.analysis.ratios import OnsetRatio
from flashpoint.lab.analysis.verdicts import (
    Alone,
    Tally,
    Verdict,
    alone,
    compared,
    exploded,
    held,
    in_layer,
    judge,
    majority,
    within,
)
from flashpoint.runs.run import Run
from tests.records import call, write_run

BF16 = {"name": "flash_bf16"}


def recorded(folder: Path, *onsets: int | None, steps: int = 1000, **rest: object) -> list[Run]:
    """A run for each onset, its seed its place; without an onset stable for so many steps."""
    for seed, onset in enumerate(onsets):
        write_run(folder / f"{steps}-{seed}", BF16, seed=seed, steps=steps, onset=onset, **rest)  # type: ignore[arg-type]
    return select_runs([str(folder)])


def claim(**criterion: object) -> Claim:
    runs = None if criterion["kind"] in ("deviates", "differs") else ("some",)
    return Claim(id="one", source="ours", claim="One.", scale="tiny", runs=runs, criterion=criterion)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "of", "verdict"),
    [
        (6, 6, Verdict.REPLICATES),  # from 0.025^(1/6) = 54.1 % on
        (5, 5, Verdict.UNDECIDED),  # from 0.025^(1/5) = 47.8 % on
        (0, 6, Verdict.FAILS),
        (0, 5, Verdict.UNDECIDED),
        (12, 16, Verdict.UNDECIDED),  # sign test: two-sided p = 2 · 2,517 / 65,536 = 0.077
        (13, 16, Verdict.REPLICATES),  # 2 · 697 / 65,536 = 0.021
        (3, 16, Verdict.FAILS),
        (0, 0, Verdict.NOT_TESTED),
    ],
)
def test_a_share_is_judged_against_one_half(count: int, of: int, verdict: Verdict) -> None:
    assert majority(count, of) is verdict


@pytest.mark.parametrize(
    ("low", "high", "above", "below", "verdict"),
    [
        (0.1, 0.2, 0.0, None, Verdict.REPLICATES),
        (-0.1, 0.2, 0.0, None, Verdict.UNDECIDED),
        (-0.2, -0.1, 0.0, None, Verdict.FAILS),
        (-0.2, -0.1, None, 0.0, Verdict.REPLICATES),
        (0.1, 0.2, None, 0.0, Verdict.FAILS),
        (0.9, 1.1, 0.8, 1.25, Verdict.REPLICATES),
        (0.7, 1.1, 0.8, 1.25, Verdict.UNDECIDED),
        (0.7, 1.5, 0.8, 1.25, Verdict.UNDECIDED),
        (1.3, 1.5, 0.8, 1.25, Verdict.FAILS),
        (0.0, 0.2, 0.0, None, Verdict.UNDECIDED),
    ],
)
def test_an_interval_is_judged_by_its_bounds(
    low: float, high: float, above: float | None, below: float | None, verdict: Verdict
) -> None:
    assert within(low, high, above, below) is verdict


def test_explosions_are_counted_with_their_exact_interval(tmp_path: Path) -> None:
    finding = judge(claim(kind="explodes"), recorded(tmp_path, *[500] * 16))
    assert (finding.verdict, finding.count, finding.n, finding.value) == (Verdict.REPLICATES, 16, 16, 1.0)
    assert finding.low == pytest.approx(0.025 ** (1 / 16))  # 79.4 %
    assert finding.high == 1


def test_runs_shorter_than_the_horizon_do_not_hold(tmp_path: Path) -> None:
    recorded(tmp_path, 400, None, None, steps=1000)
    write_run(tmp_path / "late", BF16, seed=3, steps=1400, onset=900)
    write_run(tmp_path / "edge", BF16, seed=4, steps=1400, onset=800)
    write_run(tmp_path / "short", BF16, seed=5, steps=799)
    write_run(tmp_path / "nan", BF16, seed=6, steps=300, outcome="nonfinite")
    runs = select_runs([str(tmp_path)])
    assert held(runs, 800) == Tally(4, 6, left_out=1)
    assert exploded(runs, 800) == Tally(2, 6, left_out=1)
    assert exploded(runs) == Tally(4, 7, left_out=0)
    assert judge(claim(kind="holds", steps=800), runs).left_out == 1
    nothing = judge(claim(kind="holds", steps=800), [run for run in runs if run.name == "short"])
    assert (nothing.verdict, nothing.n, nothing.left_out) == (Verdict.NOT_TESTED, 0, 1)


@pytest.mark.parametrize("control", range(9))
@pytest.mark.parametrize("run", range(9))
def test_pairs_are_tested_as_by_the_exact_test_of_scipy(control: int, run: int) -> None:
    found, of = Alone(control, run), control + run
    p = binomtest(control, of).pvalue if of else 1.0
    assert found.p == pytest.approx(p)
    decided = Verdict.REPLICATES if control > run else Verdict.FAILS
    assert found.verdict is (decided if p < 0.05 else Verdict.UNDECIDED)


def test_pairs_in_which_one_alone_exploded_are_counted_to_the_horizon(tmp_path: Path) -> None:
    """By seed: the control alone; both; neither; the run alone; the control after the horizon; a run that is short."""
    runs = recorded(tmp_path / "runs", None, 700, None, 300, None)
    short = write_run(tmp_path / "short", BF16, seed=5, steps=700)
    controls = recorded(tmp_path / "controls", 500, 400, None, None, 900, 500)
    lone = recorded(tmp_path / "lone", *[None] * 7)[-1:]  # of a seed that no control has
    assert alone([*runs, *select_runs([short]), *lone], controls, 800) == Alone(1, 1)
    assert alone(runs, controls, 1000) == Alone(2, 1)


def test_that_runs_hold_needs_controls_that_explode(tmp_path: Path) -> None:
    holds = claim(kind="holds", steps=1000, against=["controls"])
    stable, exploded_ones = recorded(tmp_path / "stable", *[None] * 8), recorded(tmp_path / "exploded", *[500] * 8)
    assert judge(holds, stable, exploded_ones).verdict is Verdict.REPLICATES
    assert judge(holds, stable, recorded(tmp_path / "too", *[None] * 8)).verdict is Verdict.UNDECIDED
    assert judge(holds, stable).verdict is Verdict.UNDECIDED
    assert judge(holds, exploded_ones, recorded(tmp_path / "both", *[400] * 8)).verdict is Verdict.FAILS
    some = recorded(tmp_path / "some", 500, 500, *[None] * 6)  # 6 to 0 alone, and 6 of 8 hold: 35 to 97 %
    assert judge(holds, some, exploded_ones).verdict is Verdict.UNDECIDED


def test_the_largest_w_q_before_the_onset_names_the_layer(tmp_path: Path) -> None:
    metrics = [{"step": 400, "w_q_spectral_norm": [[1.0], [3.0]]}, {"step": 500, "w_q_spectral_norm": [[9.0], [3.0]]}]
    assert in_layer(recorded(tmp_path, 500, metrics=metrics), 2) == Tally(1, 1, left_out=0)


def test_w_q_of_layer_2_is_compared_at_the_last_common_step(tmp_path: Path) -> None:
    for seed, ratio in enumerate((2.0, 4.0, 8.0)):
        for name, factor, last in (("runs", ratio, 800), ("controls", 1.0, 600)):
            metrics = [
                {"step": step, "w_q_spectral_norm": [[50.0, 1.0], [1.0, factor * step / 100]]}
                for step in range(200, last + 1, 200)
            ]
            write_run(tmp_path / name / str(seed), BF16, seed=seed, metrics=metrics)
    runs, controls = select_runs([str(tmp_path / "runs")]), select_runs([str(tmp_path / "controls")])
    asked = claim(kind="interval", quantity="w_q_layer_2", against=["controls"], above=1)
    found = judge(asked, runs, controls)
    test = ttest_1samp(np.log([2, 4, 8]), 0).confidence_interval()
    assert (found.n, found.value) == (3, pytest.approx(4))
    assert (found.low, found.high) == (pytest.approx(np.exp(test.low)), pytest.approx(np.exp(test.high)))


def test_a_run_counts_once_and_with_its_own_attention(tmp_path: Path) -> None:
    runs, again = recorded(tmp_path / "one", 400, 400), recorded(tmp_path / "again", 400)
    with pytest.raises(UserError, match="are one experiment"):
        exploded([*runs, *again])
    write_run(tmp_path / "other", {"name": "flash_fp32"}, seed=9)
    with pytest.raises(UserError, match="2 attentions: flash_bf16; flash_fp32"):
        exploded([*runs, *select_runs([str(tmp_path / "other")])])


def test_each_run_can_have_heads_of_its_own(tmp_path: Path) -> None:
    for seed, heads in enumerate(([1], [2], [1, 2])):
        chosen = {"name": "flash_fp32_out", "layers": [1], "heads": heads, "elsewhere": BF16}
        write_run(tmp_path / str(seed), chosen, seed=seed, steps=900, onset=None)
    runs = select_runs([str(tmp_path / "*")])
    assert judge(claim(kind="holds", steps=800), runs).n == 3
    write_run(tmp_path / "other", {**chosen, "layers": [2]}, seed=9)
    with pytest.raises(UserError, match="4 attentions: "):
        exploded(select_runs([str(tmp_path / "*")]))


def test_the_layer_of_an_explosion_counts_once_and_with_its_own_attention(tmp_path: Path) -> None:
    metrics = [{"step": 600, "w_q_spectral_norm": [[1.0], [2.0]]}]
    runs = recorded(tmp_path / "one", 500, 500, metrics=metrics)
    again = recorded(tmp_path / "again", 500, metrics=metrics)
    write_run(tmp_path / "other", {"name": "flash_fp32"}, seed=9, onset=500, metrics=metrics)
    with pytest.raises(UserError, match="are one experiment"):
        in_layer([*runs, *again], 2)
    with pytest.raises(UserError, match="2 attentions: flash_bf16; flash_fp32"):
        in_layer([*runs, *select_runs([str(tmp_path / "other")])], 2)


def test_pairs_that_cannot_say_are_left_out() -> None:
    ratios = [OnsetRatio(0.5, True, True), OnsetRatio(1.5, True, True), OnsetRatio(2.0, False, True)]
    earlier_than_one_that_held = OnsetRatio(0.9, True, control_exploded=False)
    cannot = [OnsetRatio(1.0, True, True), OnsetRatio(0.9, False, True), OnsetRatio(1.0, False, True)]
    of_pairs_that_held = [OnsetRatio(None, False, False), OnsetRatio(1.5, True, False), OnsetRatio(1.0, True, False)]
    pairs = [*ratios, *cannot, earlier_than_one_that_held, *of_pairs_that_held]
    assert compared(pairs, "later") == Tally(2, 4, left_out=6)
    assert compared(pairs, "earlier") == Tally(2, 4, left_out=6)


def test_onsets_are_paired_by_seed(tmp_path: Path) -> None:
    controls = recorded(tmp_path / "controls", *[500] * 6)
    runs = recorded(tmp_path / "runs", *[600] * 5, None)
    finding = judge(claim(kind="later", against=["controls"]), runs, controls)
    assert (finding.verdict, finding.count, finding.n) == (Verdict.REPLICATES, 6, 6)
    assert judge(claim(kind="earlier", against=["controls"]), runs, controls).verdict is Verdict.FAILS


def test_explosions_are_counted_by_the_layer_of_their_largest_w_q(tmp_path: Path) -> None:
    for seed, layer in enumerate((1, 2, 2, 2)):
        norms = [[1.0, 2.0], [1.0, 1.5 if layer == 1 else 3.0]]
        metrics = [{"step": step, "w_q_spectral_norm": norms} for step in range(0, 1000, 100)]
        write_run(tmp_path / str(seed), BF16, seed=seed, onset=None if seed == 3 else 500, metrics=metrics)
    assert in_layer(select_runs([str(tmp_path)]), 2) == Tally(2, 3, left_out=1)


def test_loss_differences_are_paired_and_have_their_interval(tmp_path: Path) -> None:
    for name, losses in (("flash_bf16", (2.5, 2.7, 2.9)), ("flash_fp32", (2.4, 2.5, 2.6))):
        for seed, loss in enumerate(losses):
            write_run(tmp_path / name / str(seed), {"name": name}, seed=seed, steps=1000, val_loss=loss)
    runs, against = (select_runs([str(tmp_path / name)]) for name in ("flash_bf16", "flash_fp32"))
    asked = {"kind": "interval", "quantity": "validation_loss", "step": 1000, "against": ["them"]}
    finding = judge(claim(**asked, above=-0.1, below=0.5), runs, against)
    # Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / √3, t = 4.303 with two degrees of freedom.
    assert (finding.n, finding.count, finding.value) == (3, None, pytest.approx(0.2))
    assert (finding.low, finding.high) == (pytest.approx(-0.0484, abs=1e-4), pytest.approx(0.4484, abs=1e-4))
    assert finding.verdict is Verdict.REPLICATES
    assert judge(claim(**asked, below=0.0), runs, against).verdict is Verdict.UNDECIDED
    alone = judge(claim(**asked, below=0.0), runs[:1], against)
    assert (alone.verdict, alone.n, alone.low) == (Verdict.UNDECIDED, 1, None)
    assert judge(claim(**asked, below=0.0), runs, against[:2]).left_out == 1


def test_ratios_of_weights_are_paired_by_seed(tmp_path: Path) -> None:
    for name, distances in (("flash", (3.0, 8.0, 1.0, 0.0)), ("fp32", (1.0, 2.0, 0.0, 9.0, 9.0))):  # 0 has no ratio
        for seed, distance in enumerate(distances):
            at = {"weights_largest/all": 1.0, "weights_wasserstein/all": distance, "weights_spread/all": 1.0}
            manifest = {"twin": {"run": "twin", "differs_in": name}}
            write_run(tmp_path / name / str(seed), BF16, seed=seed, manifest=manifest, metrics=[{"step": 99, **at}])
    runs, against = (select_runs([str(tmp_path / name)]) for name in ("flash", "fp32"))
    asked = {"kind": "interval", "quantity": "weights_distance", "step": 100, "against": ["them"]}
    finding = judge(claim(**asked, below=22), runs, against)
    assert finding.left_out == 2
    # Ratios 3 and 4: geometric mean √12; of logarithms the standard error ln(4/3) / 2, t = 12.706.
    assert (finding.n, finding.value) == (2, pytest.approx(12**0.5))
    assert finding.high == pytest.approx(12**0.5 * (4 / 3) ** (12.706 / 2), rel=1e-3)
    assert finding.verdict is Verdict.REPLICATES


def test_weights_grow_by_a_power_of_the_steps(tmp_path: Path) -> None:
    for seed, exponent in enumerate((1.0, 2.0)):
        manifest = {"twin": {"run": "twin", "differs_in": "flash"}}
        at = [{"step": step - 1, "weights_wasserstein/all": step**exponent} for step in (10, 20, 40)]
        others = {"weights_largest/all": 1.0, "weights_spread/all": 1.0}
        metrics = [{**one, **others} for one in at]
        write_run(tmp_path / str(seed), BF16, seed=seed, manifest=manifest, metrics=metrics)
    finding = judge(claim(kind="interval", quantity="weights_growth", above=0), select_runs([str(tmp_path)]))
    assert (finding.n, finding.value) == (2, pytest.approx(1.5))
    assert finding.high == pytest.approx(1.5 + 12.706 * 0.5, rel=1e-3)
    assert finding.verdict is Verdict.UNDECIDED


def test_differences_of_several_attentions_or_from_several_twins_are_not_pooled(tmp_path: Path) -> None:
    def of(name: str, attention: str, seed: int, differs_in: str = "precision") -> list[Run]:
        at = {f"weights_{kind}/all": 1.0 for kind in ("largest", "wasserstein", "spread")}
        manifest = {"twin": {"run": "twin", "differs_in": differs_in}}
        folder = tmp_path / name / attention
        write_run(folder, {"name": attention}, seed=seed, val_loss=1.0, manifest=manifest, metrics=[{"step": 99, **at}])
        return select_runs([str(folder)])

    against = of("against", "flash_fp32", 1)
    losses = claim(kind="interval", quantity="validation_loss", step=1000, against=["them"], below=0)
    with pytest.raises(UserError, match="2 attentions: flash_bf16; flash_exact_rowsum"):
        judge(losses, [*of("one", "flash_bf16", 1), *of("two", "flash_exact_rowsum", 1)], against)
    weights = claim(kind="interval", quantity="weights_distance", step=100, against=["them"], below=1)
    runs = of("one-more", "flash_bf16", 1)
    with pytest.raises(UserError, match="2 differences from the twin: precision; order"):
        judge(weights, runs, [*against, *of("three", "flash_fp32", 1, "order")])
    with pytest.raises(UserError, match="both of seed 1, and both differ in precision"):
        judge(weights, [*runs, *of("four", "flash_bf16", 1)], against)


@pytest.mark.parametrize(("variance", "verdict"), [(1e-4, Verdict.REPLICATES), (0.0, None)])
def test_a_bias_over_its_variance_needs_an_error(tmp_path: Path, variance: float, verdict: Verdict | None) -> None:
    size = 1e-3 if verdict else 0.0
    of_heads = {
        "delta_error_sum": [[2 * size]],
        "delta_error_variance": [[variance]],
        "delta_error_relative_bias": [[size]],
        "delta_error_relative_noise": [[size]],
        "w_q_spectral_norm": [[1.0]],
    }
    config = {"probes": {"sequences": 1}, "model": {"context": 2, "n_layer": 1, "d_model": 8}}
    metrics = [{"step": step, **of_heads} for step in range(0, 1000, 100)]
    for seed in range(2):
        write_run(tmp_path / str(seed), BF16, seed=seed, metrics=metrics, config=config, train={"batch_size": 2})
    runs = select_runs([str(tmp_path)])
    asked = claim(kind="interval", quantity="bias_over_variance", above=0)
    if verdict is None:
        with pytest.raises(UserError, match="leave the run out"):
            judge(asked, runs)
    else:
        finding = judge(asked, runs)
        # N = 4: bias 4 · 2e-3 / 2 = 4e-3, mean square 16 · (1e-4 / 2 + 1e-6) = 8.16e-4.
        assert (finding.n, finding.value) == (2, pytest.approx(4e-3 / 8.16e-4))


def test_the_exponent_of_a_quadratic_bias_is_one(tmp_path: Path) -> None:
    for place, noise in enumerate((1e-4, 1e-3, 1e-2)):
        of_heads = {
            "delta_error_relative_bias": [[20 * noise**2]],
            "delta_error_relative_noise": [[noise]],
            "w_q_spectral_norm": [[1.0]],
        }
        metrics = [{"step": step, **of_heads} for step in range(0, 1000, 100)]
        parent = {"parent": {"run": "runs/one", "from_step": 40}}
        write_run(tmp_path / str(place), BF16, manifest=parent, metrics=metrics)
    runs = select_runs([str(tmp_path)])
    asked = claim(kind="interval", quantity="bias_exponent", above=0.8, below=1.25)
    exponents = QUANTITIES["bias_exponent"].values(runs, [], asked.criterion)  # type: ignore[arg-type]
    np.testing.assert_allclose(exponents, [1.0])


def test_sets_of_weights_of_one_seed_count_as_one(tmp_path: Path) -> None:
    """Exponents 0.8 and 1.2 of seed 1, and 1.1 of seed 2: means 1.0 and 1.1, as SciPy's t test has their interval."""
    for seed, step, power in ((1, 40, 0.8), (1, 80, 1.2), (2, 40, 1.1)):
        for noise in (1e-4, 1e-3, 1e-2):
            of_heads = {
                "delta_error_relative_bias": [[noise ** (2 * power)]],
                "delta_error_relative_noise": [[noise]],
                "w_q_spectral_norm": [[1.0]],
            }
            parent = {"parent": {"run": f"runs/{seed}", "from_step": step}}
            folder = tmp_path / f"{seed}-{step}-{noise}"
            write_run(folder, BF16, seed=seed, manifest=parent, metrics=[{"step": 100, **of_heads}])
    finding = judge(
        claim(kind="interval", quantity="bias_exponent", above=0.8, below=1.25), select_runs([str(tmp_path)])
    )
    expected = ttest_1samp([1.0, 1.1], 0).confidence_interval(0.95)
    assert (finding.n, finding.value) == (2, pytest.approx(1.05))
    assert (finding.low, finding.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert finding.verdict is Verdict.UNDECIDED


def _write_rounding(folder: Path, mode: str, seed: int, factor: float, step: int = 40) -> None:
    """A run on the weights of a step of the seed's run. Its bias is the factor times the square of its noise."""
    of_heads = {
        "delta_error_relative_bias": [[factor * 1e-4]],
        "delta_error_relative_noise": [[1e-2]],
        "w_q_spectral_norm": [[1.0]],
    }
    parent = {"parent": {"run": f"runs/{seed}", "from_step": step}}
    metrics = [{"step": 100, **of_heads}]
    attention = {"name": "flash_bf16", "out_unnormalized": {"mode": mode}}
    write_run(folder / f"{mode}-{seed}-{step}", attention, seed=seed, manifest=parent, metrics=metrics)


def test_rounding_at_random_is_compared_with_rounding_to_nearest_on_the_same_weights(tmp_path: Path) -> None:
    # Seed 1 has two sets of weights, with ratios 8 and 1/2: their geometric mean is 2.
    for seed, step, random, nearest in ((1, 40, 8.0, 1.0), (1, 80, 2.0, 4.0), (2, 40, 1.0, 2.0)):
        _write_rounding(tmp_path, "stochastic", seed, random, step)
        _write_rounding(tmp_path, "nearest", seed, nearest, step)
    asked = claim(kind="interval", quantity="bias_random_over_nearest", above=0.8, below=1.25)
    finding = judge(asked, select_runs([str(tmp_path)]))
    expected = ttest_1samp(np.log([2.0, 0.5]), 0).confidence_interval(0.95)
    assert (finding.n, finding.value) == (2, pytest.approx(1.0))
    assert (finding.low, finding.high) == (pytest.approx(np.exp(expected.low)), pytest.approx(np.exp(expected.high)))


@pytest.mark.parametrize("others", [{}, {"nearest": -1.0}, {"nearest": 1.0, "none": 1.0}])
def test_a_ratio_of_roundings_needs_one_of_each_with_a_positive_bias(tmp_path: Path, others: dict[str, float]) -> None:
    for mode, factor in {"stochastic": 1.0, **others}.items():
        _write_rounding(tmp_path, mode, 1, factor)
    asked = claim(kind="interval", quantity="bias_random_over_nearest", above=0.8, below=1.25)
    with pytest.raises(UserError, match="one rounding of Ō at random and one to nearest"):
        judge(asked, select_runs([str(tmp_path)]))


def test_the_bias_with_drawn_targets_is_a_mean_over_the_weights_of_a_seed(tmp_path: Path) -> None:
    """Of 2 observed tokens and N = 4 the bias is 2Σ, and its variance 16 (v / 2 + Σ² / 4)."""
    config = {
        "probes": {"sequences": 1, "targets": "model"},
        "model": {"context": 2, "n_layer": 1, "d_model": 8},
    }
    sums = {"a": (1, 0.1), "b": (1, 0.3), "c": (2, 0.4)}
    for digest, (seed, error) in sums.items():
        of_heads = {"delta_error_sum": [[error]], "delta_error_variance": [[0.5]], "w_q_spectral_norm": [[1.0]]}
        write_run(
            tmp_path / digest, BF16, seed=seed, digest=digest, train={"batch_size": 2},
            metrics=[{"step": 100, **of_heads}], config=config,
        )  # fmt: skip
    of_set = {digest: 2 * error / (16 * (0.25 + error**2 / 4)) for digest, (_, error) in sums.items()}
    asked = claim(kind="interval", quantity="bias_model_targets", above=0)
    found = QUANTITIES["bias_model_targets"].values(select_runs([str(tmp_path)]), [], asked.criterion)  # type: ignore[arg-type]
    np.testing.assert_allclose(found, [(of_set["a"] + of_set["b"]) / 2, of_set["c"]])


def grown(folder: Path, onset: int | None = 5000, **probes: tuple[float, float]) -> list[Run]:
    """A run of one layer and two heads, of which the second has the larger W_Q. Probes have the first value until step
    3,000, and then the second; other values in the first head and from step 4,000 on."""

    def at(step: int) -> dict[str, object]:
        values = {name: -9.0 if step >= 4000 else pair[step >= 3000] for name, pair in probes.items()}
        return {"step": step, "w_q_spectral_norm": [[1.0, 2.0]], **{name: [[9.0, x]] for name, x in values.items()}}

    write_run(folder / "0", BF16, onset=onset, metrics=[at(step) for step in range(0, 6000, 500)])
    return select_runs([str(folder)])


@pytest.mark.parametrize(
    ("quantity", "metric", "value"),
    [
        ("effective_rank", "w_q_error_effective_rank", 0.5),
        ("token_similarity", "token_similarity", 0.5),
        ("step_similarity", "step_similarity", 0.5),
        ("sign_agreement", "grad_out_error_sign_agreement", 0.75),  # of a mean product of signs of 0.5
    ],
)
def test_probes_are_read_in_the_hottest_head_while_its_w_q_grows(
    tmp_path: Path, quantity: str, metric: str, value: float
) -> None:
    asked = claim(kind="interval", quantity=quantity, above=0)
    # Steps 2,000 and 2,500 have 0.2, steps 3,000 and 3,500 have 0.8.
    finding = judge(asked, grown(tmp_path, **{metric: (0.2, 0.8)}))
    assert (finding.n, finding.value) == (1, pytest.approx(value))


@pytest.mark.parametrize(("onset", "told"), [(None, "stable to"), (2999, "exploded at 2,999")])
def test_a_run_without_3000_steps_before_an_onset_has_no_growth_to_read(
    tmp_path: Path, onset: int | None, told: str
) -> None:
    runs = grown(tmp_path, onset, token_similarity=(0.2, 0.8))
    with pytest.raises(UserError, match=f"{told}.*leave the run out"):
        judge(claim(kind="interval", quantity="token_similarity", above=0), runs)


def test_no_error_is_no_error_along_one_direction(tmp_path: Path) -> None:
    runs = grown(tmp_path, w_q_error_effective_rank=(1.0, 0.0))
    with pytest.raises(UserError, match="leave the run out"):
        judge(claim(kind="interval", quantity="effective_rank", below=2), runs)


def test_ties_on_sinks_count_each_tied_maximum_once(tmp_path: Path) -> None:
    asked = claim(kind="interval", quantity="ties_on_sinks", above=0)
    probes = {"tied_rows": (0.1, 0.3), "tie_multiplicity": (2.0, 4.0), "ties_on_first_keys": (1.0, 0.25)}
    # Tied maxima a row: 0.1 · 2 = 0.2, all on the first keys, and 0.3 · 4 = 1.2, a quarter of them.
    assert judge(asked, grown(tmp_path / "tied", **probes)).value == pytest.approx((0.2 + 0.3) / 1.4)
    without = grown(tmp_path / "none", **dict.fromkeys(probes, (0.0, 0.0)))
    assert judge(asked, without).verdict is Verdict.NOT_TESTED
    both = judge(asked, [*grown(tmp_path / "again", **probes), *without])
    assert (both.n, both.left_out) == (1, 1)


def test_the_bias_in_the_most_one_sided_feature_counts_each_tied_row_of_the_growth_once(tmp_path: Path) -> None:
    asked = claim(kind="interval", quantity="one_sided_tied_out_error_bias", above=0)
    probes = {"tied_rows": (0.1, 0.3), "one_sided_tied_out_error_bias": (1.0, -0.5)}
    assert judge(asked, grown(tmp_path / "tied", **probes)).value == pytest.approx((0.1 - 0.15) / 0.4)
    without = grown(tmp_path / "none", **dict.fromkeys(probes, (0.0, 0.0)))
    assert judge(asked, without).verdict is Verdict.NOT_TESTED


def test_the_bias_of_rounding_counts_each_tied_row_of_every_head_once(tmp_path: Path) -> None:
    asked = claim(kind="interval", quantity="tied_out_error_bias", above=0)
    probes = {"tied_rows": (0.1, 0.3), "tied_out_error_bias": (1.0, -0.5)}
    # Before step 4,000: six observations and two of the second head, eight of the first, whose every probe is 9.
    expected = (6 * 0.1 * 1.0 - 2 * 0.3 * 0.5 + 8 * 81) / (6 * 0.1 + 2 * 0.3 + 8 * 9)
    assert judge(asked, grown(tmp_path / "tied", **probes)).value == pytest.approx(expected)


def test_a_deviation_over_baseline_is_that_of_the_command() -> None:
    columns = ["--columns", "distance,of,largest"]
    printed = call("deviation", "--precision", "bf16", "--of", "O", "--unit", "relative", "--device", "cpu", *columns)
    (row,) = [line.split("|") for line in printed.stdout.splitlines() if line.startswith("| flash ")]
    asked = claim(kind="deviates", above=5, below=20)
    finding = judge(asked, [])
    assert f"{finding.value:.2f} ({finding.low:.2f} to {finding.high:.2f})" == row[3].strip()
    assert (finding.n, finding.verdict) == (8, Verdict.FAILS)


def test_rows_without_a_tie_count_by_their_share(tmp_path: Path) -> None:
    asked = claim(kind="interval", quantity="untied_out_error_bias", above=0)
    shares, biases = (0.1, 0.3), (1.0, -0.5)
    runs = grown(tmp_path / "untied", tied_rows=shares, untied_out_error_bias=biases)
    # The first head's eight observations before step 2,000 have shares of 9, as every probe there.
    expected = (6 * 0.9 * 1.0 - 2 * 0.7 * 0.5 - 8 * 8 * 9) / (6 * 0.9 + 2 * 0.7 - 8 * 8)
    assert judge(asked, runs).value == pytest.approx(expected)


def test_a_difference_over_that_of_another_setting_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--precision", "bf16", "--accumulate", "within", "--length", "64", "--no-causal", "--seeds", "1")
    shown = ("--of", "O", "--device", "cpu", "--block", "8x8,64x64", "--format", "json")
    rows = json.loads(call("deviation", *arguments, *shown).stdout)["tables"][0]["rows"]
    small, large = (row["largest"] for row in rows if row["difference"] == "flash − baseline")
    monkeypatch.setattr(isolated, "SEEDS", 1)
    settings = {"of": {"length": 64, "rows": 8, "keys": 8}, "over": {"length": 64}}
    asked = claim(kind="differs", sums="within", causal=False, **settings, above=1)
    assert small != large
    assert judge(asked, []).value == pytest.approx(small / large, rel=1e-5)


def test_a_claim_without_runs_is_not_tested() -> None:
    untested = Claim(id="one", source="paper", claim="One.", criterion={"kind": "holds", "steps": 10})  # type: ignore[arg-type]
    assert judge(untested, []).verdict is Verdict.NOT_TESTED
