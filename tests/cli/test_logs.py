"""Logs of other tools on the command line, in the place of runs."""

import gzip
import json
import math
from pathlib import Path

import pytest

from flashpoint.cli.run_words import select_runs
from flashpoint.cli.watch import FollowedLogs
from tests.logs.test_readers import WRITTEN
from tests.records import call, refusal, rows, values, write_run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log whose gradient norm rises at step 500 and whose loss rises at step 600; it went on at step 300."""
    path = tmp_path / "train.log"
    steps = [*range(350), *range(300, 800)]
    path.write_text(
        "".join(f"step {at} loss {2 + 3 * (at >= 600)}.0 grad_norm {1 + 9 * (at >= 500)}\n" for at in steps)
    )
    return path


def test_logs_of_three_tools_stand_side_by_side(log: Path) -> None:
    result = call("runs", WRITTEN / "transformers_nan.json", WRITTEN / "lightning_nan.csv", log, "--format", "json")
    found = [
        (row["format"], row["outcome"], row["onset"], row["gradient norm rose"]["before"], row["not finite"]["loss"])
        for row in json.loads(result.stdout)["tables"][0]["rows"]
    ]
    assert result.returncode == 0
    assert found[0] == ("Transformers", "nonfinite at 30", 30, None, 3)
    assert found[1] == ("CSV", "stable to 9", None, None, 2)  # finite ones follow
    _, outcome, onset, before, _ = found[2]
    assert outcome == f"exploded at {onset}"
    assert 500 <= onset - before < 510  # the median of ten has doubled
    assert 600 <= onset < 700


def test_a_log_and_a_run_have_a_table_each(log: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "whole", {"name": "flash_bf16"}, steps=1000, onset=900, digest="abc")
    first, *_, last = rows(call("runs", run, log))
    assert first.startswith("| `whole` |")
    assert last.startswith(f"| `{log}` | text |")


def test_which_column_is_the_loss_is_told_behind_the_path(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,train_loss,training_loss\n0,1.0,2.0\n1,1.5,nan\n")
    line = refusal(call("runs", path))
    assert "train_loss or training_loss" in line
    assert f"'{path}:train_loss'" in line
    assert [row["loss"] for row in values("series", f"{path}:train_loss", "loss")] == [1.0, 1.5]
    assert [row["outcome"] for row in values("runs", f"{tmp_path}/*.csv:training_loss")] == ["nonfinite at 1"]
    assert "did you mean train_loss?" in refusal(call("runs", f"{path}:train_los"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.csv", b""),
        ("packed.log.gz", gzip.compress(b"step 1 loss 2\n" * 99, mtime=0)),
        ("trainer_state.json", b'{"log_history": [{"step": 1, "loss"'),
        ("trainer_state.json", b"{}"),
        ("trainer_state.json", b'{"log_history": 3}'),
        ("words.txt", b"nothing of interest\n"),
        ("no_loss.csv", b"step,accuracy\n1,0.5\n"),
        ("no_step.log", b"accuracy 2.5\n"),
        ("header.csv", b"step,loss\n"),
        ("events.out.tfevents.1.x", b"no events\n"),
        ("run-x.wandb", b":W&B and then nothing"),
        ("latin.csv", "step,loss\n1,2\n# é\n".encode("latin-1")),
    ],
)
def test_a_file_that_is_no_log_has_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert refusal(call("runs", path)).startswith(f"error: {path}: ")


def test_what_a_log_does_not_have_is_told_in_one_line(log: Path) -> None:
    for question in ("rates", "hottest", "warnings", "overhead"):
        assert str(log) in refusal(call("runs", log, "--show", question))
    for verb in ("diagnose", "report", "archive"):
        assert str(log) in refusal(call(verb, log))


def test_a_log_is_watched_and_reported_and_compared(log: Path, tmp_path: Path) -> None:
    watched = call("watch", log, "--once")
    assert watched.returncode == 0
    assert any(line.startswith(f"{log}: exploded at") for line in watched.stdout.splitlines())
    assert "A log does not tell which layer" in watched.stderr
    reported = call("report", log, WRITTEN / "transformers_nan.json", "--out", tmp_path / "page")
    assert reported.returncode == 0
    assert "exploded at" in (tmp_path / "page/report.html").read_text()
    assert call("compare", log, log).stdout.startswith("800 steps of both")


def test_a_log_that_grows_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("step 1 loss 2.0\n")
    followed = FollowedLogs(select_runs([str(path)]))
    assert [run.verdict for run in followed.now()] == ["stable to 1"]
    with path.open("a") as file:
        file.write("step 2 loss nan\n")
    assert [run.verdict for run in followed.now()] == ["nonfinite at 2"]
    path.write_text("")  # while it is written anew
    (run,) = followed.now()
    assert math.isnan(run.outcome.loss)
    assert followed.goes_on([run])


def test_a_checkpoint_of_a_trainer_is_a_log_and_no_run_of_ours(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-40"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")  # of the model
    (checkpoint / "trainer_state.json").write_bytes((WRITTEN / "transformers_nan.json").read_bytes())
    for word in (tmp_path, checkpoint):
        assert [run.verdict for run in select_runs([str(word)])] == ["nonfinite at 30"]


def test_of_several_trainings_in_a_log_it_is_told_that_the_last_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "several.csv"
    path.write_text("run,step,loss\n" + "".join(f"{run},{step},2.5\n" for run in "ab" for step in range(300)))
    assert "of several trainings in a log the last is judged" in call("runs", path).stdout
    path.write_text("step,loss\n" + "".join(f"{step},2.5\n" for step in [*range(300), *range(200, 400)]))
    assert "several trainings" not in call("runs", path).stdout
