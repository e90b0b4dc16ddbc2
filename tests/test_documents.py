"""Figures in the documents are what the scripts print from the committed runs."""

import json
import math
import shlex
from pathlib import Path

import pytest

from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder
from tests.conftest import REPOSITORY
from tests.report.records import call

REFERENCE = REPOSITORY / "runs/reference"


def test_the_throughput_in_the_documents_is_that_of_the_committed_runs() -> None:
    result = call("throughput.py", *sorted((REFERENCE / "ranks-h200").iterdir()))
    assert result.returncode == 0, result.stderr
    assert f"```\n{result.stdout}```" in (REPOSITORY / "docs/measurements.md").read_text()


@pytest.mark.parametrize(
    ("table", "first"),
    [
        ("kernels-h200/bench-2026-11-22.txt", "32×12×1024×64 "),
        ("kernels-h200/compare.txt", "flash_bf16 "),
        ("trainer-h200/measure_gpu.txt", "ignite-again "),
    ],
)
def test_figures_in_the_documents_are_those_printed(table: str, first: str) -> None:
    printed = (REFERENCE / table).read_text().splitlines()
    blocks = (REPOSITORY / "docs/measurements.md").read_text().split("```\n")[1::2]
    (block,) = [block.splitlines() for block in blocks if f"\n{first}" in block]
    assert len(block) >= 10
    assert set(block) <= set(printed)


@pytest.mark.parametrize(
    ("name", "count"),
    [("explosion-h200", 4), ("replay-h200", 9), ("replay-default-h200", 7)],
)
def test_outcomes_in_the_documents_are_those_of_the_committed_runs(name: str, count: int) -> None:
    document = (REPOSITORY / "docs/measurements.md").read_text()
    runs = sorted((REFERENCE / name).iterdir())
    assert len(runs) == count
    for run in runs:
        outcome = json.loads((run / "outcome.json").read_text())
        onset = "none" if outcome["onset_step"] is None else outcome["onset_step"]
        row = f"| `{run.name}` | {outcome['outcome']} | {outcome['step']:,} | {onset} | `{outcome['digest']}` |"
        assert row in document


FIRST_DEFAULT = [
    *sorted((REFERENCE / "explosion-h200").iterdir()),
    REFERENCE / "replay-h200/explosion",
    *sorted((REFERENCE / "replay-h200").glob("branch-*")),
    REFERENCE / "replay-h200/exact_rowsum",
]


def test_the_early_warnings_in_the_documents_are_those_of_the_committed_runs() -> None:
    result = call("sentinel.py", *FIRST_DEFAULT)
    assert f"```\n{result.stdout}```" in (REPOSITORY / "docs/measurements.md").read_text(), result.stderr


IGNITE = sorted((REFERENCE / "ignite-h200").iterdir())
LAPTOP_THREE = [
    run
    for name in ("bf16", "exact_rowsum", "fp32")
    for run in sorted((REFERENCE / "laptop").glob(f"flash_{name}_seed*"))
]


@pytest.mark.parametrize(
    ("script", "runs"), [("sentinel.py", IGNITE), ("recovery.py", IGNITE), ("sentinel.py", LAPTOP_THREE)]
)
def test_the_counts_in_the_documents_are_those_of_the_committed_runs(script: str, runs: list[Path]) -> None:
    result = call(script, *runs)
    assert f"```\n{result.stdout.splitlines()[-1]}\n```" in (REPOSITORY / "docs/measurements.md").read_text()


OFFSET = (
    "score_mean entropy tied_rows w_q_spectral_norm w_k_spectral_norm token_similarity w_q_mean_key_share "
    "w_q_update_mean_key_share"
)
INPUTS = " ".join(f"layer/{layer}/head/1/input_similarity" for layer in range(1, 7))


@pytest.mark.parametrize(
    ("document", "command"),
    [
        ("measurements.md", "overhead.py ignite-unprobed ignite-probed ignite-probed-every-step"),
        ("measurements.md", "overhead.py gpt2-unprobed gpt2-probed gpt2-probed-every-step"),
        ("measurements.md", "overhead.py gpt2-unprobed-again gpt2-probed-again"),
        ("measurements.md", "overhead.py default-unprobed default-probed"),
        ("measurements.md", "throughput.py default-unprobed default-probed"),
        (
            "measurements.md",
            "throughput.py timed-flash_bf16 timed-flash_fp32 timed-flash_exact_rowsum timed-flash_fixed timed-sdpa",
        ),
        (
            "mechanism.md",
            "series.py ../ignite-h200/flash_fixed_paper_seed-0 --head 2/4 --every 500 tied_rows score_mean "
            "w_q_spectral_norm",
        ),
        ("mechanism.md", f"series.py flash_bf16_seed-2 --head 2/2 {OFFSET} --every 400"),
        (
            "mechanism.md",
            "series.py ../centered-h200/flash_centered_grad_seed-4 --head 2/1 score_mean w_q_spectral_norm "
            "w_k_spectral_norm w_q_mean_key_share attended_key_mean_key_cosine input_similarity --every 500",
        ),
        (
            "mechanism.md",
            "series.py ../injected-into-h200/bias1e-5-L2-grad_k_seed-1 --head 2/3 score_mean w_q_spectral_norm "
            "w_k_spectral_norm --every 500",
        ),
        ("mechanism.md", f"series.py ../centered-h200/flash_centered_grad_seed-4 {INPUTS} --every 1000"),
        ("mechanism.md", f"series.py ../centered-h200/flash_centered_grad_seed-6 {INPUTS} --every 1000"),
        *(
            (
                "laptop.md",
                f"series.py ../laptop-similarity/{name}_seed-0 layer/1/head/1/input_similarity "
                "layer/2/head/1/input_similarity --every 200",
            )
            for name in ("flash_bf16", "flash_exact_rowsum")
        ),
        *(
            (
                "laptop.md",
                f"series.py ../laptop-injected-into/{into}_seed-0 --head 1/1 w_q_spectral_norm w_k_spectral_norm "
                "score_mean --every 500",
            )
            for into in ("grad_q", "grad_k")
        ),
        (
            "laptop.md",
            "series.py ../laptop-centered/flash_centered_grad_seed-0 --head 1/1 w_q_spectral_norm w_q_mean_key_share "
            "w_q_update_mean_key_share attended_key_mean_key_cosine --every 200",
        ),
    ],
)
def test_blocks_in_the_documents_are_what_the_commands_print(document: str, command: str) -> None:
    script, *arguments = command.split()
    folder = REFERENCE / ("twins-h200" if document == "mechanism.md" else "probes-h200")
    result = call(script, *arguments, cwd=folder)
    assert f"```\n{result.stdout}```" in (REPOSITORY / "docs" / document).read_text(), result.stderr


LAPTOP = [f"laptop/flash_{name}_seed-[0-7]" for name in ("bf16", "fp32")]


@pytest.mark.parametrize(
    ("documents", "command"),
    [
        (["docs/laptop.md"], ["survival.py", "laptop/*"]),
        (["README.md", "docs/mechanism.md"], ["survival.py --control flash_bf16", "ignite-h200/*"]),
        (
            ["docs/mechanism.md"],
            [
                "delta_bias.py --by attention --of row_sum --since 1000 --until 3000",
                *(
                    f"ignite-h200/flash_{name}"
                    for name in (
                        *("bf16_seed-1[45]", "centered*", "delta*", "fixed_paper*", "fp32*", "independent*"),
                        *("per_block*", "stochastic*", "un*"),
                    )
                ),
                *("ignite-h200/sdpa*", "ignite-h200/standard*"),
            ],
        ),
        (
            ["docs/mechanism.md"],
            ["survival.py --control flash_bf16", "ignite-h200/flash_bf16_seed-[0-7]", "selected-h200/*"],
        ),
        (
            ["docs/mechanism.md"],
            [
                "survival.py --control flash_bf16",
                *(f"ignite-h200/flash_bf16_seed-{seed}" for seed in (4, 10, 13, 14)),
                "selected-third-h200/*",
            ],
        ),
        (
            ["docs/mechanism.md"],
            [
                "survival.py --control 'flash_exact_rowsum injected delta_error.into=both'",
                *("injected-into-h200/*", "injected-h200/bias1e-5-L2*"),
            ],
        ),
        (
            ["docs/mechanism.md"],
            ["survival.py --control flash_fixed_paper", "ignite-h200/flash_fixed_paper_seed-[0-7]", "paper-h200/*"],
        ),
        (["docs/laptop.md"], ["survival.py", "laptop-variants/*", *LAPTOP]),
        (["docs/measurements.md"], ["survival.py", "screening-h200/*"]),
        (["docs/measurements.md"], ["survival.py --control flash_bf16", "settings-h200/*"]),
        (["docs/measurements.md"], ["survival.py --control flash_bf16", "corpus-h200/small*"]),
        (["docs/measurements.md"], ["survival.py --control flash_bf16", "corpus-h200/stdlib*"]),
        (["docs/laptop.md"], ["survival.py --control flash_bf16", "laptop-selected/*"]),
        (["docs/laptop.md"], ["survival.py", "laptop-settings/*", "laptop/flash_bf16_seed-[0-3]"]),
        (
            ["docs/laptop.md"],
            [
                "survival.py --control 'flash_exact_rowsum, Ō of 1 mantissa bit'",
                *("laptop-schedule/*", "laptop-similarity/flash_bf16_seed-[0-2]"),
            ],
        ),
        (["docs/laptop.md"], ["survival.py --control 'flash_unrounded_out exact_row_sum=True'", "laptop-probs/*"]),
        (["docs/laptop.md"], ["survival.py", "laptop-precision/control-*"]),
        (["docs/laptop.md"], ["loss.py", "laptop/flash_exact_rowsum_*", "laptop/flash_fp32_*"]),
        (
            ["docs/mechanism.md"],
            [
                "loss.py --at 6000",
                *(
                    f"ignite-h200/flash_{name}"
                    for name in (
                        *("centered*", "delta_*", "exact_rowsum*", "fixed_seed*", "fp32_seed*"),
                        *("independent_delta_*", "unrounded*"),
                    )
                ),
                *("ignite-h200/sdpa*", "ignite-h200/standard*"),
            ],
        ),
        (
            ["docs/laptop.md"],
            ["loss.py --at 7000 --control 'flash_unrounded_out exact_row_sum=True'", "laptop-probs/*"],
        ),
        (["docs/laptop.md"], ["delta_bias.py --by attention", "laptop-frozen/*"]),
        (["docs/laptop.md"], ["delta_bias.py --by attention --of row_sum", "laptop-frozen-probs/*"]),
        (["docs/laptop.md"], ["delta_bias.py --by attention --until 400", "laptop-bias/*"]),
        (["docs/laptop.md"], ["delta_bias.py --by attention --since 400 --until 800", "laptop-bias/*"]),
        (
            ["docs/laptop.md"],
            ["delta_bias.py --by attention --layers 1 --since 800 --until 1300", "laptop-bias-late/*"],
        ),
        (["docs/laptop.md"], ["delta_bias.py --by attention --of row_sum", "laptop-probs-bias/*"]),
        (["docs/laptop.md"], ["delta_bias.py --by attention", "laptop-probs-bias/*"]),
        (["docs/laptop.md"], ["onset.py attn.delta_error.size", "laptop-injected/*"]),
        (
            ["docs/laptop.md"],
            ["survival.py --control 'flash_fp32 injected delta_error.into=both'", "laptop-injected-into/*"],
        ),
        (["docs/mechanism.md"], ["onset.py attn.delta_error.size", "injected-h200/*"]),
        (
            ["docs/mechanism.md"],
            [
                "onset.py attn.out_unnormalized_bits",
                *("precision-h200/*", "ignite-h200/flash_bf16_seed-[123]", "ignite-h200/flash_bf16_seed-12"),
            ],
        ),
        (["docs/laptop.md"], ["survival.py", "laptop-injected-settings/*", "laptop-injected/bias0.001_seed-*"]),
        (["docs/laptop.md"], ["survival.py", "laptop-injected-width/*"]),
        (["docs/laptop.md"], ["onset.py train.lr", "laptop-injected-lr/*bias5e-4*"]),
        (["docs/laptop.md"], ["onset.py train.lr", "laptop-injected-lr/*bias3e-3*"]),
        (
            ["docs/laptop.md"],
            [
                "onset.py attn.out_unnormalized_bits",
                "laptop-precision/b*",
                "laptop-variants/flash_stoch*",
                "laptop/flash_bf16_seed-*",
            ],
        ),
    ],
)
def test_tables_in_the_documents_are_those_of_the_committed_runs(documents: list[str], command: list[str]) -> None:
    printed = of_committed_runs(*command)
    table = printed[printed.index("| attention |") :]
    assert table.count("\n") >= 3
    for document in documents:
        assert table in (REPOSITORY / document).read_text()


def test_the_ratios_of_onsets_in_the_documents_are_those_of_the_committed_runs() -> None:
    controls = [REFERENCE / f"ignite-h200/flash_bf16_seed-{seed}" for seed in (1, 2, 3, 12)]
    result = call("onset_ratios.py", *sorted(REFERENCE.glob("settings-h200/*")), "--control", *controls)
    assert result.returncode == 0, result.stderr
    assert f"\n{result.stdout}\n" in (REPOSITORY / "docs/measurements.md").read_text()


DEPARTING = (
    "score_max w_q_mean_key_share w_q_spectral_norm score_mean token_similarity w_k_spectral_norm step_similarity "
    "w_q_update_mean_key_share w_q_update_first_key_share tied_rows entropy"
)


@pytest.mark.parametrize(
    ("names", "runs"),
    [
        (f"{DEPARTING} input_similarity attended_key_similarity", "laptop-twins/*"),
        ("input_similarity w_q_spectral_norm", "laptop-similarity/*"),
        (f"{DEPARTING} v_sign_max --hottest-head", "twins-h200/*"),
    ],
)
def test_the_departures_in_the_documents_are_those_of_the_committed_runs(names: str, runs: str) -> None:
    printed = of_committed_runs(f"departures.py {names} --runs", runs)
    page = "laptop.md" if "laptop" in runs else "mechanism.md"
    assert printed in (REPOSITORY / "docs" / page).read_text()


@pytest.mark.parametrize(
    ("window", "runs"),
    [
        *(
            (window, ("twins-h200/flash_bf16*", "bias-h200/*"))
            for window in ("", "--last 1000", "--since 500 --until 3000")
        ),
        ("", ("early-full-h200/*", "twins-h200/flash_bf16*")),
    ],
)
def test_the_biased_layers_in_the_documents_are_those_of_the_committed_runs(window: str, runs: tuple[str, ...]) -> None:
    printed = of_committed_runs(f"delta_bias.py --by layer {window}", *runs)
    shown = "".join(["```\n", *printed.splitlines(keepends=True)[-4:], "```\n"]) if "--until" in window else printed
    assert shown in (REPOSITORY / "docs/mechanism.md").read_text()


OFFSETS_KEPT = [f"ignite-h200/sdpa_seed-{seed}" for seed in (0, *range(8, 16))]


def test_the_quantities_by_layer_in_the_documents_are_those_of_the_committed_runs() -> None:
    options = f"--since 1500 --until 2501 --verdicts {REFERENCE / 'ignite-h200'}"
    of_gpus = of_committed_runs(f"by_layer.py sensitivity {options}", "early-h200/*")
    of_laptops = of_committed_runs("by_layer.py sensitivity --since 1000 --until 1200", "laptop-similarity/*")
    assert of_gpus in (REPOSITORY / "docs/mechanism.md").read_text()
    for quantity in ("sensitivity", "input_similarity"):
        options = f"--since 3000 --until 3500 --verdicts {REFERENCE / 'ignite-h200'}"
        for attention in ("flash_bf16", "flash_exact_rowsum"):
            printed = of_committed_runs(f"by_layer.py {quantity} {options}", f"early-similarity-h200/{attention}_*")
            assert printed in (REPOSITORY / "docs/mechanism.md").read_text()
    assert of_laptops in (REPOSITORY / "docs/laptop.md").read_text()
    offsets = of_committed_runs("by_layer.py score_mean --last 1000", *OFFSETS_KEPT, "ignite-h200/standard_*")
    assert offsets in (REPOSITORY / "docs/mechanism.md").read_text()
    # The sentences on all 16 seeds of the baseline.
    for window in ("--since 3000 --until 3500", "--last 1000"):
        *_, last = of_committed_runs(
            f"by_layer.py sensitivity {window}", "early-full-h200/*", "twins-h200/flash_bf16*"
        ).splitlines()
        assert last == "largest in the layer that explodes: 12 of 16 (48 to 93 %); layer 2 in 15, layer 3 in 1"


@pytest.mark.parametrize(
    ("page", "runs"),
    [
        (
            "mechanism.md",
            ("targets-h200/*", *(f"frozen-h200/flash_{name}-at*" for name in ("bf16", "fp32", "stochastic"))),
        ),
        ("laptop.md", ("laptop-targets/flash_bf16-1bit-*", "laptop-frozen/flash_bf16-1bit_*")),
        ("laptop.md", ("laptop-targets-context/T1024-*",)),
    ],
)
def test_the_drawn_targets_in_the_documents_are_those_of_the_committed_runs(page: str, runs: tuple[str, ...]) -> None:
    assert of_committed_runs("drawn_targets.py", *runs) in (REPOSITORY / "docs" / page).read_text()


@pytest.mark.parametrize(
    ("row", "runs"),
    [
        ("1 bit, to nearest | the data", "laptop-frozen/flash_bf16-1bit_seed-*"),
        ("1 bit, to nearest | drawn, O unrounded", "laptop-targets/flash_bf16-1bit-unrounded_seed-*"),
        ("1 bit, to nearest | drawn, O rounded", "laptop-targets/flash_bf16-1bit-model_seed-*"),
        ("1 bit, at random | the data", "laptop-frozen/flash_stochastic-1bit_seed-*"),
        ("1 bit, at random | drawn, O unrounded", "laptop-targets/flash_stochastic-1bit-unrounded_seed-*"),
        ("7 bits, to nearest | the data", "laptop-frozen/flash_bf16-7bits_seed-*"),
        ("7 bits, to nearest | drawn, O unrounded", "laptop-targets/flash_bf16-7bits-unrounded_seed-*"),
    ],
)
def test_the_ratios_in_nats_in_the_documents_are_those_of_the_committed_runs(row: str, runs: str) -> None:
    last = of_committed_runs("delta_bias.py --by layer", runs).splitlines()[-1].split(" | ")
    count = len(list(REFERENCE.glob(runs)))
    assert f"| {row} | {count} | {last[2]} | {last[3]} |" in (REPOSITORY / "docs/laptop.md").read_text()


def test_the_biases_on_the_same_weights_in_the_documents_are_those_of_the_committed_runs() -> None:
    document = (REPOSITORY / "docs/mechanism.md").read_text()
    assert of_committed_runs("delta_bias.py --by layer", "frozen-h200/*") in document
    weights = ("at3000_seed-2", "at4000_seed-2", "at3500_seed-12", "at4500_seed-12")
    tables = [of_committed_runs("delta_bias.py --by layer", f"frozen-h200/flash_[bfs]*-{name}") for name in weights]
    lines = "\n".join(line for table in tables for line in table.splitlines()[-3:])
    assert f"```\n{lines}\n```" in document


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("measurements.md", ("recovery.py", "tail-h200/*")),
        ("mechanism.md", ("hottest.py", "injected-into-h200/*")),
        ("laptop.md", ("hottest.py", "laptop-selected/*")),
        ("laptop.md", ("hottest.py", "laptop-probs/*")),
        ("laptop.md", ("hottest.py", "laptop-injected-into/*")),
        ("laptop.md", ("hottest.py", "laptop-injected-into-1e-3/*")),
    ],
)
def test_lists_in_the_documents_are_those_of_the_committed_runs(page: str, command: tuple[str, str]) -> None:
    assert f"```\n{of_committed_runs(*command)}```" in (REPOSITORY / "docs" / page).read_text()


def of_committed_runs(script: str, *globs: str) -> str:
    """What the script prints of runs under runs/reference."""
    name, *arguments = shlex.split(script)
    runs = [run for pattern in globs for run in sorted(REFERENCE.glob(pattern))]
    result = call(name, *arguments, *runs)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_layers_said_to_grow_are_those_that_did() -> None:
    reports = [REFERENCE / name for name in ("ignite-h200", "paper-h200", "explosion-h200")]
    folders = [*(run for report in reports for run in sorted(report.iterdir())), REFERENCE / "replay-h200/explosion"]
    exploded = [run for run in map(RecordedRun, map(RunFolder.open, folders)) if run.onset is not None]
    layers = [run.hottest_layer for run in exploded]
    second, third = layers.count(2), layers.count(3)
    told = f"in {second} of {len(layers)} exploding runs on GPUs whose metrics are kept, the third in {third};"
    assert told in (REPOSITORY / "docs/mechanism.md").read_text()
    assert f"as in the paper, in {second} of {len(layers)} runs" in (REPOSITORY / "README.md").read_text()


def test_the_times_in_the_readme_are_those_of_the_committed_runs() -> None:
    seconds = {
        run.name: json.loads((run / "outcome.json").read_text())["seconds"]
        for run in [*(REFERENCE / "ignite-h200").glob("flash_bf16_*"), *(REFERENCE / "default-h200").iterdir()]
    }
    explosion, fixed = seconds.pop("explosion"), seconds.pop("fixed")
    readme = (REPOSITORY / "README.md").read_text()
    assert len(seconds) == 16
    assert f"within {5 * math.ceil(max(seconds.values()) / 5)} s of training on 16 of 16 seeds" in readme
    assert f"; {explosion:.0f} and {fixed:.0f} s of training (" in readme
