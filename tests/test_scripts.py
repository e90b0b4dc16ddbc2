"""Figures in the documents are what the scripts print from the committed runs."""

import json
import math
import shlex
from pathlib import Path

import pytest

from flashpoint.data.tape import Tape
from flashpoint.report.series import RecordedRun
from flashpoint.run_folder import RunFolder
from flashpoint.tracking import metric_lines
from tests.conftest import REPOSITORY
from tests.report.records import call, refusal

REFERENCE = REPOSITORY / "runs/reference"


def test_the_throughput_in_the_documents_is_that_of_the_committed_runs() -> None:
    result = call("throughput.py", *sorted((REPOSITORY / "runs/reference/ranks-h200").iterdir()))
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
    printed = (REPOSITORY / "runs/reference" / table).read_text().splitlines()
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
    runs = sorted((REPOSITORY / "runs/reference" / name).iterdir())
    assert len(runs) == count
    for run in runs:
        outcome = json.loads((run / "outcome.json").read_text())
        onset = "none" if outcome["onset_step"] is None else outcome["onset_step"]
        row = f"| `{run.name}` | {outcome['outcome']} | {outcome['step']:,} | {onset} | `{outcome['digest']}` |"
        assert row in document


def test_the_runs_said_to_be_equal_are(name_of_equal: tuple[str, str]) -> None:
    one, other = (REPOSITORY / "runs/reference" / name / "outcome.json" for name in name_of_equal)
    for field in ("digest", "chain_digest", "weights_digest", "tape_digest", "onset_step"):
        assert json.loads(one.read_text())[field] == json.loads(other.read_text())[field]


@pytest.fixture(
    params=[
        ("replay-h200/proof", "replay-h200/proof-again"),
        ("replay-h200/proof", "replay-h200/proof-killed"),
        ("replay-h200/explosion", "replay-h200/explosion-rewound"),
        ("ignite-h200/flash_bf16_seed-0", "default-h200/explosion"),
        ("default-h200/explosion", "replay-default-h200/explosion-rewound"),
        ("ignite-h200/flash_bf16_seed-2", "twins-h200/flash_bf16_seed-2"),
        ("ignite-h200/flash_bf16_seed-12", "twins-h200/flash_bf16_seed-12"),
        ("probes-h200/default-unprobed", "probes-h200/default-probed"),
        ("probes-h200/default-unprobed", "replay-default-h200/proof"),
        ("replay-default-h200/proof", "replay-default-h200/proof-again"),
        ("replay-default-h200/proof", "replay-default-h200/proof-killed"),
        ("probes-h200/ignite-unprobed", "probes-h200/ignite-probed"),
        ("probes-h200/ignite-probed", "replay-h200/proof"),
        ("probes-h200/gpt2-unprobed", "probes-h200/gpt2-probed"),
        ("probes-h200/gpt2-probed", "probes-h200/gpt2-unprobed-again"),
        ("probes-h200/gpt2-probed", "probes-h200/gpt2-probed-again"),
        ("ranks-h200/ranks", "ranks-h200/ranks-again"),
        ("trainer-h200/ignite", "trainer-h200/ignite-single"),
    ]
)
def name_of_equal(request: pytest.FixtureRequest) -> tuple[str, str]:
    pair: tuple[str, str] = request.param
    return pair


def test_the_evidence_stays_small() -> None:
    assert sum(file.stat().st_size for file in REFERENCE.rglob("*") if file.is_file()) <= 40 << 20


@pytest.mark.parametrize("name", ["default-h200/explosion", "default-h200/fixed"])
def test_the_committed_tapes_are_whole(name: str) -> None:
    run = REPOSITORY / "runs/reference" / name
    outcome = json.loads((run / "outcome.json").read_text())
    tape = Tape.read(run / "tape.bin")
    assert (tape.steps, tape.digest) == (outcome["tape_steps"], outcome["tape_digest"])


def test_the_committed_twins_had_the_same_weights_and_batches() -> None:
    explosion, fixed = (
        REPOSITORY / "runs/reference/default-h200" / name / "tape.bin" for name in ("explosion", "fixed")
    )
    assert fixed.read_bytes().startswith(explosion.read_bytes())  # its header has the initial weights' digest


def test_the_committed_run_repeats_from_its_checkpoint() -> None:
    original, rewound = (
        REPOSITORY / "runs/reference/replay-h200" / name for name in ("explosion", "explosion-rewound")
    )
    by_step, again = (
        {record["step"]: record for record in map(json.loads, metric_lines(RunFolder(run).metrics)) if "loss" in record}
        for run in (original, rewound)
    )
    assert len(again) > 50
    assert all(by_step[step] == record for step, record in again.items())


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
        (["README.md", "docs/laptop.md"], ["survival.py", "laptop/*"]),
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
            ],
        ),
        (
            ["docs/mechanism.md"],
            ["survival.py --control flash_bf16", "ignite-h200/flash_bf16_seed-[0-3]", "selected-h200/*"],
        ),
        (
            ["docs/mechanism.md"],
            ["survival.py --control flash_fixed_paper", "ignite-h200/flash_fixed_paper_seed-[0-3]", "paper-h200/*"],
        ),
        (["docs/laptop.md"], ["survival.py", "laptop-variants/*", *LAPTOP]),
        (["docs/measurements.md"], ["survival.py", "screening-h200/*"]),
        (["docs/laptop.md"], ["survival.py --control flash_bf16", "laptop-selected/*"]),
        (["docs/laptop.md"], ["survival.py", "laptop-settings/*", "laptop/flash_bf16_seed-[0-3]"]),
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
                        *("centered*", "delta_*", "exact_rowsum_seed-?", "exact_rowsum_seed-1[0-4]"),
                        *("fixed_seed*", "fp32_seed*", "unrounded*"),
                    )
                ),
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
        (["docs/mechanism.md"], ["onset.py attn.delta_error.size", "injected-h200/*"]),
        (["docs/laptop.md"], ["survival.py", "laptop-injected-settings/*", "laptop-injected/bias0.001_seed-*"]),
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


DEPARTING = (
    "score_max w_q_mean_key_share w_q_spectral_norm score_mean token_similarity w_k_spectral_norm step_similarity "
    "w_q_update_mean_key_share w_q_update_first_key_share tied_rows entropy"
)


@pytest.mark.parametrize(
    ("more", "runs"),
    [("input_similarity attended_key_similarity", "laptop-twins/*"), ("v_sign_max --hottest-head", "twins-h200/*")],
)
def test_the_departures_in_the_documents_are_those_of_the_committed_runs(more: str, runs: str) -> None:
    printed = of_committed_runs(f"departures.py {DEPARTING} {more} --runs", runs)
    page = "laptop.md" if "laptop" in runs else "mechanism.md"
    assert printed in (REPOSITORY / "docs" / page).read_text()


@pytest.mark.parametrize("window", ["", "--last 1000", "--since 500 --until 3000"])
def test_the_biased_layers_in_the_documents_are_those_of_the_committed_runs(window: str) -> None:
    printed = of_committed_runs(f"delta_bias.py --by layer {window}", "twins-h200/flash_bf16*", "bias-h200/*")
    shown = "".join(["```\n", *printed.splitlines(keepends=True)[-4:], "```\n"]) if "--until" in window else printed
    assert shown in (REPOSITORY / "docs/mechanism.md").read_text()


def test_the_sensitivities_in_the_documents_are_those_of_the_committed_runs() -> None:
    runs = ("twins-h200/flash_bf16*", "twins-h200/flash_exact_rowsum_seed-2", "bias-h200/*")
    printed = of_committed_runs("sensitivity.py --since 1500 --until 2500", *runs)
    assert printed in (REPOSITORY / "docs/mechanism.md").read_text()


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
        ("laptop.md", ("hottest.py", "laptop-selected/*")),
        ("laptop.md", ("hottest.py", "laptop-probs/*")),
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


def test_a_missing_run_is_one_line() -> None:
    result = call("throughput.py", "nowhere")
    assert result.returncode == 2
    assert result.stderr == "error: nowhere: no run there (no config.json); give a run's folder, e.g. runs/NAME\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("series.py replay-h200/explosion los", "no metric los; it has "),
        ("series.py replay-h200/explosion w_q_norm --head 2/9", "no metric layer/2/head/9/w_q_norm; it has "),
        (
            "delta_bias.py replay-h200/explosion",
            "delta_error_sum of heads was not measured, or not kept; it has ",
        ),
        ("hottest.py kernels-h200", "no run there"),
        (
            "delta_bias.py twins-h200/flash_bf16_seed-12 --until 10",
            "no observed step from 0 to before step 10; give other --since, --last and --until",
        ),
    ],
)
def test_what_a_run_does_not_hold_is_one_line(command: str, told: str) -> None:
    script, *arguments = command.split()
    assert told in refusal(call(script, *arguments, cwd=REFERENCE))


def test_the_bias_of_delta_is_in_units_of_its_own_error(tmp_path: Path) -> None:
    """Two heads on 4 tokens: errors of 1 with a variance of 1 at each of 9 steps, and errors that cancel."""
    for name, value in {
        "config": {
            "attn": {"name": "flash_bf16"},
            "probes": {"sequences": 2},
            "model": {"context": 2},
            "train": {"batch_size": 4},
        },
        "manifest": {},
        "outcome": {"outcome": "exploded", "onset_step": 1500},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    lines = []
    for step in [*range(0, 450, 50), 500, 1000]:
        sums = {"layer/1/head/1": 2.0 if step < 500 else 1e9, "layer/1/head/2": (-1.0) ** (step // 50)}
        heads = [
            {f"{head}/delta_error_{name}": value for name, value in (("sum", total), ("variance", 1.0))}
            | {f"{head}/delta_error_relative_{name}": value for name, value in (("bias", total), ("noise", 3.0))}
            | {f"{head}/row_sum_relative_{name}": value for name, value in (("bias", 2 * total), ("noise", 5.0))}
            | {f"{head}/w_q_spectral_norm": 1.0}
            for head, total in sums.items()
        ]
        lines.append(json.dumps({"step": step, **heads[0], **heads[1]}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    result = call("delta_bias.py", tmp_path)
    first, second = (line.split("  ", 1)[1] for line in result.stdout.splitlines())
    # Σ = 9 · 2 over √(4 · 9 · 1) = 3 standard errors; 9 of 9 has a lower end of 0.025^(1/9) = 66 %.
    summed, relative = first.split("; ")
    assert summed == "Σ +1.80e+01 = +3.00 standard errors, positive at 9 of 9 steps (66 to 100 %)"
    assert relative == "bias +2.0e+00 ± 0.0e+00, noise 3.0e+00"
    # Five +1 and four −1: mean 1/9, t(0.975, 8) = 2.306 times √(10/9) / 3.
    assert second.startswith("Σ +1.00e+00 = +0.17 standard errors, positive at 5 of 9 steps")
    assert second.endswith("; bias +1.1e-01 ± 8.1e-01, noise 3.0e+00")
    row_sum = call("delta_bias.py", tmp_path, "--of", "row_sum")
    assert [line.split("  ", 1)[1] for line in row_sum.stdout.splitlines()] == [
        "bias +4.0e+00 ± 0.0e+00, noise 5.0e+00",
        "bias +2.2e-01 ± 1.6e+00, noise 5.0e+00",
    ]
    assert call("delta_bias.py", tmp_path, "--layers", "1").stdout == result.stdout
    refused = refusal(call("delta_bias.py", tmp_path, "--layers", "2"))
    assert refused == f"error: {tmp_path}: --layers 2: it has layers 1 to 1"
    # Of both heads: (18 + 1) over √(4 · (9 + 9)) = 2.24.
    by_layer = call("delta_bias.py", tmp_path, "--by", "layer").stdout.splitlines()
    own = f"| `{tmp_path.name}` | exploded at 1,500 | **+2.2** | +1.1e+00 ± 4.1e-01 | 3.0e+00 | 0.1 "
    # Of 4 tokens that vary by 1 (over 3) the mean square is 3/4 + (2/4)² and 3/4 + (1/4)², of both heads 29/32; N is 8.
    # Sensitivity: 8·√(29/32) / 3. Mean error of a token: 19 / (9·2·4), over 8·29/32; by step (2 ± 1) / 8.
    assert by_layer[2] == f"{own}| 2.5 | 0.04 ± 0.01 |"
    twice = call("delta_bias.py", tmp_path, tmp_path, "--by", "layer").stdout.splitlines()
    # Σz/√n = 2 · 2.24 / √2; bias over noise² = (19 / 18) / 9.
    assert twice[-4:] == [
        "| all | Σz/√n | +3.2 | | | | | |",
        "| all | bias / noise² | 0.1 (0.1 to 0.1) | | | | | |",
        "| all | sensitivity | 2.5 (2.5 to 2.5) | | | | | |",
        "| all | bias / variance | 0.04 (0.04 to 0.04) | | | | | |",
    ]
    (sensitivity,) = call("sensitivity.py", tmp_path).stdout.splitlines()[2:]
    assert sensitivity == f"| `{tmp_path.name}` | exploded at 1,500 | **2.5** |"
    refused = refusal(call("delta_bias.py", tmp_path, "--by", "layer", "--of", "row_sum"))
    assert "the Σ of that error is not recorded" in refused


def test_pooled_biases_have_an_interval_over_runs(tmp_path: Path) -> None:
    """Three runs whose biases, means over two layers and two steps, are 1, 2 and 3; the noise is 2 in all."""
    for number in (1, 2, 3):
        run = tmp_path / str(number)
        run.mkdir()
        for name, value in {
            "config": {"attn": {"name": "flash_bf16"}},
            "manifest": {},
            "outcome": {"onset_step": None},
        }.items():
            (run / f"{name}.json").write_text(json.dumps(value))
        records = []
        for step, sign in ((0, -1), (10, 1), (20, 1000)):
            heads = {"layer/1/head/1": number + sign, "layer/2/head/1": number - sign}
            biases = {f"{head}/delta_error_relative_bias": value for head, value in heads.items()}
            noises = {f"{head}/delta_error_relative_noise": 4.0 if step == 20 else 2.0 for head in heads}
            records.append(json.dumps({"step": step, **biases, **noises}))
        (run / "metrics.jsonl").write_text("".join(f"{record}\n" for record in records))
    runs = [str(tmp_path / str(number)) for number in (1, 2, 3)]

    def row(*window: str) -> str:
        (line,) = call("delta_bias.py", *runs, "--by", "attention", *window).stdout.splitlines()[2:]
        return line

    # t(0.975, 2) = 4.303 times 1/√3 is 2.48; the ratios are 1/4, 2/4, 3/4.
    own = "| `flash_bf16` | 3 | +2.0e+00 | -4.8e-01 to +4.5e+00 "
    assert row("--until", "20") == f"{own}| 2.0e+00 | 0.50 | -0.12 to 1.12 |"
    assert row("--since", "20") == f"{own}| 4.0e+00 | 0.12 | -0.03 to 0.28 |"
    # Layer 2 alone: each bias is 1000 below, as layer 1's is above.
    assert row("--since", "20", "--layers", "2").startswith("| `flash_bf16` | 3 | -1.0e+03 ")
    assert row("--since", "20", "--layers", "1", "2") == row("--since", "20")
