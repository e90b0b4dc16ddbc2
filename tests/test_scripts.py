"""What the scripts that read recorded runs print of runs made by hand, and what they refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment
from tests.report.records import MANIFEST, call, refusal, write_run

REFERENCE = REPOSITORY / "runs/reference"


def test_a_missing_run_is_one_line() -> None:
    result = call("throughput.py", "nowhere")
    assert result.returncode == 2
    assert result.stderr == "error: nowhere: no run there (no config.json); give a run's folder, e.g. runs/NAME\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("series.py replay-h200/explosion los", "no metric los; it has grad_norm, loss, lr, "),
        (
            "series.py replay-h200/explosion w_q_spectral_norm",
            "w_q_spectral_norm is of a head, give --head one of 1/1, 1/2, 1/3, 1/4, 2/1, ",
        ),
        ("series.py replay-h200/explosion w_q_spectral_norm --head 2/9", "give --head one of 1/1, "),
        ("series.py replay-h200/explosion w_q_norm --head 2/1", "no metric layer/2/head/1/w_q_norm; it has "),
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
            "seed": 0,
            "probes": {"sequences": 2},
            "model": {"context": 2},
            "train": {"batch_size": 4},
        },
        "manifest": MANIFEST,
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
    assert summed == "Σ +1.80e+01 = +3.00 standard errors, positive at 9 of 9 observed steps (66 to 100 %)"
    assert relative == "bias +2.0e+00 ± 0.0e+00, noise 3.0e+00"
    # Five +1 and four −1: mean 1/9, t(0.975, 8) = 2.306 times √(10/9) / 3.
    assert second.startswith("Σ +1.00e+00 = +0.17 standard errors, positive at 5 of 9 observed steps")
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
    assert by_layer[4] == f"{own}| 2.5 | 0.04 ± 0.01 |"
    twice = call("delta_bias.py", tmp_path, tmp_path, "--by", "layer").stdout.splitlines()
    # Σz/√n = 2 · 2.24 / √2; bias over noise² = (19 / 18) / 9.
    assert twice[-4:] == [
        "| all | Σz/√n | +3.2 | | | | | |",
        "| all | bias / noise² | 0.1 (0.1 to 0.1) | | | | | |",
        "| all | sensitivity | 2.5 (2.5 to 2.5) | | | | | |",
        "| all | bias / variance | 0.04 (0.04 to 0.04) | | | | | |",
    ]
    (sensitivity,) = call("by_layer.py", "sensitivity", tmp_path).stdout.splitlines()[4:]
    assert sensitivity == f"| `{tmp_path.name}` | exploded at 1,500 | **2.5** |"
    (mean,) = call("by_layer.py", "delta_error_sum", tmp_path).stdout.splitlines()[4:]
    assert mean == f"| `{tmp_path.name}` | exploded at 1,500 | **1.06** |"  # (18 + 1) / (9 · 2)
    assert "score_mean of heads was not measured" in refusal(call("by_layer.py", "score_mean", tmp_path))
    # Two of two: the lower end is 0.025^(1/2) = 16 %.
    *_, told = call("by_layer.py", "sensitivity", tmp_path, tmp_path, "--verdicts", tmp_path.parent).stdout.splitlines()
    assert told == "largest in the layer that explodes: 2 of 2 (16 to 100 %); layer 1 in 2"
    missing = refusal(call("by_layer.py", "sensitivity", tmp_path, "--verdicts", tmp_path))
    assert missing.startswith(f"error: {tmp_path / tmp_path.name}: no run there")
    refused = refusal(call("delta_bias.py", tmp_path, "--by", "layer", "--of", "row_sum"))
    assert "the Σ of that error is not recorded" in refused


def test_columns_of_one_name_are_told_apart(tmp_path: Path) -> None:
    names = [f"layer/{layer}/head/1/ties" for layer in (1, 2)]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 4, "loss": 3.0, names[0]: 1.0, names[1]: 2.0}) + "\n")
    alike = call("series.py", tmp_path, "loss", *names)
    assert alike.stdout == "   step        loss    1/1/ties    2/1/ties\n      4           3           1           2\n"
    assert call("series.py", tmp_path, "loss", names[0]).stdout.split("\n")[0] == "   step        loss        ties"


def test_a_bias_is_over_the_variance_that_drawn_targets_have(tmp_path: Path) -> None:
    """Four of N = 8 tokens observed at 4 steps; their errors vary by 1 about means that the targets change."""
    for name, digest, targets, means in (
        ("seen", "a", {}, (4, 4, 4, 4)),
        ("drawn", "a", {"targets": "model"}, (1, -1, 1, -1)),
        ("seen-2", "b", {"targets": "data"}, (4, 4, 4, 4)),
        ("drawn-2", "b", {"targets": "model"}, (1, -1, 1, -1)),
        ("alone", "c", {"targets": "unrounded"}, (4, 4, 4, 4)),
    ):
        run = tmp_path / name
        run.mkdir()
        for file, value in {
            "config": {
                "attn": {"name": "flash_bf16"},
                "seed": 0,
                "probes": {"sequences": 2, **targets},
                "model": {"context": 2},
                "train": {"batch_size": 4},
            },
            "manifest": {**MANIFEST, "parent": {"run": "runs/first", "from_step": 1000}},
            "outcome": {"outcome": "stable", "onset_step": None, "digest": digest},
        }.items():
            (run / f"{file}.json").write_text(json.dumps(value))
        head = "layer/1/head/1/delta_error"
        lines = [
            {"step": step, f"{head}_sum": 4.0 * mean, f"{head}_variance": 4 / 3} for step, mean in enumerate(means)
        ]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    names = ("seen", "drawn", "seen-2", "drawn-2", "alone")
    printed = call("drawn_targets.py", *(tmp_path / name for name in names)).stdout.splitlines()
    # Mean squares 1 + 4² and 1 + 1²: 17 / 2. Bias 8·4 and 8·(±1) over 8²·2; t(0.975, 3) = 3.182 times 0.0722 / 2.
    row = "| `flash_bf16` from step 1,000 of `runs/first` | 1 "
    assert printed[4:7] == [
        f"{row}| 8.50 |  | 0.25 ± 0.00 |  | 0.00 ± 0.11 |",
        f"{row}| 8.50 |  | 0.25 ± 0.00 |  | 0.00 ± 0.11 |",
        f"{row}|  |  |  | *0.03 ± 0.00* |  |",  # 8·4 over its own 8²·17
    ]
    assert printed[-3:] == [
        "| variance, data (n = 2) | 8.50 (8.50 to 8.50) |",
        "| bias, data (n = 2) | 0.25 (0.25 to 0.25) |",
        "| bias, model (n = 2) | 0.00 (0.00 to 0.00) |",
    ]
    refused = refusal(call("drawn_targets.py", tmp_path / "seen", tmp_path / "drawn", tmp_path / "drawn"))
    assert refused == f"error: {tmp_path / 'drawn'}: a second run with targets=model of digest a"


def test_pooled_biases_have_an_interval_over_runs(tmp_path: Path) -> None:
    """Three runs whose biases, means over two layers and two steps, are 1, 2 and 3; the noise is 2 in all."""
    for number in (1, 2, 3):
        run = tmp_path / str(number)
        run.mkdir()
        for name, value in {
            "config": {"attn": {"name": "flash_bf16"}, "seed": number},
            "manifest": MANIFEST,
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
        (line,) = call("delta_bias.py", *runs, "--by", "attention", *window).stdout.splitlines()[4:]
        return line

    # t(0.975, 2) = 4.303 times 1/√3 is 2.48; the ratios are 1/4, 2/4, 3/4.
    own = "| `flash_bf16` | 3 | +2.0e+00 | -4.8e-01 to +4.5e+00 "
    assert row("--until", "20") == f"{own}| 2.0e+00 | 0.50 | -0.12 to 1.12 |"
    assert row("--since", "20") == f"{own}| 4.0e+00 | 0.12 | -0.03 to 0.28 |"
    # Layer 2 alone: each bias is 1000 below, as layer 1's is above.
    assert row("--since", "20", "--layers", "2").startswith("| `flash_bf16` | 3 | -1.0e+03 ")
    assert row("--since", "20", "--layers", "1", "2") == row("--since", "20")


def test_a_page_is_filled_with_what_commands_print(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    start, end = '<!-- [[[cog shell("{}") ]]] -->', "<!-- [[[end]]] -->\n"
    table = start.format("printf '%s\\\\n' above '| a |' '|---|' '| 1 |'")
    own = start.format("python scripts/outcomes.py runs/reference/default-h200/explosion | tail -1")
    page.write_text(f"{table}\nold\n{end}\nprose\n\n{own}\n{end}")
    before = page.read_text()
    check = call("refresh_docs.py", "--check", page)
    assert check.returncode == 5
    assert "-old" in check.stdout.splitlines()
    assert page.read_text() == before
    assert call("refresh_docs.py", page).returncode == 0
    first, second = page.read_text().split("\nprose\n\n")
    assert first.endswith(f"'| 1 |'\n```\n\nabove\n| a |\n|---|\n| 1 |\n\n{end}")
    row = "| `explosion` | exploded | 12,920 | 12,362 | `e79bf37268b0d51a` |"
    assert second.endswith(f"/explosion | tail -1\n{row}\n```\n{end}")
    assert call("refresh_docs.py", "--check", page).returncode == 0

    page.write_text(f"{start.format('python scripts/outcomes.py nowhere')}\n{end}")
    before = page.read_text()
    failed = call("refresh_docs.py", page)
    assert failed.returncode != 0
    assert "nowhere: no run there" in failed.stderr
    assert page.read_text() == before


def test_a_run_that_has_not_ended_is_listed_among_those_that_have(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, {"name": "flash_bf16"}, seed=seed, steps=9)
        for seed, name in enumerate(("whole", "killed"))
    ]
    for name in runs:
        outcome = json.loads((Path(name) / "outcome.json").read_text())
        (Path(name) / "outcome.json").write_text(json.dumps({**outcome, "digest": "abc"}))
    (tmp_path / "killed/outcome.json").unlink()
    assert call("outcomes.py", *runs).stdout.splitlines()[2:] == [
        "| `whole` | stable | 9 | none | `abc` |",
        "| `killed` | not ended | | | |",
    ]
    refused = refusal(call("survival.py", *runs))
    assert refused == f"error: {runs[1]}/outcome.json: missing; the run has not ended, resume={runs[1]} goes on with it"


def test_a_control_that_is_not_there_is_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), {"name": "flash_bf16"}, seed=seed) for seed in range(2)]
    told = "no flash_fp32 among these runs to test against; choose one with --control\n"
    assert call("survival.py", *runs).stderr == told
    assert call("survival.py", *runs, "--control", "flash_bf16").stderr == ""


def test_a_reader_who_has_had_enough_is_no_error() -> None:
    command = f"{sys.executable} scripts/hottest.py {'runs/reference/default-h200/explosion ' * 400} | head -1"
    result = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert result.stdout.startswith("run ")
    assert result.stderr == ""
