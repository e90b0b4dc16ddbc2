"""``flashpoint compare``: where two runs part, and the exit status that says so."""

import json
import shutil
from pathlib import Path

import pytest

from flashpoint.runs.chain import ChainWriter
from tests.records import MANIFEST, call, refusal, write_run

STEPS = [(2.5, 0.5, 0), (2.25, 0.75, 2**64 - 1), (float("nan"), float("inf"), 7)]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    kept = {"one": STEPS, "same": STEPS, "longer": [*STEPS, STEPS[0]], "other": [(1.0, 0.5, 0)]}
    kept["state"] = [STEPS[0], (2.25, 0.75, 1), STEPS[2]]
    for name, steps in kept.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        writer = ChainWriter(tmp_path / name / "chain.bin")
        for step in steps:
            writer.append(*step)
    return tmp_path


@pytest.mark.parametrize(
    ("other", "status", "told"),
    [
        ("same", 0, "equal: 3 steps"),
        ("longer", 0, "equal for the 3 steps that both have; one has 4"),
        (
            "other",
            1,
            "first difference at step 0: loss 2.5 against 1.0; losses differ by up to 1.5 nats (step 0), "
            "by 1.5 at step 0",
        ),
    ],
)
def test_it_says_where_two_runs_part(runs: Path, other: str, status: int, told: str) -> None:
    result = call("compare", "one", other, cwd=runs)
    assert (result.returncode, result.stdout) == (status, f"{told}\n"), result.stderr


def test_a_chain_that_was_cut_is_not_taken_for_a_shorter_run(runs: Path) -> None:
    cut = write_run(runs / "cut", {"name": "flash_bf16"}, steps=4)
    shutil.copy(runs / "one/chain.bin", cut)
    told = f"error: {cut}: its chain ends at step 3, the run at 4; restore chain.bin"
    assert refusal(call("compare", "one", cut, cwd=runs)) == told


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """Runs of 3 steps: ``loss`` parts from ``one`` at step 1, ``batch`` at step 2, ``silent`` handed over no batch."""
    losses: dict[str, list[float | str]] = {
        "one": [3.0, 2.5, "nan"], "loss": [3.0, 2.75, 2.0], "batch": [3.0, 2.5, "nan"], "silent": [3.0, 2.5, "nan"],
        "no_loss": [], "same": [3.0, 2.5, "nan"],
    }  # fmt: skip
    for name, values in losses.items():
        run = Path(write_run(tmp_path / name, {"name": "own"}, steps=3))
        (run / "manifest.json").write_text(json.dumps({**MANIFEST, "watched": True}))
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(values)] or [{"step": 0, "rate": 1.0}]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        if name != "silent":
            last = "9" if name == "batch" else "c"
            (run / "batches.csv").write_text(f"0,{'a' * 16}\n1,{'b' * 16}\n2,{last * 16}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("other", "status", "told"),
    [
        ("one", 0, "3 steps of both: the same batches in 3 steps; equal losses"),
        ("silent", 0, "3 steps of both: no batches of both were handed over; equal losses"),
        ("batch", 1, "3 steps of both: other batches from step 2 on; equal losses"),
        (
            "loss",
            1,
            "3 steps of both: the same batches in 3 steps; losses differ from step 1 on, 2.5 against 2.75, by up to "
            "inf nats (step 2), by inf at step 2",
        ),
    ],
)
def test_watched_runs_are_compared_by_batches_and_losses(watched: Path, other: str, status: int, told: str) -> None:
    result = call("compare", "one", other, cwd=watched)
    assert (result.returncode, result.stdout) == (status, f"{told}\n"), result.stderr
    row = json.loads(call("compare", "one", other, "--format", "json", cwd=watched).stdout)["tables"][0]["rows"][0]
    parts = {"batch": ("batch", 2), "loss": ("loss", 1)}.get(other, (None, None))
    assert (row["in"], row["first difference"]) == parts
    assert row["batches"] == {"silent": "unknown", "batch": "other"}.get(other, "same")


def test_watched_runs_of_two_lengths_and_one_that_has_not_ended_are_told_so(watched: Path) -> None:
    with (watched / "same/batches.csv").open("a") as rows:
        rows.write(f"3,{'d' * 16}\n")
    with (watched / "one/batches.csv").open("a") as rows:
        rows.write(f"3,{'e' * 16}\n")  # of no loss that both have
    with (watched / "same/metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "loss": 2.0}\n')
    (watched / "same/outcome.json").unlink()
    result = call("compare", "one", "same", cwd=watched)
    told = "3 steps of both: the same batches in 3 steps; equal losses; one has 3, the other 4; same has not ended\n"
    assert (result.returncode, result.stdout) == (0, told), result.stderr


@pytest.mark.parametrize("row", ["2", "2,", "2,123", "2,00000000000000000"])
def test_a_row_that_is_no_fingerprint_is_no_other_batch(watched: Path, row: str) -> None:
    (watched / "batch/batches.csv").write_text(f"0,{'a' * 16}\n1,{'b' * 16}\n{row}\n")
    assert "batches.csv: line 3 has no fingerprint; restore" in refusal(call("compare", "one", "batch", cwd=watched))


def test_what_cannot_be_compared_by_losses_is_one_line(watched: Path) -> None:
    assert refusal(call("compare", "one", "no_loss", cwd=watched)).startswith("error: no_loss: has no losses; give")
    write_run(watched / "trained", {"name": "flash_bf16"}, steps=3)
    assert "trained: was not watched, and the other run was" in refusal(call("compare", "one", "trained", cwd=watched))


def test_other_hardware_is_told_where_the_bits_differ(runs: Path) -> None:
    for name, hardware in {"one": "NVIDIA H200", "state": "NVIDIA A100", "same": "NVIDIA A100"}.items():
        (runs / name / "manifest.json").write_text(json.dumps({**MANIFEST, "hardware": hardware}))
    told = "; one was made on NVIDIA H200, torch 2.99, the other on NVIDIA A100, torch 2.99\n"
    assert call("compare", "one", "state", cwd=runs).stdout.endswith(told)
    assert call("compare", "one", "same", cwd=runs).stdout == "equal: 3 steps\n"


def test_a_difference_is_a_row(runs: Path) -> None:
    result = call("compare", "one", "state", "--format", "json", cwd=runs)
    assert result.returncode == 1
    (table,) = json.loads(result.stdout)["tables"]
    (row,) = table["rows"]
    assert (row["runs"], row["steps of both"], row["equal before"]) == ("different", 3, 1)
    assert (row["first difference"], row["in"]) == (1, "state")
    assert row["values"] == {"one": "f" * 16, "other": f"{1:016x}"}


def test_bad_input_is_one_line(runs: Path) -> None:
    assert refusal(call("compare", "one", "nowhere", cwd=runs)).startswith("error: nowhere: no run there")
    (runs / "one/chain.bin").unlink()
    assert "one/chain.bin" in refusal(call("compare", "one", "same", cwd=runs))
